"""Gathering, scattering and moving elements on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.host import Host
from pytest_torchmem.profiler.workspace import workspace
from pytest_torchmem.profiler.workspace.cpu.copies import dense_copy
from pytest_torchmem.profiler.workspace.cpu.geometry import contiguous_copy, dense_bytes

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


@workspace("aten::index_select", device="cpu")
def index_select(machine: Host, outputs: Tensor, input: Tensor, dim: int, index: Tensor) -> int:
    """Along the second dimension the input has to be dense; native/TensorAdvancedIndexing.cpp,
    index_select_out_cpu_.
    """
    copied = contiguous_copy(index)
    if input.dim() < 2 or 0 in (index.numel(), input.numel()):
        return copied
    if dim % input.dim() == 1 and outputs.is_contiguous():
        return copied + dense_copy(input, torch.contiguous_format)
    return copied


@workspace("aten::gather", device="cpu")
def gather(
    machine: Host, outputs: Tensor, input: Tensor, dim: int, index: Tensor, **options: object
) -> int:
    """native/cpu/ScatterGatherKernel.cpp, cpu_scatter_gather_base_kernel."""
    return _index(index) + _float_buffer(outputs)


@workspace(
    "aten::scatter", "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", device="cpu"
)
def scatter(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: int,
    index: Tensor,
    *rest: object,
    **o: object,
) -> int:
    """native/cpu/ScatterGatherKernel.cpp, cpu_scatter_gather_base_kernel."""
    if index.numel() == 0:
        return 0
    return _index(index) + _float_buffer(input)


@workspace("aten::scatter_reduce", "aten::scatter_reduce_", device="cpu")
def scatter_reduce(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: object,
    reduce: object = None,
    **options: object,
) -> int:
    """A mean counts what it adds up: ones like the source, counts like the result, a mask."""
    if index.numel() == 0:
        return 0
    buffer = _float_buffer(input)
    if reduce != "mean" or not isinstance(source, Tensor):
        return _index(index) + buffer
    mask = _SCALAR + input.element_size() + input.numel()
    counts = dense_bytes(source) + dense_bytes(input)
    return _index(index) + max(buffer, counts + max(buffer, mask))


@workspace("aten::roll", device="cpu")
def roll(
    machine: Host, outputs: Tensor, input: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> int:
    """Several dimensions are rolled one after the other; native/TensorTransformations.cpp."""
    return dense_bytes(input) if isinstance(dims, (list, tuple)) and len(dims) > 1 else 0


@workspace("aten::tril", "aten::triu", device="cpu")
def triangle(
    machine: Host, outputs: Tensor, input: Tensor, diagonal: int = 0, **options: object
) -> int:
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


@workspace("aten::unfold_backward", device="cpu")
def unfold_backward(
    machine: Host,
    outputs: Tensor,
    grad: Tensor,
    input_sizes: Sequence[int],
    dim: int,
    size: int,
    step: int,
) -> int:
    """An index of every position along the dimension; native/UnfoldBackward.h."""
    if step >= size:
        return 0
    return int(input_sizes[dim]) * _INDEX if input_sizes else _INDEX
