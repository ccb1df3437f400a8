"""Gathering and scattering: an index for every element.

native/TensorAdvancedIndexing.cpp, native/cpu/ScatterGatherKernel.cpp; native/cuda/
ScatterGatherKernel.cu takes nothing, unless algorithms have to be deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.extremes import pair_of_values
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, bounded, passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.state.settings import prefers_deterministic

_INDEX = 8
_SCALAR = 8

scattering = operator("aten::scatter", "aten::scatter_")
adding = operator("aten::scatter_add", "aten::scatter_add_")
reducing = operator("aten::scatter_reduce", "aten::scatter_reduce_")


def _index(index: object) -> int:
    """Indices of 32 bits are widened."""
    if isinstance(index, Tensor) and index.dtype == torch.int32:
        return index.numel() * _INDEX
    return 0


def _float_buffer(written: Tensor) -> int:
    """A 16-bit tensor that is written to is held in float meanwhile."""
    if written.dtype in (torch.bfloat16, torch.float16):
        return written.numel() * torch.float32.itemsize
    return 0


def _expanded(target: Tensor, dim: int, index: Tensor, source: Tensor, scatters: bool) -> bool:
    """Whether one index stands for a whole row, and rows are summed up at once;
    native/TensorAdvancedIndexing.cpp, can_use_expanded_index_path.
    """
    tensors = (target, index, source)
    if not target.dtype.is_floating_point or any(
        tensor.dim() == 0 or tensor.numel() == 0 for tensor in tensors
    ):
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
    if target.dtype in (torch.bfloat16, torch.float16):
        return machine.threads * columns * torch.float32.itemsize
    return 0


@operator("aten::gather").workspace("cpu")
def gather(outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """cpu_scatter_gather_base_kernel."""
    if _expanded(outputs, dim, index, input, scatters=False):
        return _index(index)
    return _index(index) + _float_buffer(outputs)


@adding.workspace("cpu")
def rows_of_sums(
    machine: Host, outputs: Tensor, input: Tensor, dim: int, index: Tensor, src: Tensor
) -> int:
    """cpu_scatter_reduce_expanded_index and
    cpu_scatter_gather_base_kernel.
    """
    if index.numel() == 0:
        return 0
    if _expanded(outputs, dim, index, src, scatters=True):
        return _index(index) + _row_buffer(machine, outputs, index.numel() // index.shape[0])
    return _index(index) + _float_buffer(input)


@scattering.workspace("cpu")
def float_buffer(input: Tensor, index: Tensor) -> int:
    """cpu_scatter_gather_base_kernel."""
    if index.numel() == 0:
        return 0
    return _index(index) + _float_buffer(input)


@reducing.workspace("cpu")
def counts_of_mean(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: int,
    index: Tensor,
    src: object,
    reduce: object = None,
) -> int:
    """A mean counts what it adds up: ones like the source, counts like the result, a mask.

    scatter_reduce_two.
    """
    if index.numel() == 0:
        return 0
    if isinstance(src, Tensor) and _expanded(outputs, dim, index, src, scatters=True):
        return _index(index) + _row_buffer(machine, outputs, index.numel() // index.shape[0])
    buffer = _float_buffer(input)
    if reduce != "mean" or not isinstance(src, Tensor):
        return _index(index) + buffer
    mask = _SCALAR + input.element_size() + input.numel()
    counts = dense_bytes(src) + dense_bytes(input)
    return _index(index) + max(buffer, counts + max(buffer, mask))


@scattering.workspace("cuda")
def put_where_deterministic(
    machine: Gpu,
    input: Tensor,
    index: Tensor,
    src: Tensor | None = None,
    reduce: str | None = None,
) -> Workspace | int:
    """Exactly nothing; deterministic through an ``index_put``. ``scatter_impl``."""
    if src is None or reduce not in (None, "add"):
        return 0
    return _scattered(machine, input, index, src)


@adding.workspace("cuda")
def sort_where_deterministic(
    machine: Gpu, input: Tensor, index: Tensor, src: Tensor
) -> Workspace | int:
    """Atomic additions, exactly nothing; deterministic through a sort.

    ``scatter_add``.
    """
    return _scattered(machine, input, index, src)


@reducing.workspace("cuda")
def counts_or_sort(
    machine: Gpu, input: Tensor, index: Tensor, src: Tensor, reduce: str
) -> Workspace | tuple[int, ...]:
    """Exactly nothing; a mean counts what it adds up. ``scatter_reduce_two``."""
    sums = reduce in ("sum", "mean")
    found = _scattered(machine, input, index, src) if sums else 0
    counts = mean_counts(input, src) if reduce == "mean" else ()
    if isinstance(found, Workspace):  # the counts are added up in the same way, in place of a mask
        return bounded(*counts[:2], *found.requests)
    return counts


def mean_counts(input: Tensor, source: Tensor) -> tuple[int, int, int]:
    """Return what a mean counts in: counts as large as the result, ones as large as the source, and
    where a count is zero.
    """
    return (dense_bytes(input), dense_bytes(source), input.numel())


def _scattered(gpu: Gpu, input: Tensor, index: Tensor, source: Tensor) -> Workspace | int:
    """What deterministic algorithms take; ``_scatter_via_index_put``.

    Coordinates of every element, their product with the strides, and the sum of it: its result
    indexes the flattened input.
    """
    number = index.numel()
    if not prefers_deterministic() or not number:
        return 0
    each = number * _INDEX
    sorting = (each, *sort_of_indices(gpu, number))
    if input.dim() <= 1:
        return bounded(contiguous_copy(source), *sorting)
    dense = contiguous_copy(source.as_strided(index.shape, source.stride()))
    coordinates = each * input.dim()
    flattened = (coordinates, each, dense)
    return bounded(*max((*flattened, *sorting), (coordinates, coordinates, each), key=sum))


_LONG = 8


def linear_index(gpu: Gpu, indices: Sequence[Tensor], *, checked: bool) -> tuple[int, ...]:
    """Return what one index made of several takes: their extremes are looked at where they are
    ``checked``, then each is wrapped and multiplied; Indexing.cu, ``computeLinearIndex``.
    """
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    whole = torch.empty(shape, dtype=torch.int64, device="meta")
    product = (dense_bytes(whole), dense_bytes(whole), -dense_bytes(whole))
    requests: tuple[int, ...] = ()
    for position, index in enumerate(indices):
        if checked:
            copy = contiguous_copy(index.expand(shape).to(torch.int64))
            found = passing(copy, *pair_of_values(gpu, whole))
            requests += passing(_LONG, _LONG, *found, *passing(1), *passing(1))
        requests += passing(*product) if position else product
    return requests


def sort_of_indices(gpu: Gpu, number: int, bits: int | None = None) -> tuple[int, ...]:
    """Return what sorting indices takes: the sorted ones, where they stood, their range, and the
    sort by so many bits; Indexing.cu, ``index_put_with_sort_kernel``.
    """
    sort = cub.radix_sort(gpu, number, _LONG, _LONG, bits)
    return (*[number * _LONG] * 3, sort)
