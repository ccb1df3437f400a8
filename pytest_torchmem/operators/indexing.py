"""Indexing by tensors of indices and masks: positions where a mask is true, and the elements there,
copies of indices, and the sort behind sums. Elements gathered and scattered by indices, rows chosen
by a vector of them, elements moved or repeated.

native/TensorAdvancedIndexing.cpp, native/cpu/ScatterGatherKernel.cpp; native/cuda/IndexKernel.cpp,
Indexing.cu, Nonzero.cu. ScatterGatherKernel.cu and Indexing.cu take nothing for the latter, unless
algorithms have to be deterministic.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.elementwise import GRAIN, converted, sum_workspace
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction import in_type_of_input, pair_of_values
from pytest_torchmem.operators.registry import UnknownOutputs, operator
from pytest_torchmem.operators.workspace import (
    ALL,
    CONTIGUOUS,
    HALVES,
    LONG,
    SCALAR,
    Request,
    Workspace,
    bounded,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
    dense_copy,
    passing,
    unknown,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.settings import prefers_deterministic

_ELEMENTS_OF_BLOCK = 512 * 16
"""What a block of ``nonzero_static`` looks at in one round."""

selected = operator("aten::masked_select", decided_by=(1,))
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


def positions_of(gpu: Gpu, masks: Sequence[Tensor], number: int) -> tuple[int, ...]:
    """Return what turning masks, one after the other, to ``number`` positions takes, which are
    alive then: of each a dense copy, a count and CUB's.

    A mask without a dimension is given one (``expandTensors``).
    """
    requests: list[int] = []
    for mask in masks:
        copy, elements, made = contiguous_copy(mask), mask.numel(), number * _width(mask) * LONG
        counted, found = passing(cub.reduce(gpu, elements, 4)), passing(cub.flagged(gpu, elements))
        requests += [copy, 4, *counted, made, *found, -4, -copy]
    return tuple(requests)


# A row for each element, and all elements of the two that are broadcast together.
operator("aten::nonzero").at_most()(
    lambda input: input.new_empty((input.numel(), input.dim()), dtype=torch.int64)
)
selected.at_most()(
    lambda input, mask: input.new_empty(math.prod(torch.broadcast_shapes(input.shape, mask.shape)))
)


@operator("aten::nonzero", "aten::nonzero.out").decomposition("cuda")
def nonzero_at(machine: Gpu, outputs: Tensor, input: Tensor, out: Tensor | None = None) -> Tensor:
    """A count, and then positions; Nonzero.cu, ``nonzero_cuda_out_impl``."""
    number = len(outputs)
    dense, count = input.contiguous(), cub.scratch(4)
    cub.scratch(cub.reduce(machine, input.numel(), 4))
    if out is None:  # one dimension's positions after the other's
        out = torch.empty((input.dim(), number), dtype=torch.int64).t()
    out.resize_((number, input.dim()))
    if input.dim():
        cub.scratch(cub.flagged(machine, input.numel()))
    del count, dense
    return out


@operator("aten::nonzero_static").decomposition("cpu")
def every_position_then_cut(input: Tensor, *, size: int) -> Tensor:
    """All positions, cut at the end; native/TensorAdvancedIndexing.cpp, nonzero_static_cpu."""
    result = torch.empty((size, input.dim()), dtype=torch.int64)
    if result.numel():
        positions = input.nonzero()
        del positions
    return result


@operator("aten::nonzero_static").meta("cuda")
def positions_in_columns(input: Tensor, *, size: int) -> Tensor:
    """One dimension's positions after the other's; Nonzero.cu, nonzero_static_cuda."""
    return input.new_empty((input.dim(), size), dtype=torch.int64).t()


@operator("aten::nonzero_static").workspace("cuda")
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
    positions = nonzero_at(machine, outputs, whole if whole.dim() else whole.reshape(1))
    result = input.new_empty(outputs.shape) if out is None else out.resize_(outputs.shape)
    del positions
    return result


operator("aten::masked_scatter_").workspace("cpu")(copied(source=CONTIGUOUS))


@operator("aten::masked_scatter_").workspace("cuda")
def prefix_sum_of_mask(input: Tensor, mask: Tensor, source: Tensor) -> tuple[int, ...]:
    """A prefix sum of the mask; IndexKernel.cpp, ``masked_scatter__cuda``."""
    number = input.numel()
    whole = mask.expand(torch.broadcast_shapes(input.shape, mask.shape))
    summed = (number * LONG, contiguous_copy(whole), *passing(cub.scan(number, LONG)))
    return (*summed, contiguous_copy(source))


_MASKS = (torch.bool, torch.uint8)

operator(
    "index.Tensor _unsafe_index.Tensor index_put_ index_put",
    "_unsafe_index_put _index_put_impl_",
    masks=True,
    across_devices=True,
)


def _positions_on_cpu(input: Tensor, indices: Sequence[Tensor | None], elements: int) -> int:
    """Bytes of the positions that masks are turned to, where ``elements`` are read or written;
    native/TensorAdvancedIndexingUtils.h, expandTensors.
    """
    masked = sum(_width(index) for index in indices if _is_mask(index))
    kept = _unindexed(input, indices)
    return elements // kept * masked * LONG if kept else 0


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in _MASKS


def _width(index: Tensor | None) -> int:
    """How many dimensions an index is for; a mask without one is given one (``expandTensors``)."""
    return max(1, index.dim()) if index is not None and _is_mask(index) else 1


# TORCH_PRECOMPUTE_META_FUNC2(index); where there is a value for each position, _index_put_impl_.
operator("aten::index").workspace("cpu")(
    lambda outputs, input, indices: _positions_on_cpu(input, indices, outputs.numel())
)
operator("aten::_index_put_impl_").workspace("cpu")(
    lambda input, indices, values: (
        _positions_on_cpu(input, indices, values.numel()) if values.numel() > 1 else 0
    )
)


@operator("aten::index").workspace("cuda")
def dense_indices_or_positions(
    machine: Gpu, outputs: Tensor, input: Tensor, indices: Sequence[Tensor | None]
) -> tuple[Request, ...]:
    """Indices of different strides dense, masks as positions, before the output; AdvancedIndex."""
    masks = [found for found in indices if found is not None and _is_mask(found)]
    if not masks:
        return (*_dense_indices([found for found in indices if found is not None]), ALL)
    kept = _unindexed(input, indices)
    return (*positions_of(machine, masks, outputs.numel() // kept if kept else 0), ALL)


@operator("aten::_index_put_impl_").workspace("cuda")
def indices_and_sort(
    machine: Gpu,
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Workspace | tuple[int, ...]:
    """Sums go through a sort of the indices; ``index_put_with_sort_kernel``. Of indices with others
    between them, the input is copied with their dimensions in front.
    """
    given = [found for found in indices if found is not None]
    masks, plain = ([one for one in given if _is_mask(one) is masked] for masked in (True, False))
    number = _number(plain) if plain else _rows(input, indices, values)
    requests = positions_of(machine, masks, number)
    certain = number != 1 or not masks  # one value may be for any number of positions
    if not (accumulate or prefers_deterministic()):
        requests += _dense_indices(plain)
        return requests if certain else bounded(*requests)
    found: list[Tensor | None] = []
    positions = torch.empty((number,), dtype=torch.int64, device="meta")
    for index in indices:
        found += [positions if _is_mask(index) else index] * _width(index)
    owned = [dense_bytes(positions) * _width(mask) for mask in masks]
    requests += put_in_order(machine, input, found, values, checked=not unsafe, owned=owned)
    return requests if certain else bounded(*requests)


def _rows(input: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> int:
    """How many positions masks have, as far as what is written says so."""
    behind = input.dim() - sum(map(_width, indices))
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
    widened = [*map(_index, given)]
    given_back = (-nbytes for nbytes in (*widened, *owned))
    linear = (*widened, *_linear_index(gpu, given, checked), *given_back)
    # ``hasContiguousSubspace``, TensorAdvancedIndexingUtils.h: not all indices stand together.
    at = [position for position, found in enumerate(indices) if found is not None]
    moved = dense_bytes(input) if at[-1] - at[0] >= len(at) else 0
    whole = number * kept  # values are expanded to all positions where they are fewer
    few = values.numel() < whole
    copies = (whole * values.element_size() if few else contiguous_copy(values), moved)
    if not whole:
        return (contiguous_copy(input), *linear, *copies)
    leading = 0 if moved else at[0]
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


def _number(indices: Sequence[Tensor]) -> int:
    """How many positions indices stand for, broadcast together."""
    return math.prod(torch.broadcast_shapes(*(found.shape for found in indices)))


def _unindexed(input: Tensor, indices: Sequence[Tensor | None]) -> int:
    """Elements that stand at every position."""
    dim, number = 0, 1
    for found in indices:
        if found is None:
            number *= input.shape[dim]
        dim += _width(found)
    return number * math.prod(input.shape[dim:])


def _dense_indices(indices: Sequence[Tensor]) -> tuple[int, ...]:
    """Several indices whose strides differ once they are broadcast: every one is copied;
    ``AdvancedIndex``, ``all_strides_match``.
    """
    shape = torch.broadcast_shapes(*(found.shape for found in indices)) if indices else ()
    widened = tuple(map(_index, indices))
    strides = {found.expand(shape).stride() for found in indices}
    if len(indices) < 2 or len(strides) == 1:
        return widened
    number = math.prod(shape)
    copies = tuple(0 if found.expand(shape).is_contiguous() else number * LONG for found in indices)
    return (*widened, *copies)


def _index(index: Tensor) -> int:
    """Indices of 32 bits are widened."""
    return dense_bytes(index, torch.int64) if index.dtype == torch.int32 else 0


def _float_buffer(written: Tensor) -> int:
    """A 16-bit tensor that is written to is held in float meanwhile."""
    return dense_bytes(written, torch.float32) if written.dtype in HALVES else 0


class Scatter(NamedTuple):
    """What is scattered, by the names of the schemas' arguments; ``src`` may be a number."""

    input: Tensor
    dim: int
    src: Any = None
    reduce: str | None = None


