"""Indexing by tensors of indices and masks: positions where a mask is true, and the elements there,
copies of indices, and the sort behind sums.

native/TensorAdvancedIndexing.cpp; native/cuda/IndexKernel.cpp, Indexing.cu, Nonzero.cu.
"""

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    CONTIGUOUS,
    LONG,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
)
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.buffers import GRAIN, sum_workspace
from pytest_torchmem.operators.reduction.sums import pair_of_values
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import ALL, Request, Workspace, bounded, passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.settings import prefers_deterministic

_ELEMENTS_OF_BLOCK = 512 * 16
"""What a block of ``nonzero_static`` looks at in one round."""

selected = operator("aten::masked_select", decided_by=(1,))
scattered = operator("aten::masked_scatter_")
operator("aten::masked_scatter", decided_by=(1,))


@selected.workspace("cpu")
def counted_mask(machine: Host, outputs: Tensor, input: Tensor, mask: Tensor) -> int:
    """The mask as int64, to be counted, and for threads added up; masked_select_out_impl_cpu."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    elements = int(math.prod(shape))
    whole = elements * LONG
    dense = all(side.shape == shape and side.is_contiguous() for side in (input, mask))
    serial = outputs.numel() == 0 or (selects_serially(machine, input) and dense)
    added_up = sum_workspace(machine, mask.expand(shape), torch.int64, 1)
    counted = LONG + added_up - dense_bytes(outputs)
    return max(counted, 0 if serial else 2 * whole, 0)


def selects_serially(machine: Host, input: Tensor) -> bool:
    """Return whether one thread selects elements of a dense tensor by a mask."""
    return input.is_contiguous() and (input.numel() < GRAIN or machine.threads == 1)


def positions_of(gpu: Gpu, mask: Tensor, number: int) -> tuple[int, ...]:
    """Return what turning a mask to ``number`` positions takes, which are alive then: a dense copy,
    a count and CUB's.

    A mask without a dimension is given one (``expandTensors``).
    """
    copy, elements = contiguous_copy(mask), mask.numel()
    counted, found = passing(cub.reduce(gpu, elements, 4)), passing(cub.flagged(gpu, elements))
    return (copy, 4, *counted, number * max(1, mask.dim()) * LONG, *found, -4, -copy)


@operator("aten::nonzero").at_most()
def every_position(input: Tensor) -> Tensor:
    """A row for each element."""
    return input.new_empty((input.numel(), input.dim()), dtype=torch.int64)


@selected.at_most()
def every_element(input: Tensor, mask: Tensor) -> Tensor:
    """All elements of the two that are broadcast together."""
    return input.new_empty(math.prod(torch.broadcast_shapes(input.shape, mask.shape)))


@operator("aten::nonzero", "aten::nonzero.out").decomposition("cuda")
def counted_then_found(
    machine: Gpu, outputs: Tensor, input: Tensor, out: Tensor | None = None
) -> Tensor:
    """A count, and then positions; Nonzero.cu, ``nonzero_cuda_out_impl``."""
    return _found(machine, input, len(outputs), out)


def _found(gpu: Gpu, input: Tensor, number: int, out: Tensor | None = None) -> Tensor:
    """One dimension's positions after the other's."""
    dense, count = input.contiguous(), cub.scratch(4)
    cub.scratch(cub.reduce(gpu, input.numel(), 4))
    if out is None:
        out = torch.empty((input.dim(), number), dtype=torch.int64).t()
    out.resize_((number, input.dim()))
    if input.dim():
        cub.scratch(cub.flagged(gpu, input.numel()))
    del count, dense
    return out


static = operator("aten::nonzero_static")


@static.decomposition("cpu")
def every_position_then_cut(input: Tensor, *, size: int) -> Tensor:
    """All positions, cut at the end; native/TensorAdvancedIndexing.cpp, nonzero_static_cpu."""
    result = torch.empty((size, input.dim()), dtype=torch.int64)
    if result.numel():
        positions = input.nonzero()
        del positions
    return result


@static.meta("cuda")
def positions_in_columns(input: Tensor, *, size: int) -> Tensor:
    """One dimension's positions after the other's; Nonzero.cu, nonzero_static_cuda."""
    return input.new_empty((input.dim(), size), dtype=torch.int64).t()


@static.workspace("cuda")
def counts_of_blocks(machine: Gpu, input: Tensor, size: int) -> tuple[int, ...]:
    """A dense copy, and what each block counts, added up; nonzero_static_cuda_out_impl."""
    number = input.numel()
    if not number or not size * input.dim():
        return ()
    most = machine.multiprocessors * (2 if input.element_size() == 1 else 1)
    rounds = ceil_div(ceil_div(number, _ELEMENTS_OF_BLOCK), most)
    blocks = ceil_div(number, rounds * _ELEMENTS_OF_BLOCK)
    return contiguous_copy(input), 4 * blocks, LONG * blocks


@operator("aten::masked_select", "aten::masked_select.out").decomposition("cuda")
def positions_of_mask(
    machine: Gpu, outputs: Tensor, input: Tensor, mask: Tensor, out: Tensor | None = None
) -> Tensor:
    """The positions of the mask; IndexKernel.cpp, ``masked_select_out_cuda_impl``."""
    whole = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    positions = _found(machine, whole if whole.dim() else whole.reshape(1), outputs.numel())
    result = input.new_empty(outputs.shape) if out is None else out.resize_(outputs.shape)
    del positions
    return result


scattered.workspace("cpu")(copied(source=CONTIGUOUS))


@scattered.workspace("cuda")
def prefix_sum_of_mask(input: Tensor, mask: Tensor, source: Tensor) -> tuple[int, ...]:
    """A prefix sum of the mask; IndexKernel.cpp, ``masked_scatter__cuda``."""
    number = input.numel()
    whole = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    summed = (number * LONG, contiguous_copy(whole), *passing(cub.scan(number, LONG)))
    return (*summed, contiguous_copy(source))


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
