"""Copies between devices that C++ cannot tell apart, and arguments that name a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext

_Base: Any = torch._C.TensorBase


def as_device(device: Any) -> torch.device:
    """Return the device that a program names; a number is one of ``cuda``."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


_parse_to: Callable[..., Any] = torch._C._nn._parse_to


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """``torch._C._nn._parse_to``, which knows of no GPU that a number means, or a tensor is on."""
    other = kwargs.pop("tensor") if "tensor" in kwargs else args[0] if args else None
    if isinstance(other, Tensor):
        args = (other.device, other.dtype, *args[1:])
    args = tuple(as_device(arg) if type(arg) is int else arg for arg in args)
    if type(kwargs.get("device")) is int:
        kwargs["device"] = as_device(kwargs["device"])
    return _parse_to(*args, **kwargs)


def mover(trace: TraceContext) -> Callable[..., Tensor]:
    """Return the differentiable copy from one device to another."""

    def copy(
        tensor: Tensor,
        device: torch.device,
        dtype: torch.dtype | None,
        layout: torch.memory_format | None,
        non_blocking: bool,
    ) -> Tensor:
        if device.type == "meta":
            return cast(Tensor, _Base.to(tensor, device, dtype or tensor.dtype))
        with trace.placing_on(device):
            return torch.ops.aten._to_copy.default(  # type: ignore[no-any-return]
                tensor,
                dtype=dtype or tensor.dtype,
                non_blocking=non_blocking,
                memory_format=layout or torch.preserve_format,
            )

    def move(
        tensor: Tensor,
        device: torch.device,
        dtype: torch.dtype | None,
        layout: torch.memory_format | None,
        non_blocking: bool,
    ) -> Tensor:
        options = (device, dtype, layout, non_blocking)
        if tensor.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, cast(Any, ToCopy).apply(tensor, copy, *options))
        return copy(tensor, *options)

    return move


class ToCopy(torch.autograd.Function):
    """``ToCopyBackward0`` for two devices that C++ cannot tell apart."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copy: Callable[..., Tensor], *options: Any) -> Tensor:
        ctx.copy, ctx.device, ctx.dtype = copy, tensor.device, tensor.dtype
        return copy(tensor, *options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        moved = ctx.copy(gradients[0], ctx.device, ctx.dtype, None, False)
        return moved, None, None, None, None, None
