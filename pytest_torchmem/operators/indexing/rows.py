"""Rows chosen by one vector of indices.

native/TensorAdvancedIndexing.cpp; native/cuda/Indexing.cu takes nothing, unless algorithms have to
be deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.formats import dense_copy
from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.indexing.advanced import put_in_order
from pytest_torchmem.operators.indexing.scatter import mean_counts, rows_of_sums
from pytest_torchmem.operators.registry import UnknownOutputs, operator
from pytest_torchmem.operators.workspace import passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.state.settings import prefers_deterministic

_LONG = 8

adding = operator("aten::index_add", "aten::index_add_")
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


@adding.workspace("cpu")
def as_scattered(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    alpha: complex,
) -> int:
    """Along the first or last dimension it is ``scatter_add_``; native/TensorAdvancedIndexing.cpp,
    index_add_cpu_out.
    """
    if source.dim() < 2 or index.numel() == 0 or alpha != 1:
        return 0
    dim %= source.dim()
    if dim not in (0, source.dim() - 1):
        return 0
    sizes = [-1 if axis == dim else 1 for axis in range(source.dim())]
    rows = index.view(sizes).expand(source.shape)
    return rows_of_sums(machine, outputs, input, dim, rows, source)


@adding.workspace("cuda")
def sort_where_deterministic(
    machine: Gpu, input: Tensor, dim: int, index: Tensor, source: Tensor
) -> tuple[int, ...]:
    """Atomic additions, nothing; deterministic through a product and a sort. Indexing.cu,
    ``index_add_cuda_impl``.
    """
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
    self: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
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
    """A mean counts what it adds up, of which the ones are gone before the mask is made; exact,
    Indexing.cu, ``index_reduce_cuda_out``.
    """
    if reduce != "mean":
        return ()
    ones, counts, mask = mean_counts(input, source)
    return (counts, *passing(ones), mask)
