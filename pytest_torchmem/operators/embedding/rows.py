"""Gradients of embeddings: on CUDA indices are sorted, and gradients of equal ones summed in parts.

native/Embedding.cpp, native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu.
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
from pytest_torchmem.operators.reduction.buffers import HALVES
from pytest_torchmem.operators.registry import Kind, operator
from pytest_torchmem.operators.sorting.order import sort_requests
from pytest_torchmem.operators.workspace import passing
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
def distinct_indices(machine: Gpu, indices: Tensor) -> tuple[int, ...]:
    """Indices sorted, then the distinct ones and their count; Embedding.cu,
    ``embedding_renorm_cuda_``.
    """
    number, each = indices.numel(), dense_bytes(indices)
    flat = torch.empty((number,), dtype=indices.dtype, device="meta")
    sorting = passing(number * _LONG, *sort_requests(machine, flat, 0))
    distinct = cub.distinct(machine, number, indices.element_size())
    return (contiguous_copy(indices), each, each, *sorting, each, _LONG, distinct)


@_backward.decomposition("cuda")
def sums_of_equal_indices(
    machine: Gpu,
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    """Sums of up to 3,072 indices at once, of more by a sort; ``embedding_dense_backward_cuda``."""
    indices, gradients = indices.contiguous(), grad_output.contiguous()
    if indices.numel() <= _FEW and not scale_grad_by_freq:
        return gradients.new_empty((num_weights, gradients.shape[-1]))
    return sorted_sums(machine, gradients, indices, num_weights, scale_grad_by_freq, bags=False)


def sorted_sums(
    gpu: Gpu, gradients: Tensor, indices: Tensor, weights: int, by_frequency: bool, *, bags: bool
) -> Tensor:
    """Return the gradient of ``weights`` rows: indices are sorted, and parts of equal ones summed.

    EmbeddingBackwardKernel.cu, ``embedding_backward_cuda_kernel``.
    """
    number, size, width = indices.numel(), indices.element_size(), gradients.shape[-1]
    in_order, positions = torch.empty_like(indices), torch.empty_like(indices)
    places = torch.empty_like(indices)
    cub.scratch(cub.radix_sort(gpu, number, size, size, weights.bit_length()))
    del places
    counts = torch.empty_like(indices) if by_frequency else None
    for _ in range(2 if by_frequency else 0):
        cub.scratch(cub.scan_by_key(gpu, number, size))
    result = gradients.new_empty((weights, width))
    segments = min(number, weights)
    beginnings, number_of_segments = cub.scratch(number * size), cub.scratch(_LONG)
    keys = cub.scratch(number * size)
    cub.scratch(cub.distinct_keys(gpu, number, size))
    del keys
    parts_of_segments, first_parts = cub.scratch(segments * size), cub.scratch(segments * size)
    cub.scratch(cub.scan(segments, size))
    number_of_parts = cub.scratch(_LONG)
    parts = number // _ROWS_PER_THREAD + segments
    beginnings_of_parts, segments_of_parts, summed = cub.scratch(parts * size), None, parts
    if not bags and _adds_atomically(gpu, segments, parts, width):
        segments_of_parts = cub.scratch(parts * size)
        summed = segments if gradients.dtype in HALVES else 0
    sums = gradients.new_empty((summed, width), dtype=accumulation_type(gradients.dtype))
    del sums, segments_of_parts, beginnings_of_parts, number_of_parts, first_parts
    del parts_of_segments
    del number_of_segments, beginnings, counts, positions, in_order
    return result


def _adds_atomically(gpu: Gpu, segments: int, parts: int, width: int) -> bool:
    """Whether the parts of few embeddings are added up in place; ``use_fused_kernel``."""
    warped = round_up(width, 32)
    grid = ceil_div(segments * warped, min(warped, _BLOCK))
    return grid < gpu.multiprocessors * _ATOMIC_BLOCKS and parts > 4 * grid
