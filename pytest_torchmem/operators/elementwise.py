"""Temporaries of TensorIterator: operands converted to the common type, wrapped Python numbers, and
what reductions take.

native/TensorIterator.cpp, TensorIteratorBase::compute_types: on the CPU every input whose type is
not the common one is copied whole, and so is an output that was given in another type.

Kernels on lists of tensors read addresses from the launch's own arguments, as fused optimizers do:
native/cuda/MultiTensorApply.cuh; exact.

Reductions have partial results of blocks on CUDA, upcasts and results per thread on the CPU
(native/ReduceOps.cpp, native/TensorIteratorReduce.cpp). native/cuda/Reduce.cuh of 2.13:
``setReduceConfig``, ``ReduceConfig::global_memory_size``, ``ReduceConfig::semaphore_size`` and
``gpu_reduce_kernel``; the order and merging of dimensions is native/TensorIterator.cpp,
``reorder_dimensions`` and ``coalesce_dimensions``. An input of another type than the result is
copied (native/ReduceOpsUtils.h, ``make_reduction_from_out_ty``), but for 16-bit input of a float
result, which is read as it is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall, meta_result
from pytest_torchmem.operators.registry import OperatorKind, UnknownOutputs, aten, operator
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace import (
    ALL,
    CONTIGUOUS,
    HALVES,
    Request,
    accumulation_type,
    ceil_div,
    dense_bytes,
    is_dense,
    lying_alike,
    made_like,
    passing,
    scalar_type,
    type_of_number,
)
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_on_meta
from pytest_torchmem.torch_private.names import TORCH_VERSION

Operand = Tensor | bool | int | float | complex
_NUMBER = (bool, int, float, complex)

_COMPARISONS = "eq ne lt le gt ge"
_OTHER_DTYPE = """
    angle complex eq frexp ge greater greater_equal gt imag isfinite isinf isnan isneginf
    isposinf isreal le less less_equal logical_and logical_not logical_or logical_xor lt ne
    not_equal polar real signbit where
"""
"""What answers floating tensors in another dtype than theirs."""

operator(_OTHER_DTYPE, other_dtype=True)
# tools/autograd/derivatives.yaml; on a view the node stands inside of a ``CopySlices``.
operator("aten::mul_.Tensor", "aten::div_.Tensor", "aten::div_.Tensor_mode", saves_number=True)
# Made of a power and a product up to torch 2.13, and then one kernel for every backend.
if TORCH_VERSION >= (2, 14):
    operator("aten::ldexp.Tensor", "aten::ldexp_", kind=OperatorKind.LEAF)

operator("aten::isfinite", unknown_outputs=UnknownOutputs.TRUE)
operator("isinf isnan isneginf isposinf", unknown_outputs=UnknownOutputs.FALSE)
for _suffix in (".Tensor", ".Scalar"):
    operator(*aten(_COMPARISONS, _suffix), unknown_outputs=UnknownOutputs.COMPARED)
operator(
    "logical_and bitwise_and.Tensor bitwise_and.Scalar mul.Tensor mul.Scalar",
    unknown_outputs=UnknownOutputs.AND,
)
operator("logical_or bitwise_or.Tensor bitwise_or.Scalar", unknown_outputs=UnknownOutputs.OR)
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
    if not isinstance(operand, _NUMBER):
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


def in_common_type(
    spec: OperatorSpec, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any, **_: Any
) -> int:
    """Bytes of what is converted to the type that the CPU's kernel of an iterated operator computes
    in: operands, numbers among them, and an output of another type;
    ``TensorIteratorBase::compute_types``. Comparisons write truth values as they are.
    """
    given = {**dict(zip(spec.argument_names, args, strict=False)), **kwargs}
    numbers = {"self", "other", *(spec.argument_names[at] for at in spec.numbers(args))}
    operands = [
        one
        for name, one in given.items()
        if name not in spec.mutated_names
        and (isinstance(one, Tensor) or (name in numbers and isinstance(one, _NUMBER)))
    ]
    made, common = next(iter(argument_tensors(outputs)), None), _common_type(operands)
    result = common if made is None or spec.mutated else made.dtype
    if result is not common and spec.mutated_names:
        rest = {name: one for name, one in kwargs.items() if name not in spec.mutated_names}
        result = argument_tensors(meta_result(spec.overload.overloadpacket, *args, **rest))[0].dtype
    if result is not torch.bool and torch.promote_types(common, result) is result:
        common = result  # integers are computed as floating numbers
    written = 0 if made is None or made.dtype is torch.bool else converted(made, common)
    return written + sum(converted(operand, common) for operand in operands)


def _common_type(operands: Sequence[Operand]) -> torch.dtype:
    """Return the type that all are computed in; native/TypeProperties.cpp, result_type.

    A tensor without data beside others that have some stands for a Python number, which decides
    less than a tensor without sides, and that less than one with some.
    """
    hollow = all(one.is_meta for one in operands if isinstance(one, Tensor))

    def meant(one: Operand) -> Any:
        is_number = isinstance(one, Tensor) and one.is_meta and not (hollow or one.dim())
        return _NUMBERS.get(one.dtype, one) if isinstance(one, Tensor) and is_number else one

    def rank(one: Operand) -> int:
        return -one.dim() if isinstance(one, Tensor) else 1

    first, *others = sorted(map(meant, operands), key=rank)
    dtype: torch.dtype = first.dtype
    for other in others:
        dtype = torch.result_type(torch.empty(first.shape, dtype=dtype, device="meta"), other)
    return dtype


# A number as exponent stays a number; native/Pow.cpp, ``TORCH_META_FUNC2(pow, Tensor_Scalar)``.
operator("aten::pow.Tensor_Scalar").workspace("cuda")(
    lambda outputs, input: converted(input, outputs.dtype)
)
# The base in a tensor on the GPU, unless it is 1; native/Pow.cpp, pow_Scalar_out.
operator("aten::pow.Scalar").workspace("cuda")(
    lambda input: 0 if input == 1 else type_of_number(input).itemsize
)
# The complex result before it is real; UnaryOps.cpp, unary_op_impl_with_complex_to_float.
operator("abs angle").workspace()(lambda input: dense_bytes(input) if input.dtype.is_complex else 0)


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


@operator("aten::where").workspace()
def converted_branches(
    machine: Gpu | Host, outputs: Tensor, condition: Tensor, input: Tensor, other: Tensor
) -> int | tuple[Request, ...]:
    """Both branches in the result's type; exact, native/TensorCompare.cpp, where_self_out."""
    copies = [converted(found, outputs.dtype) for found in (input, other)]
    if isinstance(machine, Host):
        return sum(copies)
    return (*copies, 0 if condition.dtype is torch.bool else condition.numel(), ALL)


