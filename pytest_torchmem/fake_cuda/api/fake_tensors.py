"""Fake tensors of torch in a trace on fake cuda: they are on the CPU, as C++ has the others.

A fake tensor on cuda has the dispatch keys of cuda, whose device guard autograd asks for: a build
without CUDA ends the process. What a ``FakeTensorMode`` leaves behind is a graph, and the device
that its operators name is that of C++, on which they are intercepted when it runs.

Those of a compiler say in Python that they are on ``cuda:0``, as the tensors that they stand for
do: a compiler decides by it, and so does the program that it follows.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.modes import FakeTensor
from pytest_torchmem.torch_private.patches import Replacements

_CPU = torch.device("cpu")
_DEVICE = 2
"""The position of ``device`` among the arguments after the class; torch/_subclasses/fake_tensor.py.
"""
_SAID = "_torchmem_device"
"""The attribute of a fake tensor of a compiler that has the device on which Python sees it."""
_NAMES = ("device", "fake_device", "_fake_device")


def fake_tensors(trace: TraceContext) -> Replacements:
    """Make the program's fake tensors on the CPU."""
    original: Any = FakeTensor.__new__
    said_of: Any = FakeTensor.device.fget

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        said = None
        if trace.on_thread():
            if trace.compiles:
                named = [args[_DEVICE]] if len(args) > _DEVICE else map(kwargs.get, _NAMES)
                said = next((device for device in named if _is_gpu(device)), None)
            if len(args) > _DEVICE:
                args = (*args[:_DEVICE], as_cpp_has_it(args[_DEVICE]), *args[_DEVICE + 1 :])
            for name in _NAMES:
                if name in kwargs:
                    kwargs[name] = as_cpp_has_it(kwargs[name])
        made = original(cls, *args, **kwargs)
        if said is not None:
            setattr(made, _SAID, trace.device(torch.device(said)))
        return made

    def device(tensor: Any) -> torch.device:
        # C++ asks for ``fake_device``.
        found: torch.device = said_of(tensor)
        return found if found.type == "meta" else getattr(tensor, _SAID, found)

    return [(FakeTensor, {"__new__": staticmethod(new), "device": property(device)})]


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
