"""Indexing: copies of index tensors, and the sort behind ``accumulate=True``.

native/cuda/IndexKernel.cpp, Indexing.cu, Nonzero.cu and native/TensorAdvancedIndexing.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, bounded
from pytest_torchmem.targets.gpus import Gpu

_LONG = 8
_MASKS = (torch.bool, torch.uint8)
_BLOCKS_OF_THREAD = 16


@operator("aten::index").workspace("cuda")
def index(
    machine: Gpu, outputs: Tensor, input: Tensor, indices: Sequence[Tensor | None]
) -> Workspace | tuple[int, ...]:
    """Indices of different strides are made dense, masks turned to positions; ``AdvancedIndex``."""
    masks = [found for found in indices if found is not None and found.dtype in _MASKS]
    if not masks:
        return _dense_indices([found for found in indices if found is not None])
    kept = _unindexed(input, indices)
    return bounded(*_positions(machine, masks, outputs.numel() // kept if kept else 0))


@operator("aten::_index_put_impl_").workspace("cuda")
def index_put(
    machine: Gpu,
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Workspace | tuple[int, ...]:
    """Sums go through a sort of the indices; ``index_put_with_sort_kernel``.

    At its peak: the linear index, sorted indices, where they stood, their range, and the sort. Of
    indices with others between them, the input is copied with their dimensions in front.
    """
    given = [found for found in indices if found is not None]
    masks = [found for found in given if found.dtype in _MASKS]
    plain = [found for found in given if found.dtype not in _MASKS]
    kept = _unindexed(input, indices)
    number = _number(plain) if plain else (values.numel() // kept if kept else 0)
    positions = _positions(machine, masks, number) if masks else ()
    if not (accumulate or _deterministic()):
        requests = (*positions, *_dense_indices(plain))
        return bounded(*requests) if masks else requests
    moved = dense_bytes(input) if _are_apart(indices) else 0
    copies = (contiguous_copy(input), moved, _values(values, number * kept))
    each = number * _LONG
    rows = input.numel() // kept if kept else 0
    bits = max(1, (rows - 1).bit_length())  # cub.cuh, get_num_bits of the largest index
    sort = cub.radix_sort_pairs(machine, number, _LONG, _LONG, bits)
    return bounded(*positions, *copies, each, each, each, each, sort)


def _are_apart(indices: Sequence[Tensor | None]) -> bool:
    """``hasContiguousSubspace``, TensorAdvancedIndexingUtils.h: not all indices stand together."""
    given = [position for position, found in enumerate(indices) if found is not None]
    return bool(given) and given[-1] - given[0] >= len(given)


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


@operator("aten::nonzero").workspace("cuda")
def nonzero(machine: Gpu, input: Tensor) -> Workspace:
    """A count, then CUB; a limit. Nonzero.cu, ``nonzero_cuda_out_impl``."""
    return bounded(nonzero_bytes(machine, input))


@operator("aten::masked_select").workspace("cuda")
def masked_select(machine: Gpu, outputs: Tensor, input: Tensor, mask: Tensor) -> Workspace:
    """The positions of the mask; a limit. IndexKernel.cpp, ``masked_select_out_cuda_impl``."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    whole = mask.expand(shape)
    positions = outputs.numel() * max(1, len(shape)) * _LONG
    return bounded(positions, nonzero_bytes(machine, whole))


@operator("aten::masked_scatter_").workspace("cuda")
def masked_scatter(input: Tensor, mask: Tensor, source: Tensor) -> Workspace:
    """A prefix sum of the mask; a limit. IndexKernel.cpp, ``masked_scatter__cuda``."""
    number = input.numel()
    whole = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    copies = (contiguous_copy(whole), contiguous_copy(source), contiguous_copy(input))
    return bounded(*copies, number * _LONG, cub.scan(number))


@operator("aten::index_add", "aten::index_add_").workspace("cuda")
def index_add(machine: Gpu, index: Tensor, source: Tensor) -> Workspace | int:
    """Atomic additions, exactly nothing; deterministic through a sort. Indexing.cu,
    ``index_add_cuda_impl``.
    """
    if not _deterministic():
        return 0
    number = index.numel()
    each = number * _LONG
    product = dense_bytes(source)
    sort = cub.radix_sort_pairs(machine, number, _LONG, _LONG)
    return bounded(product, product, each, each, each, each, sort)


@operator("aten::gather", "aten::index_select", "aten::index_fill_", "aten::take").workspace("cuda")
def by_index() -> int:
    """Nothing; exact, ScatterGatherKernel.cu and IndexKernel.cu."""
    return 0


