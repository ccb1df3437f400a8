"""Fourier transforms through MKL (native/mkl/SpectralOps.cpp) and cuFFT
(native/cuda/SpectralOps.cpp), batches as one dimension.

In half precision a GPU has them and the CPU has not: ``promote_type_fft`` of native/SpectralOps.cpp
refuses it of a tensor that it takes to be on the CPU, before any kernel is asked, and not of one on
``meta``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import Workspace, dense_bytes, on_meta, unknown

_aten: Any = torch.ops.aten
_CUFFT_DIMENSIONS = 3
"""``cufft_max_ndim``: the most that one plan of cuFFT transforms."""


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


def _walked(tensor: Tensor, dims: Sequence[int]) -> list[int]:
    """The dimensions of batches, and then those that are transformed; ``_exec_fft``."""
    order = _batches_first([dim in dims for dim in range(tensor.dim())])
    return [*_by_stride(tensor, order[: tensor.dim() - len(dims)]), *dims]


def _transform(out: Tensor, self: Tensor, dims: Sequence[int]) -> Tensor:
    """``_exec_fft``: batches are collapsed, which may copy, and MKL walks no expanded dimension;
    the output lies as its batches were walked.
    """
    order = _walked(self, dims)
    input = self.permute(order)
    input = input.reshape((-1, *input.shape[-len(dims) :])) if self.numel() else input
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


# -- on CUDA: what PyTorch takes; what cuFFT asks for beside it is not known ----------------------


@operator("aten::_fft_c2c").workspace("cuda")
def complex_to_complex_on_cuda(self: Tensor, dim: Sequence[int]) -> Workspace:
    """_fft_c2c_cufft: every plan but the first works on what the one before it made."""
    dims = _by_stride(self, _wrapped(self, dim))[-_CUFFT_DIMENSIONS:]
    between = dense_bytes(self) if len(dim) > _CUFFT_DIMENSIONS else 0
    return unknown(max(between, _copied_for_cufft(self, dims)))


@operator("aten::_fft_r2c").workspace("cuda")
def real_to_complex_on_cuda(self: Tensor, dim: Sequence[int], outputs: Tensor) -> Workspace:
    """_fft_r2c_cufft: where one plan does not do it all, the last dimension comes first."""
    dims = _wrapped(self, dim)
    whole = _in_one_plan(dim)
    between = 0 if whole else dense_bytes(outputs)
    return unknown(max(between, _copied_for_cufft(self, dims if whole else dims[-1:])))


@operator("aten::_fft_c2r").workspace("cuda")
def complex_to_real_on_cuda(self: Tensor, dim: Sequence[int]) -> Workspace:
    """_fft_c2r_cufft: a dense copy, or the other dimensions transformed, and what is copied of
    these; cuFFT may write to its input.
    """
    dims = _wrapped(self, dim)
    whole = _in_one_plan(dim) or len(dims) == 1
    dense = on_meta(self).contiguous()
    return unknown(dense_bytes(self), _copied_for_cufft(dense, dims) if whole else 0)


def _in_one_plan(dim: Sequence[int]) -> bool:
    """use_optimized_cufft_path."""
    return len(dim) <= _CUFFT_DIMENSIONS and tuple(dim[:2]) != (0, 1)


def _copied_for_cufft(self: Tensor, dims: Sequence[int]) -> int:
    """Bytes of a copy: of batches that are no one dimension (``_exec_fft``), or of what cuFFT's
    advanced layout does not describe (native/cuda/CuFFTPlanCache.h, as_cufft_embed).
    """
    if not dims or not self.numel():
        return 0
    input = on_meta(self).permute(_walked(self, dims))
    try:
        input = input.view((-1, *[self.shape[at] for at in dims]))
    except RuntimeError:
        return dense_bytes(self)
    (batch, *sizes), (between, *strides) = input.shape, input.stride()
    last = strides[-1]
    halves = self.dtype in (torch.float16, torch.complex32)
    copied = last <= 0 or (halves and last != 1) or (batch != 1 and between == 0)
    for size, stride in zip(reversed(sizes[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1 or copied:
            continue
        copied = stride <= 0 or stride % last != 0
        last = stride
    return dense_bytes(self) if copied else 0


_TRANSFORMS = """
    fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2
    fft_hfft2 fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn
"""


@operator(_TRANSFORMS, *aten(_TRANSFORMS, ".out")).path("cuda")
def in_half(call: CompositeCall, input: Tensor) -> Any:
    """Of half precision as on ``meta``; native/SpectralOps.cpp, promote_type_fft."""
    return call.as_on_meta() if input.dtype is torch.float16 else call()


@operator("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r").check("cuda")
def sizes_in_half(self: Tensor, dim: Sequence[int], last_dim_size: int | None = None) -> None:
    """native/cuda/CuFFTPlanCache.h, CuFFTConfig; ``_exec_fft`` takes the larger side of each."""
    sizes = [self.shape[at] for at in dim]
    if last_dim_size is not None:
        sizes[-1:] = [last_dim_size]
    halves = self.dtype in (torch.float16, torch.complex32)
    if halves and any(size & (size - 1) for size in sizes):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half "
            f"precision, but got a signal size of{sizes}"
        )


def _in_single(name: str, single: torch.dtype, half: torch.dtype, result: torch.dtype) -> None:
    transform: Callable[..., Tensor] = getattr(_aten, name).default

    @operator(f"aten::{name}").values("cuda")
    def computed(operands: list[Any]) -> Any:
        """In single precision, and rounded: MKL knows no other."""
        if operands[0].dtype is not half:
            return transform(*operands)
        return transform(operands[0].to(single), *operands[1:]).to(result)


_in_single("_fft_c2c", torch.complex64, torch.complex32, torch.complex32)
_in_single("_fft_r2c", torch.float32, torch.float16, torch.complex32)
_in_single("_fft_c2r", torch.complex64, torch.complex32, torch.float16)
