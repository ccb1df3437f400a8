"""Gathering, scattering and moving elements on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.formats import dense_copy
from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.reduction.cpu_buffers import GRAIN, sum_workspace
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

_INDEX = 8
_SCALAR = 8


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


@operator("aten::index_select").workspace("cpu")
def index_select(outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """Along the second dimension the input has to be dense; native/TensorAdvancedIndexing.cpp,
    index_select_out_cpu_.
    """
    copied = contiguous_copy(index)
    if input.dim() < 2 or 0 in (index.numel(), input.numel()):
        return copied
    if dim % input.dim() == 1 and outputs.is_contiguous():
        return copied + dense_copy(input)
    return copied


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


@operator("aten::index_add", "aten::index_add_").workspace("cpu")
def index_add(
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
    return scatter_add(machine, outputs, input, dim, rows, source)


def _positions(input: Tensor, indices: Sequence[Tensor | None], elements: int) -> int:
    """Bytes of the positions that masks are turned to, where ``elements`` are read or written;
    native/TensorAdvancedIndexingUtils.h, expandTensors.
    """
    masked, kept, dim = 0, 1, 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            masked += index.dim()
            dim += index.dim()
            continue
        kept *= 1 if index is not None else input.shape[dim]
        dim += 1
    if not masked:
        return 0
    kept *= math.prod(input.shape[dim:])
    return elements // kept * masked * _INDEX if kept else 0


@operator("aten::index").workspace("cpu")
def index(outputs: Tensor, input: Tensor, indices: Sequence[Tensor | None]) -> int:
    """Masks as positions; native/TensorAdvancedIndexing.cpp, TORCH_PRECOMPUTE_META_FUNC2(index)."""
    return _positions(input, indices, outputs.numel())


@operator("aten::_index_put_impl_").workspace("cpu")
def index_put(input: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> int:
    """Masks as positions, where there is a value for each.

    native/TensorAdvancedIndexing.cpp, _index_put_impl_.
    """
    return _positions(input, indices, values.numel()) if values.numel() > 1 else 0


@operator("aten::gather").workspace("cpu")
def gather(outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """native/cpu/ScatterGatherKernel.cpp, cpu_scatter_gather_base_kernel."""
    if _expanded(outputs, dim, index, input, scatters=False):
        return _index(index)
    return _index(index) + _float_buffer(outputs)


@operator("aten::scatter_add", "aten::scatter_add_").workspace("cpu")
def scatter_add(
    machine: Host, outputs: Tensor, input: Tensor, dim: int, index: Tensor, src: Tensor
) -> int:
    """native/cpu/ScatterGatherKernel.cpp, cpu_scatter_reduce_expanded_index and
    cpu_scatter_gather_base_kernel.
    """
    if index.numel() == 0:
        return 0
    if _expanded(outputs, dim, index, src, scatters=True):
        return _index(index) + _row_buffer(machine, outputs, index.numel() // index.shape[0])
    return _index(index) + _float_buffer(input)


@operator("aten::scatter", "aten::scatter_").workspace("cpu")
def scatter(input: Tensor, index: Tensor) -> int:
    """native/cpu/ScatterGatherKernel.cpp, cpu_scatter_gather_base_kernel."""
    if index.numel() == 0:
        return 0
    return _index(index) + _float_buffer(input)


@operator("aten::scatter_reduce", "aten::scatter_reduce_").workspace("cpu")
def scatter_reduce(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: int,
    index: Tensor,
    src: object,
    reduce: object = None,
) -> int:
    """A mean counts what it adds up: ones like the source, counts like the result, a mask.

    native/TensorAdvancedIndexing.cpp, scatter_reduce_two.
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


@operator("aten::masked_select").workspace("cpu")
def masked_select(machine: Host, outputs: Tensor, input: Tensor, mask: Tensor) -> int:
    """The mask as int64, to be counted, and where several threads select also to be added up;
    native/TensorAdvancedIndexing.cpp, masked_select_out_impl_cpu.
    """
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    elements = int(math.prod(shape))
    whole = elements * _INDEX
    serial = outputs.numel() == 0 or (
        selects_serially(machine, input) and all(_dense(side, shape) for side in (input, mask))
    )
    added_up = sum_workspace(machine, mask.expand(shape), torch.int64, 1)
    counted = _INDEX + added_up - dense_bytes(outputs)
    return max(counted, 0 if serial else 2 * whole, 0)


def selects_serially(machine: Host, input: Tensor) -> bool:
    """Return whether one thread selects elements of a dense tensor by a mask."""
    return input.is_contiguous() and (input.numel() < GRAIN or machine.threads == 1)


def _dense(tensor: Tensor, shape: Sequence[int]) -> bool:
    return tensor.shape == shape and tensor.is_contiguous()


@operator("aten::roll").workspace("cpu")
def roll(input: Tensor, dims: Sequence[int] = ()) -> int:
    """Several dimensions are rolled one after the other, all of them as one;
    native/TensorTransformations.cpp, roll_common.
    """
    return (len(dims) - 1) * dense_bytes(input) if len(dims) > 0 else contiguous_copy(input)


@operator("aten::tril", "aten::triu").workspace("cpu")
def triangle(input: Tensor) -> int:
    """A copy of batches that do not follow each other; native/TriangularOps.cpp,
    checkTrilTriuBatchContiguous.
    """
    if input.is_contiguous() or input.numel() == 0:
        return 0
    expected = input.shape[-1] * input.shape[-2]
    for dim in range(input.dim() - 3, -1, -1):
        if input.stride(dim) != expected:
            return dense_bytes(input)
        expected *= input.shape[dim]
    return 0
