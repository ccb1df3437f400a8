"""Temporaries of TensorIterator: operands converted to the common type, wrapped Python numbers.

native/TensorIterator.cpp, TensorIteratorBase::compute_types: on the CPU every input whose type is
not the common one is copied whole, and so is an output that was given in another type.
"""

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.geometry import dense_bytes, lying_alike, scalar_type, type_of_number
from pytest_torchmem.operators.registry import OperatorKind, UnknownOutputs, aten, operator
from pytest_torchmem.operators.workspace import ALL, Request
from pytest_torchmem.torch_private.kernels import run_on_meta
from pytest_torchmem.torch_private.names import TORCH_VERSION

Operand = Tensor | bool | int | float | complex

_ARITHMETIC = """
    add sub mul div atan2 remainder fmod hypot copysign nextafter xlogy floor_divide
    heaviside gcd lcm igamma igammac bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift addcmul addcdiv
"""
"""With a form in place each."""
_ARITHMETIC_OUT_OF_PLACE = """
    rsub maximum minimum fmax fmin special_xlog1py logaddexp logaddexp2 special_zeta
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
    special_legendre_polynomial_p __lshift__ __rshift__
"""
_COMPARISONS = "eq ne lt le gt ge"
_LOGICAL = "logical_and logical_or logical_xor"
_UNARY_FLOAT = """
    acos acosh asin asinh atan atanh cos cosh digamma erf erfc erfinv exp exp2 expm1 lgamma
    log log10 log1p log2 logit reciprocal rsqrt sigmoid sin sinc sinh sqrt tan tanh
    special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_ndtri special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 i0
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai polygamma
"""
_OTHER_DTYPE = """
    angle complex eq frexp ge greater greater_equal gt imag isfinite isinf isnan isneginf
    isposinf isreal le less less_equal logical_and logical_not logical_or logical_xor lt ne
    not_equal polar real signbit
"""
"""What answers floating tensors in another dtype than theirs."""


operator(*aten(_OTHER_DTYPE), other_dtype=True)
# tools/autograd/derivatives.yaml; on a view the node stands inside of a ``CopySlices``.
operator("aten::mul_.Tensor", "aten::div_.Tensor", "aten::div_.Tensor_mode", saves_number=True)
# Made of a power and a product up to torch 2.13, and then one kernel for every backend.
if TORCH_VERSION >= (2, 14):
    operator("aten::ldexp.Tensor", "aten::ldexp_", kind=OperatorKind.LEAF)

operator("aten::isfinite", unknown_outputs=UnknownOutputs.TRUE)
operator(*aten("isinf isnan isneginf isposinf"), unknown_outputs=UnknownOutputs.FALSE)
for _suffix in (".Tensor", ".Scalar"):
    operator(*aten(_COMPARISONS, _suffix), unknown_outputs=UnknownOutputs.COMPARED)
operator(
    *aten("logical_and bitwise_and.Tensor bitwise_and.Scalar mul.Tensor mul.Scalar"),
    unknown_outputs=UnknownOutputs.AND,
)
operator(*aten("logical_or bitwise_or.Tensor bitwise_or.Scalar"), unknown_outputs=UnknownOutputs.OR)
operator("aten::logical_not", "aten::bitwise_not", unknown_outputs=UnknownOutputs.NOT)


def like_operands(tensors: list[Tensor]) -> Tensor:
    """A TensorIterator of all: where their layouts disagree, the first decides."""
    result: Tensor = run_on_meta(torch.ops.aten.add.Tensor, *tensors)
    return result


def like_first(tensors: list[Tensor]) -> Tensor:
    """As the first tensor lies."""
    return lying_alike(tensors[0])


def converted(operand: object, common: torch.dtype) -> int:
    """Bytes of an operand's copy in the common type, and of the number it may be wrapped from."""
    if isinstance(operand, Tensor):
        return 0 if operand.dtype == common else dense_bytes(operand, common)
    if not isinstance(operand, (bool, int, float, complex)):
        return 0
    own = type_of_number(operand)
    return own.itemsize + (0 if own == common else common.itemsize)


_NUMBERS: dict[torch.dtype, Any] = {
    torch.bool: True,
    torch.int64: 1,
    torch.float64: 1.0,
    torch.complex128: 1j,
}
"""A number of each type that numbers have in a tensor of their own."""


def common_type(one: Tensor, other: Operand, *, given: Tensor) -> torch.dtype:
    """Return the type that both are computed in; native/TypeProperties.cpp, result_type.

    A tensor without data beside those that a call was ``given`` stands for a Python number, which
    decides less than a tensor without sides.
    """
    if isinstance(other, Tensor) and other.is_meta and not (given.is_meta or other.dim()):
        other = _NUMBERS.get(other.dtype, other)
    return torch.result_type(one, other)


@operator(*aten(_ARITHMETIC + _ARITHMETIC_OUT_OF_PLACE)).workspace("cpu")
def arithmetic(outputs: Tensor, operands: list[Any]) -> int:
    """Operands in another type than the result's; build_binary_op and its kin."""
    return sum(converted(operand, outputs.dtype) for operand in operands[:3])


@operator(*aten(_ARITHMETIC, "_"), "aten::__ilshift__", "aten::__irshift__").workspace("cpu")
def arithmetic_in_place(operands: list[Any]) -> int:
    """As out of place; a target that is not of the common type is copied twice."""
    target, *operands = operands
    common = target.dtype
    for operand in operands:
        if isinstance(operand, Tensor):
            like_target = torch.empty(target.shape, dtype=common, device="meta")
            common = common_type(like_target, operand, given=target)
    copies = sum(converted(operand, common) for operand in operands)
    return copies + 2 * converted(target, common)


