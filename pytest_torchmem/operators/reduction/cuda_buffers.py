"""What reductions take on CUDA: buffers of one kernel, and the copy of an input of another type.

What one kernel takes is in ``cuda_configuration``; an input of another type than the result is
copied (native/ReduceOpsUtils.h, ``make_reduction_from_out_ty``), but for 16-bit input of a float
result, which is read as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    accumulation_type,
    dense_bytes,
    is_dense,
)
from pytest_torchmem.operators.reduction.cuda_configuration import (
    Reduction,
    iteration,
    reduction_buffers,
)
from pytest_torchmem.targets.gpus import Gpu

Dims = Sequence[int] | int | None
HALVES = (torch.float16, torch.bfloat16)


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
    """Return what a reduction into ``outputs`` takes whose kernel reads ``dtype``, by default the
    input's: the copy and the buffers.
    """
    size = outputs.element_size()
    if dtype is None or dtype == input.dtype:
        return reduced(gpu, input.shape, input.stride(), dims, input.dtype, size)
    strides = input.stride() if is_dense(input) else dense_strides(input.shape)
    return (dense_bytes(input, dtype), *reduced(gpu, input.shape, strides, dims, dtype, size))


def summed(gpu: Gpu, outputs: Tensor, input: Tensor, dims: Dims) -> tuple[int, ...]:
    """Return what a sum, a mean or a product takes."""
    as_is = input.dtype in HALVES and outputs.dtype == torch.float32
    return copied_and_reduced(gpu, outputs, input, dims, None if as_is else outputs.dtype)
