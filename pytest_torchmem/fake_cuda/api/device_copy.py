"""Copies between devices that C++ cannot tell apart, and the arguments of ``Tensor.to``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private.dispatch.modes import NoFunctionModes, dispatch_modes
from pytest_torchmem.torch_private.patching import replaceable
from pytest_torchmem.torch_private.tensors.tensors import TensorBase, has_dispatch

_torchscript: Any = torch.jit
_parse_to: Callable[..., Any] = replaceable.parse_to.original


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """``torch._C._nn._parse_to``, which knows of no GPU that a number means, or a tensor is on."""
    other = kwargs.pop("tensor") if "tensor" in kwargs else args[0] if args else None
    if isinstance(other, Tensor):
        args = (other.device, other.dtype, *args[1:])
    args = tuple(as_device(arg) if type(arg) is int else arg for arg in args)
    if type(kwargs.get("device")) is int:
        kwargs["device"] = as_device(kwargs["device"])
    return _parse_to(*args, **kwargs)


class CopyRequest(NamedTuple):
    """What ``Tensor.to`` is asked for."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format | None = None
    non_blocking: bool = False
    copy: bool = False


class _Moving(threading.local):
    """Where a tensor subclass is moving what it wraps to, as the program has asked it."""

    device: torch.device | None = None

    @contextmanager
    def to(self, device: torch.device) -> Iterator[None]:
        """Let a copy that a subclass passes on be one to ``device``."""
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before


MOVING = _Moving()


def parse_target(*args: Any, **kwargs: Any) -> CopyRequest:
    """Return the arguments of ``Tensor.to`` by name, however they were given."""
    other = kwargs.get("other", args[0] if args else None)
    if isinstance(other, Tensor):
        device, dtype = other.device, other.dtype
        flags = list(args[1:])
    else:
        flags = [argument for argument in args if isinstance(argument, bool)]
        device, dtype, _, _ = parse_to(
            *[argument for argument in args if not isinstance(argument, bool)],
            **{name: kwargs[name] for name in ("device", "dtype") if name in kwargs},
        )
    given = {**dict(zip(("non_blocking", "copy"), flags, strict=False)), **kwargs}
    non_blocking, copy = bool(given.get("non_blocking")), bool(given.get("copy"))
    return CopyRequest(device, dtype, given.get("memory_format"), non_blocking, copy)


def copy_to(trace: TraceContext, tensor: Tensor, target: CopyRequest) -> Tensor:
    """Return a differentiable copy of ``tensor`` on the device of ``target``, which has one."""
    if tensor.requires_grad and torch.is_grad_enabled() and not _torchscript.is_tracing():
        return cast(Tensor, cast(Any, ToCopy).apply(tensor, trace, target))
    return copied(trace, tensor, target)


def copied(trace: TraceContext, tensor: Tensor, target: CopyRequest) -> Tensor:
    """Return a copy of ``tensor`` on the device of ``target``, which has one."""
    device, dtype = target.device, target.dtype or tensor.dtype
    assert device is not None
    if device.type == "meta":
        return cast(Tensor, TensorBase.to(tensor, device, dtype))
    if has_dispatch(tensor):  # it moves what it wraps itself
        with MOVING.to(device):
            return cast(Tensor, torch.ops.aten._to_copy.default(tensor, **_given(target)))
    if tensor.is_meta:  # native/Copy.cpp, copy_impl; torch.nn.Module.to waits for these words
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if is_lazy(tensor):  # it has no shape, and refuses to be asked for one
        with NoFunctionModes():
            plain = TensorBase.as_subclass(tensor, Tensor)
            moved = copied(trace, plain, target)
            # as ``__torch_function__`` of torch/nn/parameter.py does
            return cast(Tensor, moved.as_subclass(type(tensor)))
    # The device is what has to be found in a graph that ``torch.jit.trace`` or a mode writes down.
    seen = _torchscript.is_tracing() or (dispatch_modes() and not trace.in_fake_tensor_mode())
    written_down = {"device": device} if seen else {}
    with trace.placing_on(device):
        result = torch.ops.aten._to_copy.default(
            tensor,
            dtype=dtype,
            non_blocking=target.non_blocking,
            memory_format=target.memory_format or torch.preserve_format,
            **written_down,
        )
    return cast(Tensor, result)


def _given(target: CopyRequest) -> dict[str, Any]:
    """Return those of the arguments that are given."""
    return {name: value for name, value in target._asdict().items() if value and name != "copy"}


class ToCopy(torch.autograd.Function):
    """``ToCopyBackward0`` for two devices that C++ cannot tell apart."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trace: TraceContext, target: CopyRequest) -> Tensor:
        ctx.trace, ctx.origin = trace, CopyRequest(tensor.device, tensor.dtype)
        return copied(trace, tensor, target)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return copied(ctx.trace, gradients[0], ctx.origin), None, None
