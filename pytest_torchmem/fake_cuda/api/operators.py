"""Operators that Python calls by their names: ``torch.ops.aten._to_copy.default(x, device="cpu")``.

Graphs of ``torch.fx`` call them so. C++ takes the tensors of fake cuda to be on the CPU, and asks
for the CPU wherever it makes another beside them: what a program asks for has to be told apart
before C++ sees it, and from what C++ asks an interception for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from pytest_torchmem.fake_cuda.api.device_copy import MOVING, Target, copy_to
from pytest_torchmem.interception.attribution import code_made_by, is_own
from pytest_torchmem.interception.context import TraceContext
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
        __tracebackhide__ = True
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
            return copy_to(trace, args[0], Target(**{**given, "device": trace.device(device)}))
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