operator("aten::rrelu_with_noise").meta()(made_like(self=CONTIGUOUS))  # native/Activation.cpp
# The slope in evaluation, by tensors of numbers; Activation.cpp, rrelu_with_noise_out_cpu.
operator("aten::rrelu_with_noise", "aten::rrelu_with_noise_").workspace("cpu")(
    lambda training: 0 if training else 48
)


@operator("prims::fma").decomposition()
def multiplied_and_added(call: GivenCall) -> Any:
    """A product and a sum, one after the other: what Inductor's decompositions of optimizers call,
    where its graph is not fused; torch/_inductor/inductor_prims.py, ``fma``.
    """
    first, second, third = call.args
    return first * second + third


_BY_SCALARS = "_foreach_addcdiv _foreach_addcmul"
_IN_PLACE = "_foreach_addcdiv_ _foreach_addcmul_"

operator(
    *aten(f"{_BY_SCALARS} {_IN_PLACE}", ".Tensor"),
    across_devices=True,
    of_host="scalars",
    elsewhere="Expected scalars to be on CPU, got {device} instead.",
)


@operator(*aten(_BY_SCALARS, ".Tensor")).meta("cuda")
def sums(input: Sequence[Tensor]) -> list[Tensor]:
    """One for each tensor, whatever the host's scalars are; native/cuda/ForeachPointwiseOp.cu."""
    return [torch.empty_like(one) for one in input]


@operator(*aten(_IN_PLACE, ".Tensor")).meta("cuda")
@operator("_fused_adagrad_ _fused_adam_.tensor_lr _fused_adamw_.tensor_lr _fused_sgd_").meta()
def in_arguments() -> None:
    """Nothing is returned, arguments are written to; native/cuda/fused_adam_impl.cu, …"""


# The gradients of a trace count as finite, so ``GradScaler`` steps.
operator("aten::_amp_foreach_non_finite_check_and_unscale_", keeps_values=("found_inf",))

_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
_LARGEST_INDEX = 2**31 - 1
_SEMAPHORE = 4


class Dim(NamedTuple):
    """A dimension of the iteration: its size, and strides in elements of input and output."""

    size: int
    input: int
    output: int


class Reduction(NamedTuple):
    """A reduction as its kernel sees it."""

    reduced: tuple[Dim, ...]
    kept: tuple[Dim, ...]
    element_size: int
    """Bytes of an element that is read."""
    output_size: int
    accumulator: int
    """Bytes of what is accumulated (``arg_t``)."""
    input_vector: int
    """Elements that a thread reads at once along the reduced dimension."""
    threads: int
    accumulates_in_output: bool

    @property
    def inputs(self) -> int:
        """Elements that make one output."""
        return math.prod(dim.size for dim in self.reduced)

    @property
    def outputs(self) -> int:
        """How many outputs there are."""
        return math.prod(dim.size for dim in self.kept)


