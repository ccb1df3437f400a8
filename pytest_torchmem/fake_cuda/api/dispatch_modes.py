"""Modes of ``torch.utils._python_dispatch`` see the device that an operator's tensors are made on.

C++ hands a mode the arguments that it was called with, and takes the tensors of fake cuda to be on
the CPU. A mode that writes them down (``make_fx``, a logger) would write down the wrong device.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.dispatch.modes import (
    FakeTensorMode,
    FunctionalTensorMode,
    TorchDispatchMode,
)
from pytest_torchmem.torch_private.patching.patches import Replacements

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
            __tracebackhide__ = True
            device = kwargs.get("device") if kwargs else None
            outside = trace.off() or trace.compiles or trace.in_fake_tensor_mode()
            if not outside and getattr(device, "type", None) == "cpu":
                kwargs = {**kwargs, "device": trace.device_beside(args, kwargs)}
            elif func is _LIFT and not outside:
                args = (trace.lifted(args[0]),)
            return dispatch(mode, func, types, args, kwargs)

        return dispatched
