"""The attributes of ``torch.Tensor`` that know of fake devices, by what they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.fake_cuda.api.legacy_types import find_legacy_type
from pytest_torchmem.fake_cuda.api.wrappers import Wrappers
from pytest_torchmem.fake_cuda.device_copy import as_device, mover, parse_to
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext

_CPU = torch.device("cpu")
_Base: Any = torch._C.TensorBase
_MAKING = (
    "new",
    "new_tensor",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "new_empty_strided",
)
DeviceOf = Callable[[Tensor], torch.device]


def tensor_methods(trace: TraceContext, memory: DeviceMemory) -> dict[str, Any]:
    """Return what stands for attributes of ``torch.Tensor`` in a trace on fake cuda, by name."""
    wrappers = Wrappers(trace)
    device_of = _device_of(trace, wrappers)
    return {
        **_questions(device_of),
        **_moves(trace, device_of),
        **_pinned_memory(trace, device_of),
        **{name: _making(name, trace, device_of) for name in _MAKING},
        **{name: _on_host_only(name, device_of) for name in ("numpy", "__array__")},
        "_make_wrapper_subclass": wrappers.making(),
        "record_stream": _record_stream(trace, memory),
    }


def pin(trace: TraceContext, tensor: Tensor) -> None:
    """Take note that a tensor of the host is in pinned memory."""
    record = trace.record(tensor)
    if record is not None:
        record.ledger.pinned.add(record.index)


def _device_of(trace: TraceContext, wrappers: Wrappers) -> DeviceOf:
    def device_of(tensor: Tensor) -> torch.device:
        record = trace.record(tensor)
        if record is None:
            wrapped = wrappers.device_of(tensor)
            return wrapped or cast(torch.device, _Base.device.__get__(tensor))
        return record.ledger.device

    return device_of


def _questions(device_of: DeviceOf) -> dict[str, Any]:
    """Where a tensor is."""

    def get_device(tensor: Tensor) -> int:
        device = device_of(tensor)
        return -1 if device.type == "cpu" else device.index or 0

    return {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: device_of(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: device_of(tensor).type == "cpu"),
        "get_device": get_device,
    }


def _moves(trace: TraceContext, device_of: DeviceOf) -> dict[str, Any]:
    """Copies to another device, and those that a conversion of types asks for."""
    to = _to(trace, device_of)

    def cuda(
        tensor: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        if trace.off():
            return cast(Tensor, _Base.cuda(tensor, device))
        target = torch.device("cuda", device) if isinstance(device, int) else device
        return to(
            tensor,
            torch.device(target or "cuda"),
            non_blocking=non_blocking,
            memory_format=memory_format,
        )

    def cpu(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        if trace.off():
            return cast(Tensor, _Base.cpu(tensor))
        return to(tensor, _CPU, memory_format=memory_format)

    def type_of(tensor: Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        if trace.off():
            return _Base.type(tensor) if dtype is None else _Base.type(tensor, dtype)
        if dtype is None:
            name = cast(str, _Base.type(tensor))
            if device_of(tensor).type != "cuda" or name.startswith("torch.cuda."):
                return name  # a function mode hands the call back to here
            return name.replace("torch.", "torch.cuda.", 1)
        legacy = find_legacy_type(dtype)
        if legacy is not None:
            return to(tensor, legacy.device, legacy.dtype, non_blocking=non_blocking)
        return _Base.type(tensor, dtype)

    def type_as(tensor: Tensor, other: Tensor) -> Tensor:
        return cast(Tensor, _Base.type_as(tensor, other)) if trace.off() else to(tensor, other)

    def copy_(tensor: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
        """Copy; a source on another device that gets a gradient is moved, so that it does too."""
        if (
            isinstance(source, Tensor)
            and source.requires_grad
            and torch.is_grad_enabled()
            and not trace.off()
            and device_of(source) != device_of(tensor)
        ):
            source = to(source, device_of(tensor))
        return cast(Tensor, _Base.copy_(tensor, source, non_blocking))

    return {
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "type": type_of,
        "type_as": type_as,
        "copy_": copy_,
    }


def _to(trace: TraceContext, device_of: DeviceOf) -> Callable[..., Tensor]:
    move = mover(trace)

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if trace.off():
            return cast(Tensor, _Base.to(tensor, *args, **kwargs))
        other = kwargs.get("other", args[0] if args else None)
        if isinstance(other, Tensor):
            names = ("other", "non_blocking", "copy")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            device: torch.device | None = device_of(other)
            dtype: torch.dtype | None = other.dtype
        else:
            device, dtype, _, _ = parse_to(
                *[argument for argument in args if not isinstance(argument, bool)],
                **{name: kwargs[name] for name in ("device", "dtype") if name in kwargs},
            )
            flags = [argument for argument in args if isinstance(argument, bool)]
            given = {**dict(zip(("non_blocking", "copy"), flags, strict=False)), **kwargs}
        layout = given.get("memory_format")
        copies = bool(given.get("copy", False))
        non_blocking = bool(given.get("non_blocking", False))
        if device is None or trace.device(device) == device_of(tensor):
            options = {} if layout is None else {"memory_format": layout}
            return cast(Tensor, _Base.to(tensor, dtype or tensor.dtype, copy=copies, **options))
        moved = move(tensor, trace.device(device), dtype, layout, non_blocking)
        if non_blocking and device.type == "cpu":  # TensorConversions.cpp, _to_copy, ``pin_out``
            pin(trace, moved)
        return moved

    return to


def _pinned_memory(trace: TraceContext, device_of: DeviceOf) -> dict[str, Any]:
    """Pinned memory, which is the host's."""

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if trace.off():
            return cast(Tensor, _Base.pin_memory(tensor))
        if device_of(tensor).type == "cuda":
            raise RuntimeError(
                f"cannot pin 'torch.cuda.{_Base.type(tensor).removeprefix('torch.')}' only dense "
                "CPU tensors can be pinned"
            )
        if is_pinned(tensor):
            return tensor
        made = tensor.clone(memory_format=torch.contiguous_format)
        pin(trace, made)
        return made

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:
        if trace.off():
            return cast(bool, _Base.is_pinned(tensor))
        record = trace.record(tensor)
        return record is not None and record.index in record.ledger.pinned

    return {"pin_memory": pin_memory, "is_pinned": is_pinned}