def _merged(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Merge dimensions that lie one behind the other."""
    merged: list[Dim] = []
    for dim in dims:
        if dim.size == 1:
            continue
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.size * last.input == dim.input
            and last.size * last.output == dim.output
        ):
            merged[-1] = last._replace(size=last.size * dim.size)
        else:
            merged.append(dim)
    return tuple(merged)


def reduction_buffers(gpu: Gpu, reduction: Reduction) -> tuple[int, ...]:
    """Return the bytes of partial results and semaphores; of an input too large for 32-bit indices
    those of each part in turn, and of the buffer that they are accumulated in.
    """
    if not reduction.inputs * reduction.outputs:
        return ()
    if _fits_32_bits(reduction):
        return _global_buffers(gpu, reduction)
    accumulation = 0
    if not reduction.accumulates_in_output and reduction.output_size < reduction.accumulator:
        reach = max((dim.size * dim.output for dim in reduction.kept), default=1)
        accumulation = max(1, reach) * reduction.accumulator
    parts = (passing(*_global_buffers(gpu, part)) for part in _parts(reduction))
    buffers = tuple(chain.from_iterable(parts))
    return (accumulation, *buffers) if accumulation else buffers


def _fits_32_bits(reduction: Reduction) -> bool:
    """``TensorIteratorBase::can_use_32bit_indexing``: elements, and bytes of each operand."""
    dims = (*reduction.reduced, *reduction.kept)
    if math.prod(dim.size for dim in dims) > _LARGEST_INDEX:
        return False
    reach = 1 + sum((dim.size - 1) * dim.input * reduction.element_size for dim in dims)
    out = 1 + sum((dim.size - 1) * dim.output * reduction.output_size for dim in dims)
    return max(reach, out) <= _LARGEST_INDEX


def _parts(reduction: Reduction) -> Iterator[Reduction]:
    """Halve the dimension that reaches furthest until every part fits; ``SplitUntil32Bit``."""
    waiting = [reduction]
    while waiting:
        part = waiting.pop()
        if _fits_32_bits(part):
            yield part
            continue
        dims = (*part.reduced, *part.kept)
        reach = [
            (dim.size - 1) * max(dim.input * part.element_size, dim.output * part.output_size)
            for dim in dims
        ]
        position = reach.index(max(reach))
        first = dims[position].size // 2
        for size in (first, dims[position].size - first):
            halved = [*dims]
            halved[position] = dims[position]._replace(size=size)
            split = len(part.reduced)
            waiting.append(part._replace(reduced=tuple(halved[:split]), kept=tuple(halved[split:])))


def _global_buffers(gpu: Gpu, reduction: Reduction) -> tuple[int, ...]:
    """``setReduceConfig``: whether several blocks make one output, and what they need then."""
    reduced, kept = reduction.reduced, reduction.kept
    inputs, outputs = reduction.inputs, reduction.outputs
    on_fastest = not kept or (bool(reduced) and reduced[0].input < kept[0].input)
    if on_fastest:
        width, height = inputs, outputs
        fastest = reduced[0].input if reduced else 1
    else:
        width, height = outputs, inputs
        fastest = kept[0].input
    vector = 1
    if fastest == 1:
        if on_fastest and width >= 128 and len(reduced) == 1:
            width //= reduction.input_vector
        elif not on_fastest:
            # ``get_output_vec_size``, for a tensor that begins at a multiple of four elements.
            vector = 4
            for number in (kept[0].size, *(dim.input for dim in (*reduced, *kept[1:]))):
                while number % vector:
                    vector //= 2
            width //= vector
    block_width, block_height = _block(width, height, reduction.threads // vector)
    threads = block_width * block_height
    step_input = block_width if on_fastest else 1
    step_output = 1 if on_fastest else block_width
    if ceil_div(inputs, step_input) < min(block_height * 16, _MOST_VALUES):
        return ()
    values = ceil_div(inputs, step_input * block_height)
    grid = ceil_div(outputs // vector, step_output)
    target = gpu.multiprocessors * (gpu.threads_per_multiprocessor // threads)
    if values < _MOST_VALUES or grid > target:
        return ()
    blocks = max(
        min(ceil_div(target, grid), ceil_div(values, _LEAST_VALUES)), ceil_div(values, _MOST_VALUES)
    )
    if blocks <= 1:
        return ()
    partial = reduction.accumulator * outputs * blocks
    if not on_fastest:
        partial *= block_width * vector
    return (partial, _SEMAPHORE * grid)


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """``ReduceConfig::set_block_dimension``."""
    wide = last_power(width) if width < most else most
    high = last_power(height) if height < most else most
    block_width = min(wide, _WARP)
    block_height = min(high, most // block_width)
    return min(wide, most // block_height), block_height


def last_power(number: int) -> int:
    """``last_pow2``: the largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1) if number > 0 else 1


