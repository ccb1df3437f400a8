"""Operators called by their names, ``torch.ops.aten._to_copy.default(x, device="cpu")``, and modes.

Graphs of ``torch.fx`` call operators so. C++ takes the tensors of fake cuda to be on the CPU, and
asks for the CPU wherever it makes another beside them: what a program asks for has to be told apart
before C++ sees it, and from what C++ asks an interception for.

Modes of ``torch.utils._python_dispatch`` see the device that an operator's tensors are made on: C++
hands one the arguments that it was called with, and takes the tensors of fake cuda to be on
the CPU. A mode that writes them down (``make_fx``, a logger) would write down the wrong device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch

from pytest_torchmem.fake_cuda.api.device_copy import MOVING, CopyRequest, copy_to
from pytest_torchmem.interception.attribution import code_made_by, is_own
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.dispatch.modes import (
    FakeTensorMode,
    FunctionalTensorMode,
    TorchDispatchMode,
)
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, OpOverloadPacket
from pytest_torchmem.torch_private.patching.patches import Replacements

_CPU = torch.device("cpu")
_PUT = torch.ops.prims.device_put
_TO_COPY = torch.ops.aten._to_copy
_PUTS = (_PUT, _PUT.default)
_COPIES = (_TO_COPY, _TO_COPY.default, *_PUTS)
_GIVEN = ("dtype", "non_blocking", "memory_format")
_CALL = "__call__"


def operators(trace: TraceContext) -> Replacements:
    """Let an operator that is called with the host as its device make its tensors there."""
    classes: tuple[type, ...] = (OpOverload, OpOverloadPacket)
    return [(one, {_CALL: _placing(getattr(one, _CALL), trace)}) for one in classes]


def _placing(original: Callable[..., Any], trace: TraceContext) -> Callable[..., Any]:
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not (kwargs and "device" in kwargs) and self not in _PUTS:
            return original(self, *args, **kwargs)
        device = kwargs["device"] if "device" in kwargs else args[1] if len(args) > 1 else None
        if device is None or not _is_program(trace):
            return original(self, *args, **kwargs)
        caller = sys._getframe(1)
        if is_own(caller.f_code):
            return original(self, *args, **kwargs)
        device = torch.device(device)
        if is_passed_on(self, caller):
            if self not in _COPIES or MOVING.device != trace.device(device):
                return original(self, *args, **kwargs)
            with trace.placing_on(MOVING.device):
                return original(self, *args, **kwargs)
        if self in _COPIES and args[0].requires_grad:  # its gradient goes back to where it is
            given = {name: value for name, value in kwargs.items() if name in _GIVEN}
            return copy_to(trace, args[0], CopyRequest(**{**given, "device": trace.device(device)}))
        if device.type != "cpu":
            return original(self, *args, **kwargs)
        with trace.placing_on(_CPU):
            return original(self, *args, **kwargs)

    return call


def is_passed_on(operator: Any, caller: FrameType | None) -> bool:
    """Return whether a mode or a tensor subclass was asked for an operator, and calls it.

    The device is C++'s then, and not the program's: what the program asked for is being placed.
    """
    while caller is not None and caller.f_code.co_name != "__torch_dispatch__":
        caller = caller.f_back
    if caller is None:
        return False
    code, values = caller.f_code, caller.f_locals
    asked_for = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    return any(one is operator for one in asked_for)


def _is_program(trace: TraceContext) -> bool:
    return not (trace.off() or trace.is_placing or trace.compiles or trace.in_fake_tensor_mode())


CALL = code_made_by(_placing, "call")
"""The code that is called in the place of each operator."""


_DISPATCH = "__torch_dispatch__"
_LIFT = torch.ops.aten.lift_fresh.default
"""Gets what ``torch.tensor`` made of Python numbers, on the CPU, and is what puts it elsewhere."""
_OF_TORCH = (FakeTensorMode, FunctionalTensorMode)
"""Modes for which devices are torch's own."""


class DispatchModes:
    """Asks modes that are entered with the devices of the trace, until they are left.

    What asks a mode looks its method up by name (csrc/autograd/python_variable.cpp and
    torch/_library/utils.py, ``handle_dispatch_mode``), and so finds the one of the object itself,
    which has to be bound to it.
    """

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._entered: list[Any] = []
        """Each as often as it was entered."""

    def reset(self) -> None:
        """Let the modes that were never left be as they were."""
        while self._entered:
            vars(self._entered.pop()).pop(_DISPATCH, None)

    def replacements(self) -> Replacements:
        """Return what enters and leaves a mode."""
        enter, leave = TorchDispatchMode.__enter__, TorchDispatchMode.__exit__

        def entering(mode: Any) -> Any:
            of_program = not (self._trace.off() or isinstance(mode, _OF_TORCH))
            known = any(mode is one for one in self._entered)
            if of_program and (known or _DISPATCH not in vars(mode)):
                if not known:
                    vars(mode)[_DISPATCH] = MethodType(self._with_devices(mode), mode)
                self._entered.append(mode)
            return enter(mode)

        def leaving(mode: Any, *error: Any) -> Any:
            for at in reversed(range(len(self._entered))):
                if self._entered[at] is mode:
                    del self._entered[at]
                    if not any(mode is one for one in self._entered):
                        vars(mode).pop(_DISPATCH, None)
                    break
            return leave(mode, *error)

        return [(TorchDispatchMode, {"__enter__": entering, "__exit__": leaving})]

    def _with_devices(self, mode: Any) -> Callable[..., Any]:
        trace, dispatch = self._trace, type(mode).__torch_dispatch__

        def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            device = kwargs.get("device") if kwargs else None
            outside = trace.off() or trace.compiles or trace.in_fake_tensor_mode()
            if not outside and getattr(device, "type", None) == "cpu":
                kwargs = {**kwargs, "device": trace.device_beside(args, kwargs)}
            elif func is _LIFT and not outside:
                args = (trace.lifted(args[0]),)
            return dispatch(mode, func, types, args, kwargs)

        return dispatched