@operator(
    *(f"aten::clamp{bounds}{suffix}" for bounds in ("", "_min", "_max") for suffix in ("", "_"))
).workspace("cpu")
def clamp(outputs: Tensor, tensors: list[Tensor]) -> int:
    """Bounds that are numbers stay so; cpu/TensorCompareKernel.cpp, clamp_scalar_kernel_impl."""
    return sum(converted(tensor, outputs.dtype) for tensor in tensors)


@operator(*aten(_COMPARISONS), *aten(_LOGICAL), *aten(_COMPARISONS, "_")).workspace("cpu")
def comparison(outputs: Tensor, input: Tensor, other: Operand) -> int:
    """Both sides in their common type, an output of neither it nor bool; build_comparison_op."""
    common = common_type(input, other, given=input)
    answers = 0 if outputs.dtype in (torch.bool, common) else dense_bytes(outputs, common)
    return converted(input, common) + converted(other, common) + answers


@operator(*aten(_UNARY_FLOAT)).workspace("cpu")
def unary_float(outputs: Tensor, tensors: list[Tensor]) -> int:
    """Integers are copied to float first; build_unary_float_op."""
    return sum(converted(tensor, outputs.dtype) for tensor in tensors)


@operator("aten::pow").workspace("cpu")
def power(outputs: Tensor, input: Operand, exponent: Operand) -> int:
    """A number as exponent stays a number; native/Pow.cpp, pow_tensor_scalar."""
    if not isinstance(exponent, Tensor):
        return converted(input, outputs.dtype) if isinstance(input, Tensor) else 0
    return converted(input, outputs.dtype) + converted(exponent, outputs.dtype)


@operator("aten::pow.Scalar").workspace("cuda")
def base_on_gpu(input: complex) -> int:
    """The base in a tensor on the GPU, unless it is 1; native/Pow.cpp, pow_Scalar_out."""
    return 0 if input == 1 else type_of_number(input).itemsize


@operator("aten::abs", "aten::angle").workspace()
def complex_to_real(input: Tensor) -> int:
    """The complex result before it is real; UnaryOps.cpp, unary_op_impl_with_complex_to_float."""
    return dense_bytes(input) if input.dtype.is_complex else 0


selection = operator(
    "aten::where", other_dtype=True, source="native/TensorCompare.cpp, where_self_out"
)


@operator("aten::where.self").meta()
def selected(condition: Tensor, input: Any, other: Any) -> Tensor:
    """Laid out as by the tensor iterator, of whose operands the condition is the first, and the
    others are converted before.

    ``addcmul`` hands three to it in the same way. The Python function that torch has for ``meta``
    imports the compiler.
    """
    if condition.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(
            "where expected condition to be a boolean tensor, but got a tensor with dtype "
            + scalar_type(condition)
        )
    dtype = torch.result_type(input, other)
    operands = [torch.empty_strided(condition.shape, condition.stride(), device="meta")]
    for one in (input, other):
        if not isinstance(one, Tensor):
            operands.append(torch.empty((), device="meta"))
            continue
        if one.dtype is not dtype:
            one = run_on_meta(torch.ops.aten.empty_like.default, one, dtype=dtype)
        operands.append(torch.empty_strided(one.shape, one.stride(), device="meta"))
    laid_out = run_on_meta(torch.ops.aten.addcmul.default, *operands)
    return torch.empty_strided(laid_out.shape, laid_out.stride(), dtype=dtype, device="meta")


@operator("aten::where.self_out").meta()
def selected_into(condition: Tensor, input: Any, other: Any, out: Tensor) -> Tensor:
    """The same in what is given, which gets the layout with the shape where it has another."""
    made = selected(condition, input, other)
    if made.dtype is not out.dtype:  # torch says what is wrong
        return torch.where(condition, input, other, out=out)
    if out.shape != made.shape:
        out.resize_(made.shape).as_strided_(made.shape, made.stride())
    return out


@selection.workspace("cpu")
def converted_branches(outputs: Tensor, input: Tensor, other: Tensor) -> int:
    """Both branches in the result's type."""
    return converted(input, outputs.dtype) + converted(other, outputs.dtype)


@selection.workspace("cuda")
def copied_branches(
    outputs: Tensor, condition: Tensor, input: Tensor, other: Tensor
) -> tuple[Request, ...]:
    """Copies of what has another type than the result; exact, native/TensorCompare.cpp."""
    copies = (converted(found, outputs.dtype) for found in (input, other))
    return (*copies, 0 if condition.dtype is torch.bool else condition.numel(), ALL)


@operator("aten::rrelu_with_noise", "aten::rrelu_with_noise_").workspace("cpu")
def mean_of_bounds(training: bool) -> int:
    """The slope in evaluation, by tensors of numbers; Activation.cpp, rrelu_with_noise_out_cpu."""
    return 0 if training else 48


@operator("prims::fma").decomposition()
def multiplied_and_added(call: GivenCall) -> Any:
    """A product and a sum, one after the other: what Inductor's decompositions of optimizers call,
    where its graph is not fused; torch/_inductor/inductor_prims.py, ``fma``.
    """
    first, second, third = call.args
    return first * second + third