Dims = Sequence[int] | int | None


def reduced(
    gpu: Gpu, read: Tensor, dims: Dims, out_size: int, accumulator: int = 0, input_vector: int = 0
) -> tuple[int, ...]:
    """Return what one reduction kernel takes that reads a tensor of this geometry.

    ``accumulator`` is the bytes of what it adds up in, by default the type's own accumulation type;
    no ``dims`` means all of them.
    """
    shape, strides, dtype = read.shape, read.stride(), read.dtype
    if isinstance(dims, int):
        dims = (dims,)
    wrapped, outer = [dim % len(shape) for dim in dims or range(len(shape)) if shape], 1
    # Fastest first: those kept in the order of the dense output, the reduced ones in the input's.
    first, kept = list[Dim](), list[Dim]()
    for dim in reversed(range(len(shape))):
        if dim in wrapped:
            first.append(Dim(shape[dim], strides[dim], 0))
        else:
            kept.append(Dim(shape[dim], strides[dim], outer))
            outer *= shape[dim]
    first.sort(key=lambda dim: dim.input)
    accumulator = accumulator or accumulation_type(dtype).itemsize
    vector = input_vector or (8 if dtype.itemsize == 2 else 4)
    threads = 256 if dtype is torch.complex128 else 512
    sizes = dtype.itemsize, out_size, accumulator, vector, threads
    in_output = not (dtype in HALVES and out_size == dtype.itemsize)
    return reduction_buffers(gpu, Reduction(_merged(first), _merged(kept), *sizes, in_output))


def sum_buffers(
    gpu: Gpu, shape: Sequence[int], dims: Dims, dtype: torch.dtype, strides: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return what summing a tensor (dense where no strides are given) into its own type takes."""
    strides = strides or torch.empty(shape, device="meta").stride()
    read = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return reduced(gpu, read, dims, dtype.itemsize)


def copied_and_reduced(
    gpu: Gpu, outputs: Tensor, input: Tensor, dims: Dims, dtype: torch.dtype | None
) -> tuple[int, ...]:
    """Return the copy and the buffers of a reduction whose kernel reads ``dtype``, or as it is."""
    size = outputs.element_size()
    if dtype is None or dtype == input.dtype:
        return reduced(gpu, input, dims, size)
    strides = (
        input.stride() if is_dense(input) else torch.empty(input.shape, device="meta").stride()
    )
    read = torch.empty_strided(input.shape, strides, dtype=dtype, device="meta")
    return (dense_bytes(input, dtype), *reduced(gpu, read, dims, size))


GRAIN = 32768
"""``at::internal::GRAIN_SIZE``: below it a loop runs on one thread."""


def partial_results(machine: Host, elements: int, results: int, element_size: int) -> int:
    """A result per thread, where several reduce all to one element; two_pass_reduction."""
    if results != 1 or elements < GRAIN or machine.threads < 2:
        return 0
    return machine.threads * element_size


def takes_every_dim(input: Tensor, dims: Sequence[int] | None) -> bool:
    """Whether the ``dim`` of a reduction names every dimension, or none."""
    return not dims or len(dims) == input.dim()


def needs_float_buffer(input: Tensor, dims: Sequence[int]) -> bool:
    """Whether TensorIterator is left with two reduced dimensions innermost, so that a 16-bit sum
    would be rounded between them; native/ReduceOps.cpp, should_use_acc_buffer.
    """
    if not input.numel():
        return False
    gone = {dim % input.dim() for dim in dims} if input.dim() else set()
    walked = sorted(
        (dim for dim in gone if input.shape[dim] != 1), key=lambda dim: (input.stride(dim), -dim)
    )
    return any(
        input.stride(inner) * input.shape[inner] != input.stride(outer)
        for inner, outer in pairwise(walked)
    )


def sum_workspace(
    machine: Host, input: Tensor, result: torch.dtype, count: int, dims: Sequence[int] | None = None
) -> int:
    """What ``sum`` takes: an upcast, or for 16-bit inputs of some layouts a sum in float."""
    reduced = input.dtype == result and result in HALVES
    if reduced and dims is not None and needs_float_buffer(input, dims):
        buffer = count * torch.float32.itemsize
        return buffer + sum_workspace(machine, input, torch.float32, count)
    return converted(input, result) + partial_results(
        machine, input.numel(), count, result.itemsize
    )
