"""Fourier transforms through MKL, batches as one dimension; native/mkl/SpectralOps.cpp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator

_aten: Any = torch.ops.aten


def _batches_first(transformed: Sequence[bool]) -> list[int]:
    """``std::partition`` of the dimensions, which swaps from both ends (bits/stl_algo.h)."""
    order = list(range(len(transformed)))
    first, last = 0, len(order)
    while True:
        while first < last and not transformed[order[first]]:
            first += 1
        if first == last:
            return order
        last -= 1
        while first < last and transformed[order[last]]:
            last -= 1
        if first == last:
            return order
        order[first], order[last] = order[last], order[first]
        first += 1


def _by_stride(tensor: Tensor, dims: Sequence[int]) -> list[int]:
    """``_sort_dims``: the largest stride first."""
    return sorted(dims, key=lambda dim: -tensor.stride()[dim])


def _transform(out: Tensor, self: Tensor, dims: Sequence[int]) -> Tensor:
    """``_exec_fft``: batches are collapsed, which may copy, and MKL walks no expanded dimension;
    the output lies as its batches were walked.
    """
    transformed = [dim in dims for dim in range(self.dim())]
    order = _batches_first(transformed)
    batches = self.dim() - len(dims)
    order = [*_by_stride(self, order[:batches]), *dims]
    input = self.permute(order)
    input = input.reshape((-1, *input.shape[batches:])) if self.numel() else input
    if any(
        stride == 0 and size > 1 for stride, size in zip(self.stride(), self.shape, strict=True)
    ):
        input = input.clone(memory_format=torch.contiguous_format)
    strides, step = [0] * self.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= out.shape[dim]
    del input
    return out.as_strided(out.shape, strides)


def _wrapped(self: Tensor, dims: Sequence[int]) -> list[int]:
    return [dim % self.dim() for dim in dims]


@operator("aten::_fft_c2c").decomposition("cpu")
def complex_to_complex(self: Tensor, dim: Sequence[int]) -> Tensor:
    """_fft_c2c_mkl."""
    if not dim:
        return self.clone()
    dims = _by_stride(self, _wrapped(self, dim))
    return _transform(self.new_empty(self.shape), self, dims)


@operator("aten::_fft_r2c").decomposition("cpu")
def real_to_complex(self: Tensor, dim: Sequence[int], onesided: bool) -> Tensor:
    """_fft_r2c_mkl: the last dimension stays the last."""
    dims = _wrapped(self, dim)
    shape = list(self.shape)
    if onesided:
        shape[dims[-1]] = shape[dims[-1]] // 2 + 1
    out = torch.empty(shape, dtype=self.dtype.to_complex())
    return _transform(out, self, [*_by_stride(self, dims[:-1]), dims[-1]])


@operator("aten::_fft_c2r").decomposition("cpu")
def complex_to_real(
    self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> Tensor:
    """_fft_c2r_mkl: all dimensions but the last are transformed first."""
    input = self
    if len(dim) > 1:
        input = _aten._fft_c2c.default(self, list(dim[:-1]), normalization, False)
    dims = _wrapped(self, dim[-1:])
    shape = list(self.shape)
    shape[dims[-1]] = last_dim_size
    out = torch.empty(shape, dtype=self.dtype.to_real())
    return _transform(out, input, dims)


@operator("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r").flops()
def flops(self: Tensor, dim: Sequence[int], outputs: Tensor) -> int:
    """5 N log2 N for each transform of N complex numbers, half of it where one side is real.

    The usual count for radix 2 (Van Loan, Computational Frameworks for the FFT, 1.4).
    """
    larger = max(self, outputs, key=lambda tensor: tensor.numel())
    length = math.prod(larger.shape[at] for at in dim)
    count = 5 * larger.numel() * math.log2(max(length, 2))
    both_complex = self.is_complex() and outputs.is_complex()
    return int(count if both_complex else count / 2)
