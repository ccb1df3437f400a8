"""Temporaries of TensorIterator: operands converted to the common type, wrapped Python numbers.

native/TensorIterator.cpp, TensorIteratorBase::compute_types: on the CPU every input whose type is
not the common one is copied whole, and so is an output that was given in another type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import dense_bytes
from pytest_torchmem.operators.registry import operator

Operand = Tensor | bool | int | float | complex

_ARITHMETIC = [
    "add",
    "sub",
    "mul",
    "div",
    "rsub",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "remainder",
    "fmod",
    "hypot",
    "copysign",
    "nextafter",
    "xlogy",
    "special_xlog1py",
    "logaddexp",
    "logaddexp2",
    "floor_divide",
    "heaviside",
    "gcd",
    "lcm",
    "igamma",
    "igammac",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "special_zeta",
    "addcmul",
    "addcdiv",
    "special_chebyshev_polynomial_t",
    "special_chebyshev_polynomial_u",
    "special_chebyshev_polynomial_v",
    "special_chebyshev_polynomial_w",
    "special_shifted_chebyshev_polynomial_t",
    "special_shifted_chebyshev_polynomial_u",
    "special_shifted_chebyshev_polynomial_v",
    "special_shifted_chebyshev_polynomial_w",
    "special_hermite_polynomial_h",
    "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
    "__lshift__",
    "__rshift__",
]

_WITHOUT_IN_PLACE = frozenset(
    (
        "rsub",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "logaddexp",
        "logaddexp2",
        "__lshift__",
        "__rshift__",
    )
)
_COMPARISON = ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"]

_UNARY_FLOAT = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cos",
    "cosh",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logit",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "special_entr",
    "special_erfcx",
    "special_i0e",
    "special_i1",
    "special_i1e",
    "special_log_ndtr",
    "special_ndtri",
    "special_bessel_j0",
    "special_bessel_j1",
    "special_bessel_y0",
    "special_bessel_y1",
    "i0",
    "special_modified_bessel_i0",
    "special_modified_bessel_i1",
    "special_modified_bessel_k0",
    "special_modified_bessel_k1",
    "special_scaled_modified_bessel_k0",
    "special_scaled_modified_bessel_k1",
    "special_spherical_bessel_j0",
    "special_airy_ai",
    "polygamma",
]


def wrapped(number: object) -> int:
    """Bytes of a Python number as a tensor: double, int64, bool or complex double."""
    if isinstance(number, bool):
        return 1
    return 16 if isinstance(number, complex) else 8


def _wrapped_type(number: object) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.complex128 if isinstance(number, complex) else torch.float64


def converted(operand: object, common: torch.dtype) -> int:
    """Bytes of an operand's copy in the common type, and of the number it may be wrapped from."""
    if isinstance(operand, Tensor):
        return 0 if operand.dtype == common else dense_bytes(operand, common)
    if not isinstance(operand, (bool, int, float, complex)):
        return 0
    cast = 0 if _wrapped_type(operand) == common else common.itemsize
    return wrapped(operand) + cast


@operator(*(f"aten::{name}" for name in _ARITHMETIC)).workspace("cpu")
def arithmetic(outputs: Tensor, operands: list[Any]) -> int:
    """Operands in another type than the result's; build_binary_op and its kin."""
    return sum(converted(operand, outputs.dtype) for operand in operands[:3])


@operator(
    *(
        f"aten::{name}_"
        for name in _ARITHMETIC
        if not name.startswith("special") and name not in _WITHOUT_IN_PLACE
    )
).workspace("cpu")
def arithmetic_in_place(operands: list[Any]) -> int:
    """As out of place; a target that is not of the common type is copied twice."""
    target, *operands = operands
    common = target.dtype
    for operand in operands:
        if isinstance(operand, Tensor):
            common = torch.result_type(
                torch.empty(target.shape, dtype=common, device="meta"), operand
            )
    copies = sum(converted(operand, common) for operand in operands)
    return copies + 2 * converted(target, common)


@operator(
    *(f"aten::clamp{bounds}{suffix}" for bounds in ("", "_min", "_max") for suffix in ("", "_"))
).workspace("cpu")
def clamp(outputs: Tensor, tensors: list[Tensor]) -> int:
    """Bounds that are numbers stay numbers; native/cpu/TensorCompareKernel.cpp,
    clamp_scalar_kernel_impl.
    """
    return sum(converted(tensor, outputs.dtype) for tensor in tensors)


@operator(
    *(f"aten::{name}" for name in _COMPARISON),
    *(f"aten::{name}_" for name in _COMPARISON if not name.startswith("logical")),
).workspace("cpu")
def comparison(input: Tensor, other: Operand) -> int:
    """Both sides in their common type; build_comparison_op."""
    common = torch.result_type(input, other)
    return converted(input, common) + converted(other, common)


@operator(*(f"aten::{name}" for name in _UNARY_FLOAT)).workspace("cpu")
def unary_float(outputs: Tensor, tensors: list[Tensor]) -> int:
    """Integers are copied to float first; build_unary_float_op."""
    return sum(converted(tensor, outputs.dtype) for tensor in tensors)


@operator("aten::pow").workspace("cpu")
def power(outputs: Tensor, input: Operand, exponent: Operand) -> int:
    """A number as exponent stays a number; native/Pow.cpp, pow_tensor_scalar."""
    if not isinstance(exponent, Tensor):
        return converted(input, outputs.dtype) if isinstance(input, Tensor) else 0
    return converted(input, outputs.dtype) + converted(exponent, outputs.dtype)


@operator("aten::abs", "aten::angle").workspace("cpu")
def complex_to_real(input: Tensor) -> int:
    """The complex result before its real part is taken; native/UnaryOps.cpp,
    unary_op_impl_with_complex_to_float.
    """
    return dense_bytes(input) if input.dtype.is_complex else 0


selection = operator("aten::where", source="native/TensorCompare.cpp, where_self_out")


@selection.workspace("cpu")
def converted_branches(outputs: Tensor, input: Tensor, other: Tensor) -> int:
    """Both branches in the result's type."""
    return converted(input, outputs.dtype) + converted(other, outputs.dtype)


@selection.workspace("cuda")
def copied_branches(
    outputs: Tensor, condition: Tensor, input: Tensor, other: Tensor
) -> tuple[int, ...]:
    """Copies of what has another type than the result; exact, native/TensorCompare.cpp."""
    copies = (
        dense_bytes(found, outputs.dtype) if found.dtype != outputs.dtype else 0
        for found in (input, other)
    )
    return (*copies, 0 if condition.dtype is torch.bool else condition.numel())
