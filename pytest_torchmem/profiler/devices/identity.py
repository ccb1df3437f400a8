"""Fake cuda in Python: tensors say that they are on ``cuda:0`` while C++ sees the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.cuda_answers import cuda_answers
from pytest_torchmem.profiler.devices.cuda_memory import DeviceMemory
from pytest_torchmem.profiler.devices.data_loading import loaders_pin_here
from pytest_torchmem.profiler.devices.legacy_types import find_legacy_type, legacy_types
from pytest_torchmem.profiler.devices.outside_tensors import cuda_outside_tensors
from pytest_torchmem.profiler.devices.stand_ins import SESSION
from pytest_torchmem.profiler.devices.tensors import Guard
from pytest_torchmem.profiler.devices.triton import triton_refused
from pytest_torchmem.profiler.devices.wrappers import Wrappers
from pytest_torchmem.profiler.hollow import Interceptor
from pytest_torchmem.profiler.internals import (
    default_device,
    device_constructors,
    device_context,
)
from pytest_torchmem.profiler.patches import replaced_all

_CPU = torch.device("cpu")
_Base: Any = torch._C.TensorBase
#: Functions with a ``device`` argument that the default device says nothing about
#: (torch/utils/_device.py). A build with CUDA initialises it before it calls the operator.
_BESIDE_TENSORS = (
    "empty_like",
    "full_like",
    "normal",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)


@contextmanager
def cuda_identity(interceptor: Interceptor, memory: DeviceMemory) -> Iterator[None]:
    """Let every common way of placing and asking for a device work for fake cuda."""
    guard = Guard(interceptor)
    move = _mover(interceptor)
    constructors = _constructors(device_constructors())
    functions = {getattr(torch, name) for name in _BESIDE_TENSORS}
    beside = _constructors(functions)
    grouping = functools.partial(_group_tensors, guard, torch._C._group_tensors_by_device_and_dtype)
    with ExitStack() as stack:
        stack.enter_context(cuda_answers(interceptor, guard, memory))
        stack.enter_context(cuda_outside_tensors(guard))
        stack.enter_context(legacy_types(guard))
        stack.enter_context(loaders_pin_here(guard))
        stack.enter_context(triton_refused(guard))
        stack.enter_context(
            replaced_all(
                [
                    (Tensor, _methods(interceptor, guard, memory, move)),
                    (torch, _under_their_names(constructors)),
                    (torch, _under_their_names(beside)),
                    (torch, {"_use_cudnn_rnn_flatten_weight": _flattens(guard)}),
                    (device_context(), _context(guard, constructors)),
                    (torch._C, {"_group_tensors_by_device_and_dtype": grouping}),
                    (torch._C._nn, {"_parse_to": parse_to}),
                ]
            )
        )
        yield


def _under_their_names(
    constructors: dict[Callable[..., Any], Callable[..., Any]],
) -> dict[str, Callable[..., Any]]:
    """Return replacements for the functions that stand in ``torch`` itself."""
    return {
        original.__name__: constructor
        for original, constructor in constructors.items()
        if getattr(torch, original.__name__, None) is original
    }


def _methods(
    interceptor: Interceptor, guard: Guard, memory: DeviceMemory, move: Callable[..., Tensor]
) -> dict[str, Any]:
    """Return the attributes of ``torch.Tensor`` that know of fake devices."""
    machine = interceptor.machine
    wrappers = Wrappers(guard)

    def device_of(tensor: Tensor) -> torch.device:
        record = guard.record(tensor)
        if record is None:
            wrapped = wrappers.device_of(tensor)
            return wrapped or cast(torch.device, _Base.device.__get__(tensor))
        return record.ledger.device

    def get_device(tensor: Tensor) -> int:
        device = device_of(tensor)
        return -1 if device.type == "cpu" else device.index or 0

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if guard.off():
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
        if device is None or machine.normalise(device) == device_of(tensor):
            options = {} if layout is None else {"memory_format": layout}
            return cast(Tensor, _Base.to(tensor, dtype or tensor.dtype, copy=copies, **options))
        moved = move(tensor, machine.normalise(device), dtype, layout, non_blocking)
        if non_blocking and device.type == "cpu":  # TensorConversions.cpp, _to_copy, ``pin_out``
            _pin(guard, moved)
        return moved

    def cuda(
        tensor: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        if guard.off():
            return cast(Tensor, _Base.cuda(tensor, device))
        target = torch.device("cuda", device) if isinstance(device, int) else device
        return to(
            tensor,
            torch.device(target or "cuda"),
            non_blocking=non_blocking,
            memory_format=memory_format,
        )

    def cpu(tensor: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        if guard.off():
            return cast(Tensor, _Base.cpu(tensor))
        return to(tensor, _CPU, memory_format=memory_format)

    def type_of(tensor: Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        if guard.off():
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
        return cast(Tensor, _Base.type_as(tensor, other)) if guard.off() else to(tensor, other)

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if guard.off():
            return cast(Tensor, _Base.pin_memory(tensor))
        if device_of(tensor).type == "cuda":
            raise RuntimeError(
                f"cannot pin 'torch.cuda.{_Base.type(tensor).removeprefix('torch.')}' only dense "
                "CPU tensors can be pinned"
            )
        if is_pinned(tensor):
            return tensor
        made = tensor.clone(memory_format=torch.contiguous_format)
        _pin(guard, made)
        return made

    def on_host_only(name: str) -> Callable[..., Any]:
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

    def is_pinned(tensor: Tensor, device: Any = None) -> bool:
        if guard.off():
            return cast(bool, _Base.is_pinned(tensor))
        record = guard.record(tensor)
        return record is not None and record.index in record.ledger.pinned

    def copy_(tensor: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
        """Copy; a source on another device that gets a gradient is moved, so that it does too."""
        if (
            isinstance(source, Tensor)
            and source.requires_grad
            and torch.is_grad_enabled()
            and not guard.off()
            and device_of(source) != device_of(tensor)
        ):
            source = to(source, device_of(tensor))
        return cast(Tensor, _Base.copy_(tensor, source, non_blocking))

    def record_stream(tensor: Tensor, stream: Any) -> None:
        record = guard.record(tensor)
        if guard.off():
            _Base.record_stream(tensor, stream)
        elif record is not None and record.ledger.device.type == "cuda":
            memory.record_stream(record.index, stream.stream_id)

    def placing(name: str) -> Callable[..., Any]:
        original = getattr(_Base, name)

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device")
            placed = interceptor.target is not None  # a function mode hands the call back to here
            if placed or guard.off() or (device is None and name not in ("new", "new_tensor")):
                return original(tensor, *args, **kwargs)
            kwargs["device"] = _CPU
            target = device_of(tensor) if device is None else _device(device)
            with interceptor.placing_on(machine.normalise(target)):
                return original(tensor, *args, **kwargs)

        return method

    return {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: device_of(tensor).type == "cuda"),
        "is_cpu": property(lambda tensor: device_of(tensor).type == "cpu"),
        "get_device": get_device,
        "to": to,
        "cuda": cuda,
        "cpu": cpu,
        "type": type_of,
        "type_as": type_as,
        "pin_memory": pin_memory,
        "is_pinned": is_pinned,
        "record_stream": record_stream,
        "copy_": copy_,
        "_make_wrapper_subclass": wrappers.making(),
        "numpy": on_host_only("numpy"),
        "__array__": on_host_only("__array__"),
        **{
            name: placing(name)
            for name in (
                "new",
                "new_tensor",
                "new_zeros",
                "new_ones",
                "new_full",
                "new_empty",
                "new_empty_strided",
            )
        },
    }


def _mover(interceptor: Interceptor) -> Callable[..., Tensor]:
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
        with interceptor.placing_on(device):
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


def _pin(guard: Guard, tensor: Tensor) -> None:
    """Take note that a tensor of the host is in pinned memory."""
    record = guard.record(tensor)
    if record is not None:
        record.ledger.pinned.add(record.index)


def _constructors(
    originals: Iterable[Callable[..., Any]],
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return for functions of torch with a ``device`` argument ones that know fake cuda."""
    return {original: _constructor(original) for original in originals}


