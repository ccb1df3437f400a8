"""What reductions take: partial results of blocks on CUDA; upcasts and results per thread on the
CPU (native/ReduceOps.cpp, native/TensorIteratorReduce.cpp).

native/cuda/Reduce.cuh of 2.13: ``setReduceConfig``, ``ReduceConfig::global_memory_size``,
``ReduceConfig::semaphore_size`` and ``gpu_reduce_kernel``; the order and merging of dimensions is
native/TensorIterator.cpp, ``reorder_dimensions`` and ``coalesce_dimensions``. An input of another
type than the result is copied (native/ReduceOpsUtils.h, ``make_reduction_from_out_ty``), but for
16-bit input of a float result, which is read as it is.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.geometry import (
    HALVES,
    SCALAR,
    accumulation_type,
    ceil_div,
    dense_bytes,
    is_dense,
)
from pytest_torchmem.operators.workspace import passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host

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
    input_vector: int = 4
    """Elements that a thread reads at once along the reduced dimension."""
    threads: int = 512
    accumulates_in_output: bool = True

    @property
    def inputs(self) -> int:
        """Elements that make one output."""
        return math.prod(dim.size for dim in self.reduced)

    @property
    def outputs(self) -> int:
        """How many outputs there are."""
        return math.prod(dim.size for dim in self.kept)


def iteration(
    shape: Sequence[int], strides: Sequence[int], dims: Sequence[int]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Return the dimensions reduced over and those kept, fastest first, adjacent ones merged.

    The output is dense, so the kept ones stand in its order; the reduced ones in the input's.
    """
    outer = 1
    kept = []
    for dim in reversed(range(len(shape))):
        if dim in dims:
            continue
        kept.append(Dim(shape[dim], strides[dim], outer))
        outer *= shape[dim]
    reduced = [
        Dim(shape[dim], strides[dim], 0) for dim in reversed(range(len(shape))) if dim in dims
    ]
    reduced.sort(key=lambda dim: dim.input)
    return _merged(reduced), _merged(kept)


def _merged(dims: Sequence[Dim]) -> tuple[Dim, ...]:
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
            vector = _output_vector(reduced, kept)
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


def _output_vector(reduced: Sequence[Dim], kept: Sequence[Dim]) -> int:
    """``get_output_vec_size``, for a tensor that begins at a multiple of four elements."""
    vector = 4
    for number in (kept[0].size, *(dim.input for dim in (*reduced, *kept[1:]))):
        while number % vector:
            vector //= 2
    return vector


def last_power(number: int) -> int:
    """``last_pow2``: the largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1) if number > 0 else 1


Dims = Sequence[int] | int | None


def reduced(
    gpu: Gpu,
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Dims,
    dtype: torch.dtype,
    out_size: int,
    accumulator: int | None = None,
    input_vector: int | None = None,
) -> tuple[int, ...]:
    """Return what one reduction kernel takes for an input of ``dtype``.

    ``accumulator`` is the bytes of what it adds up in, by default the type's own accumulation type;
    no ``dims`` means all of them.
    """
    wrapped = _wrapped(dims, len(shape))
    first, rest = iteration(shape, strides, wrapped)
    return reduction_buffers(
        gpu,
        Reduction(
            first,
            rest,
            dtype.itemsize,
            out_size,
            accumulator or accumulation_type(dtype).itemsize,
            input_vector or (8 if dtype.itemsize == 2 else 4),
            256 if dtype is torch.complex128 else 512,
            not (dtype in HALVES and out_size == dtype.itemsize),
        ),
    )


def sum_buffers(
    gpu: Gpu, shape: Sequence[int], dims: Dims, dtype: torch.dtype, strides: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return what summing a tensor (dense where no strides are given) into its own type takes."""
    return reduced(gpu, shape, strides or dense_strides(shape), dims, dtype, dtype.itemsize)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))[-len(shape) :] if shape else ()


def _wrapped(dims: Dims, number: int) -> tuple[int, ...]:
    if isinstance(dims, int):
        dims = (dims,)
    if not dims:
        return tuple(range(number))
    return tuple(dim % number for dim in dims) if number else ()


def copied_and_reduced(
    gpu: Gpu, outputs: Tensor, input: Tensor, dims: Dims, dtype: torch.dtype | None
) -> tuple[int, ...]:
    """Return the copy and the buffers of a reduction whose kernel reads ``dtype``, or as it is."""
    size = outputs.element_size()
    if dtype is None or dtype == input.dtype:
        return reduced(gpu, input.shape, input.stride(), dims, input.dtype, size)
    strides = input.stride() if is_dense(input) else dense_strides(input.shape)
    return (dense_bytes(input, dtype), *reduced(gpu, input.shape, strides, dims, dtype, size))


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
    machine: Host,
    input: Tensor,
    result: torch.dtype,
    results: int,
    dims: Sequence[int] | None = None,
) -> int:
    """What ``sum`` takes: an upcast, or for 16-bit inputs of some layouts a sum in float."""
    reduced = input.dtype == result and result in HALVES
    if reduced and dims is not None and needs_float_buffer(input, dims):
        buffer = results * torch.float32.itemsize
        return buffer + sum_workspace(machine, input, torch.float32, results)
    return converted(input, result) + partial_results(
        machine, input.numel(), results, result.itemsize
    )


def mean_workspace(machine: Host, input: Tensor, dtype: torch.dtype, results: int) -> int:
    """A sum in the accumulation type, then a division by a wrapped number; mean_out."""
    accumulated = accumulation_type(dtype)
    result = 0 if accumulated == dtype else results * accumulated.itemsize
    summed = sum_workspace(machine, input, accumulated, results)
    return result + max(summed, SCALAR + accumulated.itemsize)
