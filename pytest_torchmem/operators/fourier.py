"""Fourier transforms through MKL (native/mkl/SpectralOps.cpp) and cuFFT
(native/cuda/SpectralOps.cpp), batches as one dimension.

In half precision a GPU has them and the CPU has not: ``promote_type_fft`` of native/SpectralOps.cpp
refuses it of a tensor that it takes to be on the CPU, before any kernel is asked. What follows it
there is done here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.workspace import (
    Workspace,
    dense_bytes,
    on_meta,
    scalar_type,
    unknown,
)

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


_FORWARD = {None: 0, "backward": 0, "ortho": 1, "forward": 2}
_INVERSE = {None: 2, "backward": 2, "ortho": 1, "forward": 0}
"""``fft_norm_mode`` by its name; ``norm_from_string``."""


class Asked(NamedTuple):
    """What is asked of a transform, by the names of the schemas' arguments."""

    input: Tensor
    n: int | None = None
    s: Sequence[int] | None = None
    dim: Any = None
    norm: str | None = None
    out: Tensor | None = None

    def mode(self, modes: Mapping[str | None, int]) -> int:
        """Return the number of the normalization."""
        if self.norm not in modes:
            raise RuntimeError(f'Invalid normalization mode: "{self.norm}"')
        return modes[self.norm]


_Transform = Callable[[CompositeCall, Asked], Any]


def _of_half(names: str) -> Callable[[_Transform], None]:
    """Have a function be what transforms of half precision run on cuda, also with ``out``."""

    def register(transform: _Transform) -> None:
        def path(call: CompositeCall, asked: Asked) -> Any:
            return transform(call, asked) if asked.input.dtype is torch.float16 else call()

        path.__doc__ = transform.__doc__
        operator(*aten(names), *aten(names, ".out")).path("cuda")(path)

    return register


@_of_half("fft_fftn fft_ifftn fft_fft2 fft_ifft2 fft_irfftn fft_irfft2 fft_hfftn fft_hfft2")
def of_complex_numbers(call: CompositeCall, asked: Asked) -> Any:
    """Those that make complex numbers of their input first (``promote_tensor_fft``)."""
    return call.of(asked.input.to(torch.complex32), *call.args[1:], **call.kwargs)


@_of_half("fft_irfft fft_hfft")
def to_real(call: CompositeCall, asked: Asked) -> Any:
    """The same, of which ``fft_c2r`` keeps only what is resized."""
    input, n, dim = asked.input.to(torch.complex32), asked.n, asked.dim
    if n is not None and n >= 1:
        input = _resized(input, [_of_wrapped(input, dim)], [n // 2 + 1])
    others = {name: one for name, one in call.kwargs.items() if name not in ("n", "dim")}
    return call.of(input, n, dim, *call.args[3:], **others)


@_of_half("fft_fft fft_rfft fft_ifft fft_ihfft")
def from_real(call: CompositeCall, asked: Asked) -> Any:
    """``fft_r2c``."""
    name = str(call.overload.name()).partition("::")[2].partition(".")[0]
    forward, onesided = name in ("fft_fft", "fft_rfft"), name in ("fft_rfft", "fft_ihfft")
    input, n, out = asked.input, asked.n, asked.out
    _complex_output(name, out)
    dim = _of_wrapped(input, asked.dim)
    _some_points([input.shape[dim] if n is None else n])
    input = input if n is None else _resized(input, [dim], [n])
    given = (input, [dim], asked.mode(_FORWARD if forward else _INVERSE), onesided)
    if forward:
        return _into(_aten._fft_r2c, out, *given)
    return _conjugated(_aten._fft_r2c.default(*given), out)


@_of_half("fft_rfftn fft_rfft2")
def real_of_several_dimensions(call: CompositeCall, asked: Asked) -> Any:
    """fft_rfftn_impl."""
    shape, dims = _shape_and_dims("rfftn", asked)
    input, mode = _resized(asked.input, dims, shape), asked.mode(_FORWARD)
    _complex_output("rfftn", asked.out)
    return _into(_aten._fft_r2c, asked.out, input, dims, mode, True)


@_of_half("fft_ihfftn fft_ihfft2")
def hermitian_of_several_dimensions(call: CompositeCall, asked: Asked) -> Any:
    """fft_ihfftn_impl."""
    shape, dims = _shape_and_dims("ihfftn", asked)
    input, mode = _resized(asked.input, dims, shape), asked.mode(_INVERSE)
    found = _aten._fft_r2c.default(input, dims[-1:], mode, True)
    if len(dims) == 1:
        return _conjugated(found, asked.out)
    found = torch.conj_physical(found)
    _complex_output("ihfftn", asked.out)
    return _into(_aten._fft_c2c, asked.out, found, dims[:-1], mode, False)


def _into(transform: Any, out: Tensor | None, *given: Any) -> Tensor:
    """Return a transform, in ``out`` where there is one."""
    made: Tensor = transform.default(*given) if out is None else transform.out(*given, out=out)
    return made


def _conjugated(found: Tensor, out: Tensor | None) -> Tensor:
    return found.conj() if out is None else torch.conj_physical(found, out=out)


def _of_wrapped(tensor: Tensor, dim: int) -> int:
    """``maybe_wrap_dim``; a size is asked for to be refused in its words."""
    tensor.size(dim)
    return dim % tensor.dim()


def _some_points(sizes: Sequence[int]) -> None:
    for size in sizes:
        if size < 1:
            raise RuntimeError(f"Invalid number of data points ({size}) specified")


def _complex_output(name: str, out: Tensor | None) -> None:
    if out is not None and not out.is_complex():
        name = name.removeprefix("fft_")
        raise RuntimeError(f"{name} expects a complex output tensor, but got {scalar_type(out)}")


def _shape_and_dims(name: str, asked: Asked) -> tuple[list[int], list[int]]:
    """canonicalize_fft_shape_and_dim_args."""
    tensor, s, dim = asked.input, asked.s, asked.dim
    first = 0 if s is None else tensor.dim() - len(s)
    if s is not None and dim is not None and len(s) != len(dim):
        raise RuntimeError("When given, dim and shape arguments must have the same length")
    if first < 0:
        raise RuntimeError(
            f"Got shape with {tensor.dim() - first} values but input tensor only has "
            f"{tensor.dim()} dimensions."
        )
    dims = range(first, tensor.dim()) if dim is None else [_of_wrapped(tensor, at) for at in dim]
    if len(set(dims)) != len(dims):
        raise RuntimeError("FFT dims must be unique")
    sizes = [-1] * len(dims) if s is None else s
    shape = [tensor.shape[at] if size == -1 else size for at, size in zip(dims, sizes, strict=True)]
    _some_points(shape)
    if not shape:
        raise RuntimeError(f"{name} must transform at least one axis")
    return shape, list(dims)


def _resized(tensor: Tensor, dims: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """resize_fft_input: cut first, then padded as a whole."""
    padding, pad = [0] * (2 * tensor.dim()), False
    for dim, size in zip(dims, sizes, strict=True):
        missing = size - tensor.shape[dim]
        if missing > 0:
            padding[-2 * dim - 1], pad = missing, True
        elif missing < 0:
            tensor = tensor.narrow(dim, 0, size)
    return torch.constant_pad_nd(tensor, padding) if pad else tensor


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