@operator("aten::index_copy", "aten::index_copy_").workspace("cuda")
def index_copy(machine: Gpu, index: Tensor, source: Tensor) -> Workspace | int:
    """Exactly nothing; deterministic through an ``index_put``. native/TensorAdvancedIndexing.cpp,
    ``index_copy_out``.
    """
    if not _deterministic() or not index.numel():
        return 0
    each = index.numel() * _LONG
    sort = cub.radix_sort_pairs(machine, index.numel(), _LONG, _LONG)
    return bounded(contiguous_copy(source), each, each, each, each, sort)


@operator("aten::where").workspace("cuda")
def where(outputs: Tensor, condition: Tensor, input: Tensor, other: Tensor) -> tuple[int, ...]:
    """Copies of what has another type than the result; exact, native/TensorCompare.cpp,
    ``where_self_out``.
    """
    copies = (
        dense_bytes(found, outputs.dtype) if found.dtype != outputs.dtype else 0
        for found in (input, other)
    )
    return (*copies, 0 if condition.dtype is torch.bool else condition.numel())


@operator("aten::scatter", "aten::scatter_").workspace("cuda")
def scatter(
    machine: Gpu,
    input: Tensor,
    index: Tensor,
    src: Tensor | None = None,
    reduce: str | None = None,
) -> Workspace | int:
    """Exactly nothing; deterministic through an ``index_put``. native/TensorAdvancedIndexing.cpp,
    ``scatter_impl``.
    """
    if src is None or reduce not in (None, "add"):
        return 0
    return _scattered(machine, input, index, src, accumulate=reduce is not None)


@operator("aten::scatter_add", "aten::scatter_add_").workspace("cuda")
def scatter_add(machine: Gpu, input: Tensor, index: Tensor, src: Tensor) -> Workspace | int:
    """Atomic additions, exactly nothing; deterministic through a sort.

    native/TensorAdvancedIndexing.cpp, ``scatter_add``.
    """
    return _scattered(machine, input, index, src, accumulate=True)


@operator("aten::scatter_reduce", "aten::scatter_reduce_").workspace("cuda")
def scatter_reduce(
    machine: Gpu, input: Tensor, index: Tensor, src: Tensor, reduce: str
) -> Workspace | tuple[int, ...]:
    """Exactly nothing; a mean counts what it adds up. native/TensorAdvancedIndexing.cpp,
    ``scatter_reduce_two``.
    """
    sums = reduce in ("sum", "mean")
    found = _scattered(machine, input, index, src, accumulate=True) if sums else 0
    counts = _counted(input, src) if reduce == "mean" else ()
    if isinstance(found, Workspace):  # the counts are added up in the same way, in place of a mask
        return bounded(*counts[:2], *found.requests)
    return counts


@operator("aten::index_reduce", "aten::index_reduce_").workspace("cuda")
def index_reduce(input: Tensor, source: Tensor, reduce: str) -> tuple[int, ...]:
    """A mean counts what it adds up, of which the ones are gone before the mask is made; exact,
    Indexing.cu, ``index_reduce_cuda_out``.
    """
    if reduce != "mean":
        return ()
    counts, ones, mask = _counted(input, source)
    return (counts, max(ones, mask))


def _counted(input: Tensor, source: Tensor) -> tuple[int, int, int]:
    """Counts as large as the result, ones as large as the source, and where a count is zero."""
    return (dense_bytes(input), dense_bytes(source), input.numel())


def _scattered(
    gpu: Gpu, input: Tensor, index: Tensor, source: Tensor, accumulate: bool
) -> Workspace | int:
    """What deterministic algorithms take; ``_scatter_via_index_put``.

    Coordinates of every element, their product with the strides, and the sum of it: its result
    indexes the flattened input.
    """
    number = index.numel()
    if not _deterministic() or not number:
        return 0
    each = number * _LONG
    sort = cub.radix_sort_pairs(gpu, number, _LONG, _LONG)
    sorting = (each, each, each, each, sort)
    if input.dim() <= 1:
        return bounded(contiguous_copy(source), *sorting)
    dense = contiguous_copy(source.as_strided(index.shape, source.stride()))
    coordinates = each * input.dim()
    flattened = (coordinates, each, dense)
    return bounded(*max((*flattened, *sorting), (coordinates, coordinates, each), key=sum))


@operator("aten::roll").workspace("cuda")
def roll(input: Tensor, dims: Sequence[int] = ()) -> int:
    """A dense copy; of several dimensions one after the other, the result of each but the last.

    TensorTransformations.cu, ``roll_cuda``; native/TensorTransformations.h, ``roll_common``.
    """
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 1 else contiguous_copy(input)


@operator("aten::repeat_interleave").workspace("cuda")
def repeat_interleave(repeats: Tensor) -> Workspace | int:
    """A prefix sum of the counts; a limit. native/Repeat.h, ``repeat_interleave_common``."""
    number = repeats.numel()
    copies = contiguous_copy(repeats)
    return bounded(copies, number * _LONG, cub.scan(number))
