"""Indexing: copies of index tensors, and the sort behind ``accumulate=True``.

native/cuda/IndexKernel.cpp, Indexing.cu, Nonzero.cu and native/TensorAdvancedIndexing.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.catalogue import Gpu
from pytest_torchmem.profiler.workspace import Workspace, bounded, workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.profiler.workspace.cuda import cub

_LONG = 8
_MASKS = (torch.bool, torch.uint8)
_BLOCKS_OF_THREAD = 16


@workspace(
    "aten::index",
    "aten::_unsafe_index",
    device="cuda",
)
def index(
    gpu: Gpu, outputs: Tensor, input: Tensor, indices: Sequence[Tensor | None]
) -> Workspace | tuple[int, ...]:
    """Indices of different strides are made dense, masks turned to positions; ``AdvancedIndex``."""
    masks = [found for found in indices if found is not None and found.dtype in _MASKS]
    if not masks:
        return _dense_indices([found for found in indices if found is not None])
    kept = _unindexed(input, indices)
    return bounded(*_positions(gpu, masks, outputs.numel() // kept if kept else 0))


@workspace(
    "aten::_index_put_impl_",
    "aten::index_put_",
    "aten::index_put",
    "aten::_unsafe_index_put",
    device="cuda",
)
def index_put(
    gpu: Gpu,
    outputs: Tensor,
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *rest: bool,
) -> Workspace | tuple[int, ...]:
    """Sums go through a sort of the indices; ``index_put_with_sort_kernel``.

    At its peak: the linear index, sorted indices, where they stood, their range, and the sort.
    """
    given = [found for found in indices if found is not None]
    masks = [found for found in given if found.dtype in _MASKS]
    plain = [found for found in given if found.dtype not in _MASKS]
    kept = _unindexed(input, indices)
    number = _number(plain) if plain else (values.numel() // kept if kept else 0)
    positions = _positions(gpu, masks, number) if masks else ()
    if not (accumulate or _deterministic()):
        requests = (*positions, *_dense_indices(plain))
        return bounded(*requests) if masks else requests
    copies = (contiguous_copy(input), _values(values, number * kept))
    each = number * _LONG
    rows = input.numel() // kept if kept else 0
    bits = max(1, (rows - 1).bit_length())  # cub.cuh, get_num_bits of the largest index
    sort = cub.radix_sort_pairs(gpu, number, _LONG, _LONG, bits)
    return bounded(*positions, *copies, each, each, each, each, sort)


def _values(values: Tensor, elements: int) -> int:
    """Bytes of the values made dense, expanded to all positions where they are fewer."""
    if values.numel() < elements:
        return elements * values.element_size()
    return contiguous_copy(values)


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _number(indices: Sequence[Tensor]) -> int:
    """How many positions indices stand for, broadcast together."""
    return math.prod(torch.broadcast_shapes(*(found.shape for found in indices)))


def _unindexed(input: Tensor, indices: Sequence[Tensor | None]) -> int:
    """Elements that stand at every position."""
    dim, number = 0, 1
    for found in indices:
        width = max(1, found.dim()) if found is not None and found.dtype in _MASKS else 1
        if found is None:
            number *= input.shape[dim]
        dim += width
    return number * math.prod(input.shape[dim:])


def _dense_indices(indices: Sequence[Tensor]) -> tuple[int, ...]:
    """Several indices whose strides differ once they are broadcast: every one is copied.

    ``AdvancedIndex``, ``all_strides_match``.
    """
    shape = torch.broadcast_shapes(*(found.shape for found in indices)) if indices else ()
    widened = tuple(
        dense_bytes(found, torch.int64) if found.dtype == torch.int32 else 0 for found in indices
    )
    strides = {found.expand(shape).stride() for found in indices}
    if len(indices) < 2 or len(strides) == 1:
        return widened
    number = math.prod(shape)
    copies = tuple(
        0 if found.expand(shape).is_contiguous() else number * _LONG for found in indices
    )
    return (*widened, *copies)


def _positions(gpu: Gpu, masks: Sequence[Tensor], number: int) -> tuple[int, ...]:
    """What masks take as positions: ``nonzero`` of each, one after the other."""
    positions = tuple(number * max(1, mask.dim()) * _LONG for mask in masks)
    return (*positions, max(nonzero_bytes(gpu, mask) for mask in masks))


def nonzero_bytes(gpu: Gpu, input: Tensor) -> int:
    """Return at most what ``nonzero`` takes beyond its result: a dense copy, a count and CUB's."""
    blocks = gpu.multiprocessors * _BLOCKS_OF_THREAD
    number = input.numel()
    return contiguous_copy(input) + 4 + max(cub.reduce(blocks, 4), cub.select(number))


