"""Fake tensors of torch in a trace on fake cuda: they are on the CPU, as C++ has the others.

A fake tensor on cuda has the dispatch keys of cuda, whose device guard autograd asks for: a build
without CUDA ends the process. What a ``FakeTensorMode`` leaves behind is a graph, and the device
that its operators name is that of C++, on which they are intercepted when it runs.
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
_NAMES = ("device", "fake_device", "_fake_device")


def fake_tensors(trace: TraceContext) -> Replacements:
    """Make the program's fake tensors on the CPU."""
    original: Any = FakeTensor.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if trace.on_thread():
            if len(args) > _DEVICE:
                args = (*args[:_DEVICE], as_cpp_has_it(args[_DEVICE]), *args[_DEVICE + 1 :])
            for name in _NAMES:
                if name in kwargs:
                    kwargs[name] = as_cpp_has_it(kwargs[name])
        return original(cls, *args, **kwargs)

    return [(FakeTensor, {"__new__": staticmethod(new)})]


def as_cpp_has_it(device: Any) -> Any:
    """Return the device on which C++ has what Python says is on ``device``."""
    if device is None:
        return None
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return _CPU
    return device
