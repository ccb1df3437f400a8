"""Gradients of embeddings: on CUDA indices are sorted, and gradients of equal ones summed in parts.

native/Embedding.cpp, native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu. The buffers of the
sums are exact; where the sort needs more than they do, its temporary storage makes it a limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.formats import CONTIGUOUS, copied
from pytest_torchmem.operators.geometry import (
    accumulation_type,
    ceil_div,
    contiguous_copy,
    dense_bytes,
    round_up,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import Kind, operator
from pytest_torchmem.operators.sorting.order import sort_bytes
from pytest_torchmem.operators.workspace import Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu

_FEW = 3072
_ROWS_PER_THREAD = 10
_BLOCK = 1024
_ATOMIC_BLOCKS = 4
_LONG = 8

operator("aten::embedding_renorm", kind=Kind.LEAF)  # for every backend, reading and writing data
_renorm = operator("aten::embedding_renorm_")
_backward = operator("aten::embedding_dense_backward")
_backward.workspace("cpu")(copied(grad_output=CONTIGUOUS, indices=CONTIGUOUS))


@_renorm.workspace("cuda")
def distinct_indices(machine: Gpu, indices: Tensor) -> Workspace:
    """Indices sorted, then the distinct ones, their count and CUB's; a limit. Embedding.cu,
    ``embedding_renorm_cuda_``.
    """
    number = indices.numel()
    in_order, positions = dense_bytes(indices), number * _LONG
    sorting = positions + sum(sort_bytes(machine, indices, -1))
    distinct = number * indices.element_size() + _LONG + cub.select(number)
    return bounded(in_order, max(sorting, distinct))


@_backward.workspace("cuda")
def sums_of_equal_indices(
    machine: Gpu,
    outputs: Tensor,
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
) -> Workspace | tuple[int, ...]:
    """Nothing for up to 3,072 indices, else sorted; ``embedding_dense_backward_cuda``."""
    copy = contiguous_copy(grad_output)
    if indices.numel() <= _FEW and not scale_grad_by_freq:
        return (copy, contiguous_copy(indices))
    width = grad_output.shape[-1]
    found = sorted_sums(
        machine, outputs, indices, num_weights, width, grad_output.dtype, scale_grad_by_freq, copy
    )
    if _may_add_atomically(machine, indices.numel(), num_weights, width):
        return bounded(*found.requests)
    return found


def _may_add_atomically(gpu: Gpu, number: int, weights: int, width: int) -> bool:
    """Whether a newer kernel adds the parts of few embeddings up in place, and takes less.

    ``embedding_backward_cuda_kernel``, ``use_fused_kernel``; not in every version of torch.
    """
    segments = min(number, weights)
    warped = round_up(width, 32)
    grid = ceil_div(segments * warped, min(warped, _BLOCK))
    parts = number // _ROWS_PER_THREAD + segments
    return grid < gpu.multiprocessors * _ATOMIC_BLOCKS and parts > 4 * grid


def sorted_sums(
    gpu: Gpu,
    output: Tensor,
    indices: Tensor,
    weights: int,
    width: int,
    dtype: torch.dtype,
    by_frequency: bool,
    copy: int,
) -> Workspace:
    """Return what sorting and summing takes beside a ``copy`` of the gradients."""
    number, size = indices.numel(), indices.element_size()
    segments = min(number, weights)
    parts = number // _ROWS_PER_THREAD + segments
    each = number * size
    counts = each if by_frequency else 0
    sums = parts * width * accumulation_type(dtype).itemsize
    summing = (
        copy,
        each,  # sorted indices
        each,  # where they stood
        counts,
        each,  # segment_offsets
        segments * size,  # partials_per_segment
        segments * size,  # partials_per_segment_offset
        parts * size,  # partial_segment_offset
        _LONG,
        _LONG,
        sums,  # grad_weight_per_segment
    )
    # The result is made after the sort: what stands in its place then is the sort's.
    sorting = (copy, each, each, each, cub.radix_sort_pairs(gpu, number, size, size))
    own = dense_bytes(output)
    unique = sum(summing[:5]) + each + cub.select(number)
    if max(sum(sorting) - own, unique) <= sum(summing):
        return Workspace(summing)
    return bounded(max(sum(sorting) - own, unique))
