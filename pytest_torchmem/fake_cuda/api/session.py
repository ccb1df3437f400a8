"""The trace that ``torch.cuda`` belongs to, and functions and classes that ask it.

These are made once for a process, and a trace lends them what they call: there are more than a
hundred, and to make them anew would be the most of what a small model's trace takes.

Questions whether there is a GPU are noted: what a fixture makes depends on the answer.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.accelerator

from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.targets.target import index_of
from pytest_torchmem.torch_private.function_holders import is_of_program
from pytest_torchmem.torch_private.patches import ABSENT, LookedAt, replaced_all

Functions = Mapping[str, Callable[..., Any]]
"""Functions by their names in a module."""


@dataclass(frozen=True)
class Api:
    """What modules of torch have in a trace; what this version of torch lacks is passed over."""

    functions: tuple[tuple[Any, Functions], ...]
    classes: tuple[tuple[ModuleType, str, type], ...]


class Capture(Protocol):
    """The capture of a CUDA graph."""

    index: int
    """The GPU that it is on."""
    streams: set[int]
    """The streams that belong to it."""


class Session:
    """The trace that is running; a process runs one at a time."""

    def __init__(self) -> None:
        self.trace: TraceContext | None = None
        self._make: Callable[[], Sequence[Api]] = tuple
        self._functions: Sequence[Mapping[str, Functions]] | None = None
        self.memories: Sequence[DeviceMemory] = ()
        """Those of the GPUs, by index."""
        self.captures: list[Capture] = []
        """The graphs that are being captured, in order."""

    def begin(
        self,
        trace: TraceContext,
        make_apis: Callable[[], Sequence[Api]],
        memories: Sequence[DeviceMemory],
    ) -> None:
        """Let what is there be about a trace."""
        self.trace, self.memories = trace, memories
        self._make, self._functions = make_apis, None

    def end(self) -> None:
        """Let what is there be about no trace."""
        self.trace, self.memories = None, ()
        self._make, self._functions = tuple, None
        self.captures.clear()

    @property
    def functions(self) -> Sequence[Mapping[str, Functions]]:
        """By the index of the GPU that they are about, and by module; made when first called."""
        if self._functions is None:
            self._functions = [
                {module.__name__: functions for module, functions in api.functions}
                for api in self._make()
            ]
        return self._functions

    def off(self) -> bool:
        """Return whether torch's own function or class is meant."""
        return self.trace is None or self.trace.off()

    def index_of(self, device: Any) -> int:
        """Return the index of the GPU that a program names; None is the current one."""
        trace = self.running
        return index_of(device, trace.gpus, trace.current)

    @property
    def running(self) -> TraceContext:
        """The trace that is running, while replaced functions are on."""
        assert self.trace is not None
        return self.trace


SESSION = Session()


@contextmanager
def session(
    trace: TraceContext, make_apis: Callable[[], Sequence[Api]], memories: Sequence[DeviceMemory]
) -> Iterator[None]:
    """Let modules of torch have functions and classes; ``make_apis()`` has those about each GPU."""
    SESSION.begin(trace, make_apis, memories)
    try:
        with LASTING.layer("torch.cuda", partial(_functions, make_apis)):
            yield
    finally:
        SESSION.end()


def _functions(make_apis: Callable[[], Sequence[Api]], _: TraceContext) -> Layer[None]:
    api = make_apis()[0]
    replacements: list[tuple[Any, dict[str, Any]]] = []
    looked_at: list[LookedAt] = []
    for module, functions in api.functions:
        present = {
            name: _function(getattr(module, name), module.__name__, name)
            for name in _present(module, tuple(functions))
        }
        replacements.append((module, present))
    for module, name, kind in api.classes:
        original = vars(module).get(name)
        looked_at.append((vars(module), name, ABSENT if original is None else original))
        if isinstance(original, type) and not is_of_program(module, name, original):
            replacements.append((module, {name: _class(original, kind)}))
    return Layer(replacements, None, looked_at=looked_at)


@cache
def _present(module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a module has: most do not have most of them."""
    return tuple(name for name in names if getattr(module, name, None) is not None)


@cache
def _function(original: Any, module: str, name: str) -> Callable[..., Any]:
    place, keyword = _device_argument(original)

    def function(*args: Any, **kwargs: Any) -> Any:
        if SESSION.off():
            return original(*args, **kwargs)
        named = None
        if place is not None:
            named = args[place] if len(args) > place else kwargs.get(keyword)
        with SESSION.running.turn():
            return SESSION.functions[SESSION.index_of(named)][module][name](*args, **kwargs)

    function.__name__ = name
    function.__doc__ = original.__doc__
    function.__wrapped__ = original  # type: ignore[attr-defined]
    return function


#: Functions of C++ that ``_exchange_device`` and its like are in a build with CUDA. They name no
#: argument; from Python 3.13 on their signature is ``(object, /)``.
_OF_A_DEVICE = ("_cuda_exchangeDevice", "_cuda_maybeExchangeDevice")


def _device_argument(function: Any) -> tuple[int | None, str]:
    """Return position and name of the argument that says which device, if there is one."""
    if getattr(function, "__name__", "") in _OF_A_DEVICE:
        return 0, "device"
    try:
        names = list(signature(function).parameters)
    except (TypeError, ValueError):  # of C++
        return None, ""
    for name in ("device", "device_index"):
        if name in names:
            return names.index(name), name
    return None, ""


@cache
def _class(original: Any, in_trace: type) -> Any:
    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (original if SESSION.off() else in_trace)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, in_trace))

        def __subclasscheck__(cls, subclass: Any) -> bool:
            # Of a build without CUDA torch.cuda.Stream is no subclass of torch.Stream.
            of_trace = vars(subclass).get("in_trace", subclass)
            return issubclass(of_trace, (original, in_trace))

    return Kind(original.__name__, (), {"__doc__": original.__doc__, "in_trace": in_trace})


_TORCH = os.path.dirname(torch.__file__) + os.sep
_QUESTIONS = (
    (torch.cuda, ("is_available", "device_count", "is_bf16_supported")),
    (torch.accelerator, ("is_available", "device_count", "current_accelerator")),
)


@contextmanager
def questions_noted() -> Iterator[list[str]]:
    """Yield the names of what is asked meanwhile, by code that is not torch's own."""
    asked: list[str] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def question(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
                asked.append(name)
            return original(*args, **kwargs)

        return question

    replacements = [
        (module, {name: noting(name, getattr(module, name)) for name in names})
        for module, names in _QUESTIONS
    ]
    with replaced_all(replacements):
        yield asked
