"""Fourier transforms on the CPU through MKL; native/mkl/SpectralOps.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from pytest_torchmem.profiler.devices.host import Host
from pytest_torchmem.profiler.workspace import workspace
from pytest_torchmem.profiler.workspace.cpu.geometry import beyond, dense_bytes


def _collapsed(input: Tensor, dims: Sequence[int]) -> int:
    """A copy where the batch dimensions are not one run of memory; _exec_fft."""
    signal = {dim % input.dim() for dim in dims}
    batch = [dim for dim in range(input.dim()) if dim not in signal and input.shape[dim] != 1]
    strides = input.stride()
    batch.sort(key=lambda dim: strides[dim], reverse=True)
    for outer, inner in pairwise(batch):
        if input.stride(outer) != input.stride(inner) * input.shape[inner]:
            return dense_bytes(input)
    return 0


def _transformed(input: Tensor, dims: Sequence[int]) -> int:
    if input.dim() == 0 or input.numel() == 0:
        return 0
    expanded = any(
        stride == 0 and size > 1 for stride, size in zip(input.stride(), input.shape, strict=True)
    )
    return dense_bytes(input) if expanded else _collapsed(input, dims)


@workspace("aten::_fft_r2c", device="cpu")
def real_to_complex(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: Sequence[int],
    normalization: int,
    onesided: bool,
    **options: object,
) -> int:
    """A copy of an input whose batches cannot be walked."""
    return _transformed(input, dim)


@workspace("aten::_fft_c2c", device="cpu")
def complex_to_complex(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: Sequence[int],
    normalization: int,
    forward: bool,
    **options: object,
) -> int:
    """A copy of an input whose batches cannot be walked."""
    return _transformed(input, dim) if dim else 0


@workspace("aten::_fft_c2r", device="cpu")
def complex_to_real(
    machine: Host,
    outputs: Tensor,
    input: Tensor,
    dim: Sequence[int],
    normalization: int,
    last_dim_size: int,
    **options: object,
) -> int:
    """Complex transforms of all dimensions but the last come first, into a temporary."""
    if input.numel() == 0 or not dim:
        return 0
    if len(dim) == 1:
        return _transformed(input, dim)
    first = _transformed(input, dim[:-1])
    temporary = dense_bytes(input)
    last = _transformed(input, dim[-1:])
    result = dense_bytes(outputs)
    return beyond(result, [temporary, first, -first, result, last])
