"""Operators called by their names, ``torch.ops.aten._to_copy.default(x, device="cpu")``, and modes.

Graphs of ``torch.fx`` call operators so. C++ takes the tensors of fake cuda to be on the CPU, and
asks for the CPU wherever it makes another beside them: what a program asks for has to be told apart
before C++ sees it, and from what C++ asks an interception for. A mode of
``torch.utils._python_dispatch`` that writes arguments down (``make_fx``, a logger) would write down
the wrong device.

So it is with fake tensors, which C++ has on the CPU, and Python sees on the GPU: the zeros of a
formula of a backward, the mask of a composite operator are made where torch would have made them.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.fake_cuda.api.factories import FACTORY, STANDS_FOR_GPU
from pytest_torchmem.fake_cuda.api.tensor_methods import MOVING, CopyRequest, copied, copy_to
from pytest_torchmem.fake_cuda.decompositions import PATH
from pytest_torchmem.interception.attribution import code_made_by, is_own, outward
from pytest_torchmem.interception.context import Functions, TraceContext, instead_of
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private import function_holders, modes, names, patches
from pytest_torchmem.torch_private.compiler import engine_operators, interpreters, node_run_in
from pytest_torchmem.torch_private.keys import OpOverload, OpOverloadPacket, schema
from pytest_torchmem.torch_private.tensors import ENGINE_CODES

_CPU = torch.device("cpu")
_PUT = torch.ops.prims.device_put
_TO_COPY = torch.ops.aten._to_copy
_PUTS = (_PUT, _PUT.default)
_COPIES = (_TO_COPY, _TO_COPY.default, *_PUTS)
_GIVEN = ("dtype", "non_blocking", "memory_format")
_CALL = "__call__"


def operators(trace: TraceContext) -> patches.Replacements:
    """Let an operator that is called with the host as its device make its tensors there, and what
    C++ makes for tensors on the GPU be on the GPU.
    """
    classes: tuple[type, ...] = (OpOverload, OpOverloadPacket)
    return [
        *((one, {_CALL: _placing(getattr(one, _CALL), trace)}) for one in classes),
        *((mode, {_DISPATCH: _seeing(getattr(mode, _DISPATCH), trace)}) for mode in _OF_TORCH),
    ]


def _placing(original: Callable[..., Any], trace: TraceContext) -> Callable[..., Any]:
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not (kwargs and "device" in kwargs) and self not in _PUTS:
            return original(self, *args, **kwargs)
        device = kwargs["device"] if "device" in kwargs else args[1] if len(args) > 1 else None
        if device is None or trace.off() or trace.is_placing or trace.mode.compiles:
            return original(self, *args, **kwargs)
        caller = sys._getframe(1)
        if is_own(caller.f_code) or trace.in_fake_tensor_mode():
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
    """Return whether a mode or a tensor subclass was asked for an operator, and calls it. The
    device is C++'s then, and not the program's: what the program asked for is being placed.
    """
    frames = (one for one in outward(caller) if one.f_code.co_name == "__torch_dispatch__")
    if (asked := next(frames, None)) is None:
        return False
    code, values = asked.f_code, asked.f_locals
    asked_for = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    return any(one is operator for one in asked_for)


CALL = code_made_by(_placing, "call")
"""The code that is called in the place of each operator."""

_DISPATCH = "__torch_dispatch__"
_LIFT = torch.ops.aten.lift_fresh.default
"""Gets what ``torch.tensor`` made of Python numbers, on the CPU, and is what puts it elsewhere."""
_OF_TORCH = (modes.FakeTensorMode, modes.FunctionalTensorMode)
"""Modes for which devices are torch's own."""