@cache
def _constructor(original: Callable[..., Any]) -> Callable[..., Any]:
    session = SESSION
    keeps_device = original.__name__.endswith("_like") or original.__name__ in (
        "as_tensor",
        "asarray",
    )
    only_if_asked = original.__name__ in _BESIDE_TENSORS

    def constructor(*args: Any, **kwargs: Any) -> Any:
        if session.off() or session.interceptor.target is not None:
            return original(*args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            if only_if_asked or (keeps_device and args and isinstance(args[0], Tensor)):
                return original(*args, **kwargs)
            device = default_device()
        interceptor = session.interceptor
        target = interceptor.machine.normalise(_device(device))
        if target.type == "meta":
            return original(*args, **kwargs)
        kwargs["device"] = _CPU
        if keeps_device and args and isinstance(args[0], Tensor):
            if original.__name__ in ("as_tensor", "asarray"):
                return args[0].to(target, kwargs.get("dtype") or args[0].dtype)
            if args[0].device.type != "meta":
                kwargs.pop("device")
        with interceptor.placing_on(target):
            made = original(*args, **kwargs)
        if kwargs.get("pin_memory") and session.guard is not None:
            _pin(session.guard, made)
        return made

    constructor.__name__ = original.__name__
    constructor.__wrapped__ = original  # type: ignore[attr-defined]
    return constructor


def _context(
    guard: Guard, constructors: dict[Callable[..., Any], Callable[..., Any]]
) -> dict[str, Any]:
    """Return ``DeviceContext``'s method: ``with torch.device("cuda")``, ``set_default_device``."""

    def torch_function(
        context: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        constructor = constructors.get(function)
        if constructor is None:
            return function(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = context.device
        return (function if guard.off() else constructor)(*args, **kwargs)

    return {"__torch_function__": torch_function}


_parse_to: Callable[..., Any] = torch._C._nn._parse_to


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """``torch._C._nn._parse_to``, which knows of no GPU that a number means, or a tensor is on."""
    other = kwargs.pop("tensor") if "tensor" in kwargs else args[0] if args else None
    if isinstance(other, Tensor):
        args = (other.device, other.dtype, *args[1:])
    args = tuple(_device(arg) if type(arg) is int else arg for arg in args)
    if type(kwargs.get("device")) is int:
        kwargs["device"] = _device(kwargs["device"])
    return _parse_to(*args, **kwargs)


def _flattens(guard: Guard) -> Callable[[], bool]:
    """Return ``torch._use_cudnn_rnn_flatten_weight``: CUDA builds come with cuDNN."""
    original: Callable[[], bool] = torch._use_cudnn_rnn_flatten_weight
    return lambda: original() if guard.off() else True


def _device(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _group_tensors(
    guard: Guard, original: Callable[..., Any], lists: Any, with_indices: bool = False
) -> Any:
    """Group lists of tensors by the device and dtype of the first list's.

    As torch/csrc/utils/../ATen/native/ForeachUtils.h ``_group_tensors_by_first_tensors_device_and
    _dtype`` does by the devices C++ sees.
    """
    if guard.off():
        return original(lists, with_indices)
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    for position, tensor in enumerate(lists[0]):
        if tensor is None:
            continue
        members, indices = groups.setdefault(
            (tensor.device, tensor.dtype), ([[] for _ in lists], [])
        )
        for member, tensors in zip(members, lists, strict=True):
            if tensors:
                member.append(tensors[position])
        if with_indices:
            indices.append(position)
    return groups
