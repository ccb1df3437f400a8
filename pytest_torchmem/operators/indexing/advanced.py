"""Indexing by tensors of indices and masks: copies of indices, and the sort behind sums.

native/TensorAdvancedIndexing.cpp; native/cuda/IndexKernel.cpp, Indexing.cu.
"""

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import LONG, contiguous_copy, dense_bytes
from pytest_torchmem.operators.indexing.masks import positions_of
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.sums import pair_of_values
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import ALL, Request, Workspace, bounded, passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.state.settings import prefers_deterministic

_MASKS = (torch.bool, torch.uint8)

get = operator("aten::index")
put = operator("aten::_index_put_impl_")
operator(
    *aten(
        "index.Tensor _unsafe_index.Tensor index_put_ index_put _unsafe_index_put _index_put_impl_"
    ),
    masks=True,
    across_devices=True,
)


def _positions_on_cpu(input: Tensor, indices: Sequence[Tensor | None], elements: int) -> int:
    """Bytes of the positions that masks are turned to, where ``elements`` are read or written;
    native/TensorAdvancedIndexingUtils.h, expandTensors.
    """
    masked, kept, dim = 0, 1, 0
    for index in indices:
        if index is not None and index.dtype in _MASKS:
            masked += index.dim()
            dim += index.dim()
            continue
        kept *= 1 if index is not None else input.shape[dim]
        dim += 1
    if not masked:
        return 0
    kept *= math.prod(input.shape[dim:])
    return elements // kept * masked * LONG if kept else 0


@get.workspace("cpu")
def masks_as_positions(outputs: Tensor, input: Tensor, indices: Sequence[Tensor | None]) -> int:
    """Masks as positions; TORCH_PRECOMPUTE_META_FUNC2(index)."""
    return _positions_on_cpu(input, indices, outputs.numel())


@put.workspace("cpu")
def masks_of_values(input: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> int:
    """Masks as positions, where there is a value for each.

    native/TensorAdvancedIndexing.cpp, _index_put_impl_.
    """
    return _positions_on_cpu(input, indices, values.numel()) if values.numel() > 1 else 0


@get.workspace("cuda")
def dense_indices_or_positions(
    machine: Gpu, outputs: Tensor, input: Tensor, indices: Sequence[Tensor | None]
) -> tuple[Request, ...]:
    """Indices of different strides dense, masks as positions, before the output; AdvancedIndex."""
    masks = [found for found in indices if found is not None and found.dtype in _MASKS]
    if not masks:
        return (*_dense_indices([found for found in indices if found is not None]), ALL)
    kept = _unindexed(input, indices)
    return (*_positions(machine, masks, outputs.numel() // kept if kept else 0), ALL)


@put.workspace("cuda")
def indices_and_sort(
    machine: Gpu,
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Workspace | tuple[int, ...]:
    """Sums go through a sort of the indices; ``index_put_with_sort_kernel``.

    Of indices with others between them, the input is copied with their dimensions in front.
    """
    given = [found for found in indices if found is not None]
    masks = [found for found in given if found.dtype in _MASKS]
    plain = [found for found in given if found.dtype not in _MASKS]
    number = _number(plain) if plain else _rows(input, indices, values)
    requests = _positions(machine, masks, number)
    certain = number != 1 or not masks  # one value may be for any number of positions
    if not (accumulate or prefers_deterministic()):
        requests += _dense_indices(plain)
        return requests if certain else bounded(*requests)
    found: list[Tensor | None] = []
    for index in indices:
        wide = max(1, index.dim()) if index is not None and index.dtype in _MASKS else 0
        stand_ins = (torch.empty((number,), dtype=torch.int64, device="meta"),) * wide
        found += stand_ins or (index,)
    owned = [number * max(1, mask.dim()) * LONG for mask in masks]
    requests += put_in_order(machine, input, found, values, checked=not unsafe, owned=owned)
    return requests if certain else bounded(*requests)


def _rows(input: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> int:
    """How many positions masks have, as far as what is written says so."""
    behind = input.dim() - sum(
        max(1, index.dim()) if index is not None and index.dtype in _MASKS else 1
        for index in indices
    )
    behind += len(indices) - 1 - max(at for at, index in enumerate(indices) if index is not None)
    return values.shape[-behind - 1] if values.dim() > behind else 1


def put_in_order(
    gpu: Gpu,
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    *,
    checked: bool = True,
    owned: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return what is taken where equal indices are written in their order: one index made of
    several, values for each, and the sort; Indexing.cu, ``index_put_with_sort_kernel``.

    Indices that are ``owned``, bytes that were taken before, are given back after the first.
    """
    given = [index for index in indices if index is not None]
    number, kept = _number(given), _unindexed(input, indices)
    widened = [dense_bytes(index, torch.int64) for index in given if index.dtype == torch.int32]
    given_back = (-nbytes for nbytes in (*widened, *owned))
    linear = (*widened, *_linear_index(gpu, given, checked), *given_back)
    moved = dense_bytes(input) if _are_apart(indices) else 0
    copies = (_values(values, number * kept), moved)
    if not number * kept:
        return (contiguous_copy(input), *linear, *copies)
    leading = 0 if moved else [index is None for index in indices].index(False)
    rows = math.prod(input.shape[:leading]) * input.numel() // kept
    bits = max(1, (rows - 1).bit_length())  # cub.cuh, get_num_bits of the largest index
    sort = cub.radix_sort(gpu, number, LONG, LONG, bits)
    in_order = (number * LONG, number * LONG, *range_of(number), sort)
    return (contiguous_copy(input), *linear, *copies, *in_order)


def range_of(number: int) -> tuple[int, ...]:
    """Return what a range takes, which deterministic algorithms fill with a number first."""
    return (number * LONG, *(passing(LONG) if prefers_deterministic() else ()))


def _linear_index(gpu: Gpu, indices: Sequence[Tensor], checked: bool) -> tuple[int, ...]:
    """The extremes of each are looked at, before torch 2.13 one by one, then it is wrapped and
    multiplied; Indexing.cu, ``computeLinearIndex``.
    """
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    whole = torch.empty(shape, dtype=torch.int64, device="meta")
    product = (dense_bytes(whole), dense_bytes(whole), -dense_bytes(whole))
    requests: tuple[int, ...] = ()
    for position, index in enumerate(indices):
        if checked:
            found = passing(*pair_of_values(gpu, index.expand(shape).to(torch.int64)))
            one_by_one = passing(LONG, *found, *passing(1)) * 2
            together = passing(LONG, LONG, *found, *passing(1), *passing(1))
            requests += together if TORCH_VERSION >= (2, 13) else one_by_one
        requests += passing(*product) if position else product
    return requests


def _are_apart(indices: Sequence[Tensor | None]) -> bool:
    """``hasContiguousSubspace``, TensorAdvancedIndexingUtils.h: not all indices stand together."""
    given = [position for position, found in enumerate(indices) if found is not None]
    return bool(given) and given[-1] - given[0] >= len(given)


def _values(values: Tensor, elements: int) -> int:
    """Bytes of the values made dense, expanded to all positions where they are fewer."""
    if values.numel() < elements:
        return elements * values.element_size()
    return contiguous_copy(values)


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
    copies = tuple(0 if found.expand(shape).is_contiguous() else number * LONG for found in indices)
    return (*widened, *copies)


def _positions(gpu: Gpu, masks: Sequence[Tensor], number: int) -> tuple[int, ...]:
    """What masks take as positions: ``nonzero`` of each, one after the other."""
    return tuple(chain(*(positions_of(gpu, mask, number) for mask in masks)))
