"""Gradients of embeddings: indices are sorted, and the gradients of equal ones summed in parts.

native/cuda/Embedding.cu, EmbeddingBag.cu and EmbeddingBackwardKernel.cu. The buffers of the sums
are exact; where the sort needs more than they do, its temporary storage makes it a limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    accumulation_type,
    contiguous_copy,
    dense_bytes,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.rounding import ceil_div, round_up
from pytest_torchmem.operators.workspace import Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu

_FEW = 3072
_ROWS_PER_THREAD = 10
_BLOCK = 1024
_ATOMIC_BLOCKS = 4
_LONG = 8
_MAX = 2


@operator("aten::embedding_dense_backward").workspace("cuda")
def embedding_dense_backward(
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
    found = _sorted(
        machine, outputs, indices, num_weights, width, grad_output.dtype, scale_grad_by_freq, copy
    )
    if _may_add_atomically(machine, indices.numel(), num_weights, width):
        return bounded(*found.requests)
    return found


@operator("aten::_embedding_bag_dense_backward").workspace("cuda")
def embedding_bag_dense_backward(
    machine: Gpu,
    outputs: Tensor,
    grad: Tensor,
    indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
) -> Workspace | tuple[int, ...]:
    """Sorted as embeddings are; the maximum's is scattered.

    ``_embedding_bag_dense_backward_cuda``.
    """
    copy = contiguous_copy(grad)
    if mode == _MAX or not indices.numel():
        return (copy,)
    return _sorted(
        machine, outputs, indices, num_weights, grad.shape[-1], grad.dtype, scale_grad_by_freq, copy
    )


@operator("aten::_embedding_bag", "aten::_embedding_bag_forward_only").workspace("cuda")
def embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor) -> tuple[int, ...]:
    """Dense copies; exact, EmbeddingBag.cu, ``_embedding_bag_cuda``."""
    return (contiguous_copy(weight), contiguous_copy(indices), contiguous_copy(offsets))


def _may_add_atomically(gpu: Gpu, number: int, weights: int, width: int) -> bool:
    """Whether a newer kernel adds the parts of few embeddings up in place, and takes less.

    ``embedding_backward_cuda_kernel``, ``use_fused_kernel``; not in every version of torch.
    """
    segments = min(number, weights)
    warped = round_up(width, 32)
    grid = ceil_div(segments * warped, min(warped, _BLOCK))
    parts = number // _ROWS_PER_THREAD + segments
    return grid < gpu.multiprocessors * _ATOMIC_BLOCKS and parts > 4 * grid


def _sorted(
    gpu: Gpu,
    output: Tensor,
    indices: Tensor,
    weights: int,
    width: int,
    dtype: torch.dtype,
    by_frequency: bool,
    copy: int,
) -> Workspace:
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