def _expanded(target: Tensor, dim: int, index: Tensor, source: Any, scatters: bool) -> bool:
    """Whether one index stands for a whole row, and rows are summed up at once;
    native/TensorAdvancedIndexing.cpp, can_use_expanded_index_path.
    """
    if not isinstance(source, Tensor) or not target.dtype.is_floating_point:
        return False
    if any(tensor.dim() == 0 or tensor.numel() == 0 for tensor in (target, index, source)):
        return False
    if any(source.shape[axis] != index.shape[axis] for axis in range(1, index.dim())):
        return False
    if scatters and index.numel() // index.shape[0] < 16:
        return False
    expanded = index.stride(0) == 1 and all(
        stride == 0 or (stride == 1 and size == 1)
        for stride, size in zip(index.stride()[1:], index.shape[1:], strict=True)
    )
    dense = source.is_contiguous() and target.is_contiguous()
    return dim % target.dim() == 0 and expanded and dense


@operator("aten::gather").workspace("cpu")
def gather(outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """cpu_scatter_gather_base_kernel."""
    if _expanded(outputs, dim, index, input, scatters=False):
        return _index(index)
    return _index(index) + _float_buffer(outputs)


@operator("scatter_add scatter_add_ scatter_reduce scatter_reduce_").workspace("cpu")
def rows_of_sums(machine: Host, outputs: Tensor, scatter: Scatter, index: Tensor) -> int:
    """cpu_scatter_reduce_expanded_index and cpu_scatter_gather_base_kernel.

    A mean counts what it adds up: ones like the source, counts like the result, a mask;
    scatter_reduce_two.
    """
    input, dim, src, reduce = scatter
    if index.numel() == 0:
        return 0
    if _expanded(outputs, dim, index, src, scatters=True):
        # A row of sums in float for each thread.
        columns = index.numel() // index.shape[0] if outputs.dtype in HALVES else 0
        return _index(index) + machine.threads * columns * torch.float32.itemsize
    buffer = _float_buffer(input)
    if reduce != "mean" or not isinstance(src, Tensor):
        return _index(index) + buffer
    mask = SCALAR + input.element_size() + input.numel()
    counts = dense_bytes(src) + dense_bytes(input)
    return _index(index) + max(buffer, counts + max(buffer, mask))


@operator("aten::scatter", "aten::scatter_").workspace("cpu")
def float_buffer(input: Tensor, index: Tensor) -> int:
    """cpu_scatter_gather_base_kernel."""
    return _index(index) + _float_buffer(input) if index.numel() else 0


@operator("scatter scatter_ scatter_add scatter_add_").workspace("cuda")
def put_where_deterministic(machine: Gpu, scatter: Scatter, index: Tensor) -> tuple[int, ...]:
    """Nothing, atomic additions too; deterministic through an ``index_put``, which sorts:
    ranges for the other dimensions, and what that takes. ``scatter_impl``, ``scatter_add``,
    ``_scatter_via_index_put``.
    """
    input, dim, source, reduce = scatter
    if source is None or reduce not in (None, "add"):
        return ()
    if not prefers_deterministic() or not index.numel():
        return ()
    ranges: list[int] = []
    indices = [index] * max(1, input.dim())
    for axis in range(input.dim()):
        if axis != dim % input.dim():
            shape = [1] * input.dim()
            shape[axis] = index.shape[axis]
            indices[axis] = torch.empty(shape, dtype=torch.int64, device="meta")
            ranges += range_of(index.shape[axis])
    values = source.as_strided(index.shape, source.stride())
    return (*ranges, *put_in_order(machine, input, indices, values))


@operator("aten::scatter_reduce", "aten::scatter_reduce_").workspace("cuda")
def counts_or_sort(machine: Gpu, scatter: Scatter, index: Tensor) -> tuple[int, ...]:
    """Nothing, or deterministic a sort; a mean counts what it adds up. ``scatter_reduce_two``."""
    summed = passing(*put_where_deterministic(machine, scatter._replace(reduce=None), index))
    if scatter.reduce != "mean":
        return summed if scatter.reduce == "sum" else ()
    ones, counts, mask = mean_counts(scatter.input, scatter.src)
    return (*summed, ones, counts, *summed, mask)


def mean_counts(input: Tensor, source: Tensor) -> tuple[int, int, int]:
    """Return what a mean counts in: ones like the source, counts like the result, their zeros."""
    return (dense_bytes(source), dense_bytes(input), input.numel())


@operator("aten::index_select", unknown_outputs=UnknownOutputs.CARRIED).workspace("cpu")
def index_select(outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """Along the second dimension the input has to be dense; index_select_out_cpu_."""
    copied = contiguous_copy(index)
    if input.dim() < 2 or 0 in (index.numel(), input.numel()):
        return copied
    if dim % input.dim() == 1 and outputs.is_contiguous():
        return copied + dense_copy(input)
    return copied


@operator("aten::index_add", "aten::index_add_").workspace("cpu")
def as_scattered(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    alpha: complex,
) -> int:
    """Along the first or last dimension it is ``scatter_add_``; index_add_cpu_out."""
    if source.dim() < 2 or index.numel() == 0 or alpha != 1:
        return 0
    dim %= source.dim()
    if dim not in (0, source.dim() - 1):
        return 0
    sizes = [-1 if axis == dim else 1 for axis in range(source.dim())]
    rows = index.view(sizes).expand(source.shape)
    return rows_of_sums(machine, outputs, Scatter(input, dim, source), rows)


@operator("index_add index_add_ index_copy index_copy_").workspace("cuda")
def sort_rows_where_deterministic(
    machine: Gpu,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    alpha: complex | None = None,
) -> tuple[int, ...]:
    """Nothing, atomic additions too; deterministic through an ``index_put``, sums by a product
    before. index_add_cuda_impl, ``index_copy_out``.
    """
    if not prefers_deterministic() or (alpha is None and not index.numel()):
        return ()
    before = [None] * (dim % max(1, input.dim()))
    along = source.movedim(dim, len(before))
    product = 0 if alpha is None else dense_bytes(source)
    return (product, *put_in_order(machine, input, [*before, index], along))


@operator("aten::index_reduce", "aten::index_reduce_").decomposition("cpu")
def mean_in_place(call: GivenCall) -> Tensor:
    """A mean counts what it adds up; index_reduce_func_impl, of a copy index_reduce_cpu_out."""
    result: Tensor
    result, dim, index, source, reduce = call.args
    if call.overload is torch.ops.aten.index_reduce.default:
        result = torch.empty_like(result)
    if reduce == "mean":
        include_self = call.kwargs.get("include_self", True)
        counts = torch.ones_like(result) if include_self else torch.zeros_like(result)
        counts.index_add_(dim, index, torch.ones_like(source))
        counts.masked_fill_(counts == 0, 1)
        if result.is_floating_point():
            result.div_(counts)
    return result


@operator("aten::index_reduce", "aten::index_reduce_").workspace("cuda")
def mean_on_cuda(input: Tensor, source: Tensor, reduce: str) -> tuple[int, ...]:
    """A mean counts its terms; the ones are freed before the mask. Exact, index_reduce_cuda_out."""
    if reduce != "mean":
        return ()
    ones, counts, mask = mean_counts(input, source)
    return (counts, *passing(ones), mask)


@operator("aten::roll").workspace("cpu")
def rolled_on_cpu(input: Tensor, dims: Sequence[int] = ()) -> int:
    """Several dimensions are rolled one by one, all as one; TensorTransformations.cpp."""
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 0 else contiguous_copy(input)


@operator("aten::roll").workspace("cuda")
def rolled_on_cuda(input: Tensor, dims: Sequence[int] = ()) -> tuple[Request, ...]:
    """A dense copy; of several dimensions one after the other, the result of each but the last;
    TensorTransformations.cu, ``roll_cuda``; native/TensorTransformations.h, ``roll_common``.
    """
    copies = [dense_bytes(input)] * (len(dims) - 1) if len(dims) > 1 else [contiguous_copy(input)]
    return (*copies, ALL)


@operator("aten::tril", "aten::triu").workspace("cpu")
def triangle(input: Tensor) -> int:
    """A copy of batches that are apart; native/TriangularOps.cpp, checkTrilTriuBatchContiguous."""
    if input.is_contiguous() or input.numel() == 0:
        return 0
    dense = torch.empty(input.shape, device="meta").stride()
    return 0 if input.stride()[:-2] == dense[:-2] else dense_bytes(input)


# Where there would be a copy, perhaps another for the result.
operator("tril_ triu_").workspace("cpu")(lambda input: unknown() if triangle(input) else 0)
operator("aten::narrow_copy").workspace("cpu")(copied(self=CONTIGUOUS))


@operator("aten::repeat_interleave.Tensor", size_argument="output_size").at_most()
def said_by_caller(repeats: Tensor, output_size: int | None = None) -> Tensor | None:
    """What the caller says, if it does; native/Repeat.h, ``repeat_interleave_common``."""
    return None if output_size is None else repeats.new_empty(output_size)


@operator("aten::repeat_interleave").workspace("cpu")
def sums_of_counts(repeats: Tensor) -> int:
    """A prefix sum of the counts, of dense ones; native/Repeat.h, ``repeat_interleave_common``."""
    converted = 0 if repeats.element_size() == LONG else LONG * repeats.numel()
    return contiguous_copy(repeats) + LONG * repeats.numel() + converted


@operator("aten::repeat_interleave").workspace("cuda")
def prefixes(machine: Gpu, repeats: Tensor, output_size: int | None = None) -> tuple[Request, ...]:
    """A prefix sum of the counts, and whether one is negative; repeat_interleave_common."""
    number = repeats.numel()
    copy = converted(repeats, torch.int64) or contiguous_copy(repeats)
    sums = (number * LONG, *passing(copy, cub.scan(number, LONG)))
    if output_size is not None:
        return (contiguous_copy(repeats), *sums, ALL)
    signs = torch.empty((number,), dtype=torch.bool, device="meta")
    return (contiguous_copy(repeats), *sums, number, 1, *in_type_of_input(machine, signs))