def _record_stream(trace: TraceContext, memory: DeviceMemory) -> Callable[..., None]:
    def record_stream(tensor: Tensor, stream: Any) -> None:
        record = trace.record(tensor)
        if trace.off():
            _Base.record_stream(tensor, stream)
        elif record is not None and record.ledger.device.type == "cuda":
            memory.record_stream(record.index, stream.stream_id)

    return record_stream


def _on_host_only(name: str, device_of: DeviceOf) -> Callable[..., Any]:
    original = getattr(Tensor, name)  # as the layer below has it

    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = device_of(tensor)
        if device.type == "cuda" and not kwargs.get("force", False):
            raise TypeError(
                f"can't convert {device} device type tensor to numpy. Use Tensor.cpu() to copy "
                "the tensor to host memory first."
            )
        return original(tensor, *args, **kwargs)

    return method


def _making(name: str, trace: TraceContext, device_of: DeviceOf) -> Callable[..., Any]:
    """A tensor like this one, on its device or another."""
    original = getattr(_Base, name)

    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        placed = trace.is_placing  # a function mode hands the call back to here
        if placed or trace.off() or (device is None and name not in ("new", "new_tensor")):
            return original(tensor, *args, **kwargs)
        kwargs["device"] = _CPU
        target = device_of(tensor) if device is None else as_device(device)
        with trace.placing_on(trace.device(target)):
            return original(tensor, *args, **kwargs)

    return method
