"""Fake tensors of torch in a trace on fake cuda: they are on the CPU, as C++ has the others.

A fake tensor on cuda has the dispatch keys of cuda, whose device guard autograd asks for: a build
without CUDA ends the process. In Python they say that they are on ``cuda:0``, as the tensors that
they stand for do: a compiler decides by it, so does the program that it follows, and the program's
own ``FakeTensorMode`` is compared with what runs (``torch.library.opcheck``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.dispatch.modes import ASKS_FOR_DEVICE, FakeTensor
from pytest_torchmem.torch_private.patching.patches import Replacements
from pytest_torchmem.torch_private.patching.replaceable import metadata_handlers

_CPU = torch.device("cpu")
_DEVICE = 2
"""The position of ``device`` among the arguments after the class; torch/_subclasses/fake_tensor.py.
"""
_SAID = "_torchmem_device"
"""The attribute of a fake tensor that has the device on which Python sees it."""
STANDS_FOR_GPU = "_torchmem_stands_for_gpu"
"""The attribute of a mode that has made a fake tensor which says that it is on the GPU."""
_NAMES = ("device", "fake_device", "_fake_device")
_KEPT = property(
    lambda tensor: vars(tensor)["fake_device"],
    lambda tensor, device: vars(tensor).update(fake_device=device),
)
"""Where torch 2.11 has the device of a fake tensor: in an attribute of the instance."""


def device_said(tensor: Tensor) -> torch.device:
    """Return where a tensor is, or stands for one that is: also of a trace that is over."""
    found: torch.device = getattr(tensor, _SAID, None) or tensor.device
    return found


def fake_tensors(trace: TraceContext) -> Replacements:
    """Make the program's fake tensors on the CPU."""
    original: Any = FakeTensor.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        said = None
        if trace.on_thread():
            named = [args[_DEVICE]] if len(args) > _DEVICE else map(kwargs.get, _NAMES)
            said = next((device for device in named if _is_gpu(device)), None)
            if len(args) > _DEVICE:
                args = (*args[:_DEVICE], as_cpp_has_it(args[_DEVICE]), *args[_DEVICE + 1 :])
            for name in _NAMES:
                if name in kwargs:
                    kwargs[name] = as_cpp_has_it(kwargs[name])
        made = original(cls, *args, **kwargs)
        if said is not None:
            setattr(made.fake_mode, STANDS_FOR_GPU, True)
            setattr(made, _SAID, _numbered(trace, torch.device(said)))
        return made

    def place(tensor: Any, device: Any) -> None:
        # What converts a tensor moves the fake one (torch/_subclasses/meta_utils.py).
        if trace.on_thread() and _is_gpu(device):
            setattr(tensor, _SAID, _numbered(trace, torch.device(device)))
            device = _CPU
        kept.fset(tensor, device)

    def torch_dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_FOR_DEVICE and hasattr(args[0], _SAID) and trace.on_thread():
            found = args[0].device
            return _CPU if _is_gpu(found) else found
        return dispatch(func, types, args, kwargs or {})

    kept: Any = getattr(FakeTensor, "fake_device", _KEPT)
    dispatch = FakeTensor.__torch_dispatch__
    said = property(lambda tensor: getattr(tensor, _SAID, None) or kept.fget(tensor), place)
    replacements = {
        "__new__": staticmethod(new),
        "__torch_dispatch__": staticmethod(torch_dispatch),
        "fake_device": said,
    }
    handlers = metadata_handlers.original

    def handler(args: Any) -> Any:
        found = handlers[ASKS_FOR_DEVICE](args)
        return _CPU if _is_gpu(found) and trace.on_thread() else found

    return [
        (FakeTensor, replacements),
        metadata_handlers.by({**handlers, ASKS_FOR_DEVICE: handler}),
    ]


def _numbered(trace: TraceContext, device: torch.device) -> torch.device:
    """Return a GPU by its number; one that is not there is none of a fake tensor's business."""
    return trace.device(device) if device.index is None else device


def _is_gpu(device: Any) -> bool:
    return (
        device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
    )


def as_cpp_has_it(device: Any) -> Any:
    """Return the device on which C++ has what Python says is on ``device``."""
    if device is None:
        return None
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return _CPU
    return device
