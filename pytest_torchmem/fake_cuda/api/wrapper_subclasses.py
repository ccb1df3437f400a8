"""Tensor subclasses that wrap others: they have no storage of their own, and a device all the same.

``torch.Tensor._make_wrapper_subclass`` makes one on the device it is given. C++ must not hear of
cuda: autograd asks for a device guard as soon as such a tensor becomes an input of a node, and that
ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patching.replaceable import make_wrapper
from pytest_torchmem.torch_private.tensors.tensors import has_dispatch, is_wrapper, wrapped_tensors

_DEVICE = 7
"""The position of ``device`` among the arguments; torch/csrc/autograd/python_variable.cpp,
THPVariable_make_wrapper_subclass.
"""


class WrapperSubclasses:
    """The devices that wrapper subclasses say they are on."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self.begin()

    def begin(self) -> None:
        """Forget the wrappers of the trace before."""
        self._devices: Any = WeakIdKeyDictionary()

    @contextmanager
    def noted_in(self, trace: TraceContext) -> Iterator[None]:
        """Let what is noted of wrappers go with their contents."""
        trace.noted_contents.append(self._devices)
        yield

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device of a wrapper, None for other tensors.

        It is the one that it was made for, or that of what it wraps: C++ makes ``DTensor``
        (torch/csrc/autograd/python_variable.cpp, ``DTensor_new``).
        """
        found: torch.device | None = self._devices.get(tensor)
        if found is None and has_dispatch(tensor) and is_wrapper(tensor):
            inner = next(iter(wrapped_tensors(tensor)), None)
            found = None if inner is None else inner.device
        return found

    def making(self) -> Callable[..., Any]:
        """Return the function that replaces ``torch.Tensor._make_wrapper_subclass``."""
        original: Callable[..., Any] = make_wrapper.original

        def make_wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
            device = args[_DEVICE] if len(args) > _DEVICE else kwargs.get("device")
            if device is None or self._trace.off():
                return original(*args, **kwargs)
            device = torch.device(device)
            if device.type == "cuda":
                if len(args) > _DEVICE:
                    args = (*args[:_DEVICE], torch.device("cpu"), *args[_DEVICE + 1 :])
                else:
                    kwargs["device"] = torch.device("cpu")
            made = original(*args, **kwargs)
            if device.type == "cuda":
                self._devices[made] = device
            return made

        return staticmethod(make_wrapper_subclass)