class DispatchModes(Functions):
    """Asks modes that are entered with the devices of the trace, until they are left.

    What asks a mode looks its method up by name (csrc/autograd/python_variable.cpp and
    torch/_library/utils.py, ``handle_dispatch_mode``), and so finds the one of the object itself,
    which has to be bound to it.
    """

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._entered: list[Any] = []
        """Each as often as it was entered."""

    def reset(self) -> None:
        """Let the modes that were never left be as they were."""
        while self._entered:
            vars(self._entered.pop()).pop(_DISPATCH, None)

    @instead_of(modes.TorchDispatchMode, "__enter__")
    def enter(self, original: Any, mode: Any) -> Any:
        of_program = not (self._trace.off() or isinstance(mode, _OF_TORCH))
        known = any(mode is one for one in self._entered)
        if of_program and (known or _DISPATCH not in vars(mode)):
            if not known:
                vars(mode)[_DISPATCH] = MethodType(self._dispatch, mode)
            self._entered.append(mode)
        return original(mode)

    @instead_of(modes.TorchDispatchMode, "__exit__")
    def leave(self, original: Any, mode: Any, *error: Any) -> Any:
        for at in reversed(range(len(self._entered))):
            if self._entered[at] is mode:
                del self._entered[at]
                if not any(mode is one for one in self._entered):
                    vars(mode).pop(_DISPATCH, None)
                break
        return original(mode, *error)

    def _dispatch(
        self, mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Ask a mode, with the device that is meant."""
        trace, device = self._trace, kwargs.get("device") if kwargs else None
        outside = trace.off() or trace.mode.compiles or trace.in_fake_tensor_mode()
        if not outside and getattr(device, "type", None) == "cpu":
            kwargs = {**kwargs, "device": trace.device_beside(args, kwargs)}
        elif func is _LIFT and not outside:
            args = (trace.lifted(args[0]),)
        return type(mode).__torch_dispatch__(mode, func, types, args, kwargs)


_TORCH = os.path.dirname(torch.__file__) + os.sep
#: What C++ copies tensors with, or makes others beside them: a gradient with its parameter's
#: strides (torch/csrc/autograd/utils/grad_layout_contract.h, ``clone_obey_contract``).
_BESIDE_TENSOR = frozenset(
    getattr(torch.ops.aten, name).default
    for name in names.listed("_to_copy new_empty new_empty_strided new_full new_ones new_zeros")
)
_COPYING_CODE = copied.__code__
"""What moves a tensor to where it was asked for, and its gradient back to where that one was."""
_CURRENT_GPU = torch.device("cuda")
#: Methods that say themselves on which device their result is.
_SAY_DEVICE = frozenset({"to", "cpu", "cuda", "type", "type_as"})


def _seeing(original: Callable[..., Any], trace: TraceContext) -> Callable[..., Any]:
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        on_host = device is not None and device.type == "cpu"
        if device is not None and device == _CURRENT_GPU and trace.on_thread():
            # torch keeps, for the whole process, on which GPU such a call was; its key has not
            # which was the current one (FakeTensorMode._cache_key): another rank is on another.
            device = trace.device(device)
            kwargs = {**kwargs, "device": device}
        if func is _TO_COPY.default and device is not None and device.type == "cuda":
            known = getattr(args[0], "constant", None)
            if known is not None and not trace.mode.compiles and trace.on_thread():
                # To C++ there is no GPU that it could copy the constant to.
                with patches.having(args[0], constant=None):
                    made = original(self, func, types, args, kwargs)
                made.constant = known.to(kwargs.get("dtype") or known.dtype, copy=True)
                self.fake_tensor_converter.add_constant_storage_mapping(made)
                return made
        if on_host and _guesses_gpu(self, trace):
            from_gpu = func in _BESIDE_TENSOR and args[0].device.type == "cuda"
            if (from_gpu or _makes(func, args)) and _is_guess(func, trace.mode.compiles):
                kwargs = {**kwargs, "device": trace.device(_CURRENT_GPU)}
        return original(self, func, types, args, kwargs)

    return dispatch


def _guesses_gpu(mode: Any, trace: TraceContext) -> bool:
    """Return whether what C++ makes in a mode is made for tensors on the GPU."""
    if not trace.on_thread():
        return False
    if trace.mode.compiles:
        return not trace.mode.graph_on_host
    fakes = mode if isinstance(mode, modes.FakeTensorMode) else modes.fake_tensor_mode()
    return getattr(fakes, STANDS_FOR_GPU, False)


def _makes(func: Any, args: Any) -> bool:
    """Return whether an operator makes a tensor of more than a number."""
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else None
    return _creates(func) and sizes != [] and sizes != ()


@cache
def _creates(func: OpOverload) -> bool:
    """Return whether an operator has a device and no tensors among its arguments."""
    arguments = schema(func).arguments
    has_tensors = any("Tensor" in str(one.type) for one in arguments)
    return not has_tensors and any(one.name == "device" for one in arguments)


def _is_guess(func: OpOverload, compiles: bool) -> bool:
    """Return whether C++ calls an operator on its own account, rather than the program."""
    for frame in outward(sys._getframe(2)):
        code = frame.f_code
        if code is _COPYING_CODE or code is FACTORY:
            return False
        if code in ENGINE_CODES or code is engine_operators():
            return True
        if code in interpreters():
            target, given = node_run_in(frame)
            return not _names_device(target, func) and _may_be_for_gpu(given)
        if code is PATH:
            return _may_be_for_gpu((frame.f_locals["args"], frame.f_locals["kwargs"]))
        if code is CALL and not is_passed_on(frame.f_locals["self"], frame.f_back):
            called = frame.f_locals["self"], (frame.f_locals["args"], frame.f_locals["kwargs"])
            return not _names_device(called[0], func) and _may_be_for_gpu(called[1])
        if not code.co_filename.startswith(_TORCH) and not is_own(code):
            return _creates(func) and not compiles  # the program's own calls have passed FACTORY
    return False


def _may_be_for_gpu(given: Any) -> bool:
    """Return whether a node is given a tensor on the GPU, or none at all."""
    tensors = argument_tensors(given)
    return not tensors or any(tensor.device.type == "cuda" for tensor in tensors)


def _names_device(target: Any, func: OpOverload) -> bool:
    """Return whether what a node calls makes or moves tensors itself."""
    if isinstance(target, str):
        return target in _SAY_DEVICE or target.startswith("new_")
    if isinstance(target, OpOverload):
        return target is func or _creates(target)
    moves = target in (Tensor.to, Tensor.cpu)
    return moves or function_holders.HOLDERS.original(target) in modes.device_constructors()
