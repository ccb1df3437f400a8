"""Elements gathered and scattered by indices, rows chosen by a vector of them, elements moved or
repeated.

native/TensorAdvancedIndexing.cpp, native/cpu/ScatterGatherKernel.cpp; native/cuda/
ScatterGatherKernel.cu and Indexing.cu take nothing, unless algorithms have to be deterministic.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.geometry import (
    CONTIGUOUS,
    HALVES,
    LONG,
    SCALAR,
    contiguous_copy,
    copied,
    dense_bytes,
    dense_copy,
)
from pytest_torchmem.operators.indexing.advanced import put_in_order, range_of
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.sums import in_type_of_input
from pytest_torchmem.operators.registry import UnknownOutputs, operator
from pytest_torchmem.operators.workspace import ALL, Request, Workspace, passing, unknown
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.settings import prefers_deterministic

scattering = operator("aten::scatter", "aten::scatter_")
adding = operator("aten::scatter_add", "aten::scatter_add_")
reducing = operator("aten::scatter_reduce", "aten::scatter_reduce_")


def _index(index: object) -> int:
    """Indices of 32 bits are widened."""
    if isinstance(index, Tensor) and index.dtype == torch.int32:
        return index.numel() * LONG
    return 0


def _float_buffer(written: Tensor) -> int:
    """A 16-bit tensor that is written to is held in float meanwhile."""
    if written.dtype in HALVES:
        return written.numel() * torch.float32.itemsize
    return 0


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


def _row_buffer(machine: Host, target: Tensor, columns: int) -> int:
    """A row of sums in float for each thread; cpu_scatter_reduce_expanded_index."""
    if target.dtype in HALVES:
        return machine.threads * columns * torch.float32.itemsize
    return 0


@operator("aten::gather").workspace("cpu")
def gather(outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """cpu_scatter_gather_base_kernel."""
    if _expanded(outputs, dim, index, input, scatters=False):
        return _index(index)
    return _index(index) + _float_buffer(outputs)


@adding.workspace("cpu")
@reducing.workspace("cpu")
def rows_of_sums(machine: Host, outputs: Tensor, scatter: Scatter, index: Tensor) -> int:
    """cpu_scatter_reduce_expanded_index and cpu_scatter_gather_base_kernel.

    A mean counts what it adds up: ones like the source, counts like the result, a mask;
    scatter_reduce_two.
    """
    input, dim, src, reduce = scatter
    if index.numel() == 0:
        return 0
    if _expanded(outputs, dim, index, src, scatters=True):
        return _index(index) + _row_buffer(machine, outputs, index.numel() // index.shape[0])
    buffer = _float_buffer(input)
    if reduce != "mean" or not isinstance(src, Tensor):
        return _index(index) + buffer
    mask = SCALAR + input.element_size() + input.numel()
    counts = dense_bytes(src) + dense_bytes(input)
    return _index(index) + max(buffer, counts + max(buffer, mask))


@scattering.workspace("cpu")
def float_buffer(input: Tensor, index: Tensor) -> int:
    """cpu_scatter_gather_base_kernel."""
    return _index(index) + _float_buffer(input) if index.numel() else 0


@scattering.workspace("cuda")
@adding.workspace("cuda")
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


@reducing.workspace("cuda")
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


adding_rows = operator("aten::index_add", "aten::index_add_")
operator("aten::index_select", unknown_outputs=UnknownOutputs.CARRIED)


@operator("aten::index_select").workspace("cpu")
def index_select(outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """Along the second dimension the input has to be dense; index_select_out_cpu_."""
    copied = contiguous_copy(index)
    if input.dim() < 2 or 0 in (index.numel(), input.numel()):
        return copied
    if dim % input.dim() == 1 and outputs.is_contiguous():
        return copied + dense_copy(input)
    return copied


@adding_rows.workspace("cpu")
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


@adding_rows.workspace("cuda")
def sort_rows_where_deterministic(
    machine: Gpu, input: Tensor, dim: int, index: Tensor, source: Tensor
) -> tuple[int, ...]:
    """Atomic additions, nothing; deterministic by a product and a sort. index_add_cuda_impl."""
    if not prefers_deterministic():
        return ()
    return (dense_bytes(source), *_put_along(machine, input, dim, index, source))


@operator("aten::index_copy", "aten::index_copy_").workspace("cuda")
def index_copy(
    machine: Gpu, input: Tensor, dim: int, index: Tensor, source: Tensor
) -> tuple[int, ...]:
    """Nothing; deterministic through an ``index_put``. ``index_copy_out``."""
    if not prefers_deterministic() or not index.numel():
        return ()
    return _put_along(machine, input, dim, index, source)


def _put_along(gpu: Gpu, input: Tensor, dim: int, index: Tensor, source: Tensor) -> tuple[int, ...]:
    before = [None] * (dim % max(1, input.dim()))
    return put_in_order(gpu, input, [*before, index], source.movedim(dim, len(before)))


@operator("aten::index_reduce_").decomposition("cpu")
def mean_in_place(
    self: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """A mean counts what it adds up; index_reduce_func_impl."""
    if reduce == "mean":
        counts = torch.ones_like(self) if include_self else torch.zeros_like(self)
        counts.index_add_(dim, index, torch.ones_like(source))
        counts.masked_fill_(counts == 0, 1)
        if self.is_floating_point():
            self.div_(counts)
    return self


@operator("aten::index_reduce").decomposition("cpu")
def mean_of_copy(call: GivenCall, self: Tensor) -> Tensor:
    """As in place, on a copy; index_reduce_cpu_out."""
    return mean_in_place(torch.empty_like(self), *call.args[1:], **call.kwargs)


@operator("aten::index_reduce", "aten::index_reduce_").workspace("cuda")
def mean_on_cuda(input: Tensor, source: Tensor, reduce: str) -> tuple[int, ...]:
    """A mean counts its terms; the ones are freed before the mask. Exact, index_reduce_cuda_out."""
    if reduce != "mean":
        return ()
    ones, counts, mask = mean_counts(input, source)
    return (counts, *passing(ones), mask)


rolling = operator("aten::roll")


@rolling.workspace("cpu")
def rolled_on_cpu(input: Tensor, dims: Sequence[int] = ()) -> int:
    """Several dimensions are rolled one by one, all as one; TensorTransformations.cpp."""
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 0 else contiguous_copy(input)


@rolling.workspace("cuda")
def rolled_on_cuda(input: Tensor, dims: Sequence[int] = ()) -> tuple[Request, ...]:
    """A dense copy; of several dimensions one after the other, the result of each but the last.

    TensorTransformations.cu, ``roll_cuda``; native/TensorTransformations.h, ``roll_common``.
    """
    copies = [dense_bytes(input)] * (len(dims) - 1) if len(dims) > 1 else [contiguous_copy(input)]
    return (*copies, ALL)


@operator("aten::tril", "aten::triu").workspace("cpu")
def triangle(input: Tensor) -> int:
    """A copy of batches that are apart; native/TriangularOps.cpp, checkTrilTriuBatchContiguous."""
    if input.is_contiguous() or input.numel() == 0:
        return 0
    expected = input.shape[-1] * input.shape[-2]
    for dim in range(input.dim() - 3, -1, -1):
        if input.stride(dim) != expected:
            return dense_bytes(input)
        expected *= input.shape[dim]
    return 0


@operator("aten::tril_", "aten::triu_").workspace("cpu")
def triangle_in_place(input: Tensor) -> Workspace | int:
    """Where there would be a copy, perhaps another for the result."""
    return unknown() if triangle(input) else 0


operator("aten::narrow_copy").workspace("cpu")(copied(self=CONTIGUOUS))

repeat_interleave = operator("aten::repeat_interleave")


@operator("aten::repeat_interleave.Tensor", size_argument="output_size").at_most()
def said_by_caller(repeats: Tensor, output_size: int | None = None) -> Tensor | None:
    """What the caller says, if it does; native/Repeat.h, ``repeat_interleave_common``."""
    return None if output_size is None else repeats.new_empty(output_size)


@repeat_interleave.workspace("cpu")
def sums_of_counts(repeats: Tensor) -> int:
    """A prefix sum of the counts, of dense ones; native/Repeat.h, ``repeat_interleave_common``."""
    converted = 0 if repeats.element_size() == LONG else LONG * repeats.numel()
    return contiguous_copy(repeats) + LONG * repeats.numel() + converted


@repeat_interleave.workspace("cuda")
def prefix_sum(
    machine: Gpu, repeats: Tensor, output_size: int | None = None
) -> tuple[Request, ...]:
    """A prefix sum of the counts, and whether one is negative; repeat_interleave_common."""
    number = repeats.numel()
    copy = converted(repeats, torch.int64) or contiguous_copy(repeats)
    sums = (number * LONG, *passing(copy, cub.scan(number, LONG)))
    if output_size is not None:
        return (contiguous_copy(repeats), *sums, ALL)
    signs = torch.empty((number,), dtype=torch.bool, device="meta")
    return (contiguous_copy(repeats), *sums, number, 1, *in_type_of_input(machine, signs))