@workspace("aten::nonzero", device="cuda")
def nonzero(gpu: Gpu, outputs: Tensor, input: Tensor) -> Workspace:
    """A count, then CUB; a limit. Nonzero.cu, ``nonzero_cuda_out_impl``."""
    return bounded(nonzero_bytes(gpu, input))


@workspace("aten::masked_select", device="cuda")
def masked_select(gpu: Gpu, outputs: Tensor, input: Tensor, mask: Tensor) -> Workspace:
    """The positions of the mask; a limit. IndexKernel.cpp, ``masked_select_out_cuda_impl``."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    whole = mask.expand(shape)
    positions = outputs.numel() * max(1, len(shape)) * _LONG
    return bounded(positions, nonzero_bytes(gpu, whole))


@workspace("aten::masked_scatter", "aten::masked_scatter_", device="cuda")
def masked_scatter(
    gpu: Gpu, outputs: Tensor, input: Tensor, mask: Tensor, source: Tensor
) -> Workspace:
    """A prefix sum of the mask; a limit. IndexKernel.cpp, ``masked_scatter__cuda``."""
    number = input.numel()
    whole = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    copies = (contiguous_copy(whole), contiguous_copy(source), contiguous_copy(input))
    return bounded(*copies, number * _LONG, cub.scan(number))


@workspace("aten::index_add", "aten::index_add_", device="cuda")
def index_add(
    gpu: Gpu,
    outputs: Tensor,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    *,
    alpha: float = 1,
) -> Workspace | int:
    """Atomic additions, exactly nothing; deterministic through a sort. Indexing.cu,
    ``index_add_cuda_impl``.
    """
    if not _deterministic():
        return 0
    number = index.numel()
    each = number * _LONG
    product = dense_bytes(source)
    sort = cub.radix_sort_pairs(gpu, number, _LONG, _LONG)
    return bounded(product, product, each, each, each, each, sort)


@workspace(
    "aten::gather",
    "aten::scatter",
    "aten::scatter_",
    "aten::scatter_reduce",
    "aten::scatter_reduce_",
    "aten::index_select",
    "aten::index_copy",
    "aten::index_copy_",
    "aten::index_fill",
    "aten::index_fill_",
    "aten::take",
    device="cuda",
)
def by_index(gpu: Gpu, outputs: Tensor, *arguments: object, **options: object) -> int:
    """Nothing; exact, ScatterGatherKernel.cu and IndexKernel.cu."""
    return 0


@workspace("aten::scatter_add", "aten::scatter_add_", device="cuda")
def scatter_add(
    gpu: Gpu, outputs: Tensor, input: Tensor, dim: int, index: Tensor, source: Tensor
) -> Workspace | int:
    """Atomic additions, exactly nothing; deterministic and of one dimension through a sort.

    native/TensorAdvancedIndexing.cpp, ``scatter_add``.
    """
    if not _deterministic() or input.dim() != 1:
        return 0
    each = index.numel() * _LONG
    return bounded(each, each, each, each, cub.radix_sort_pairs(gpu, index.numel(), _LONG, _LONG))
