"""Who made an allocation: the module, the operator and the source line.

Modules are followed by a ``Module.__call__`` of our own for the length of a trace: module hooks
would be visible to the program (``nn.TransformerEncoderLayer`` leaves its fast path when it finds
one). In a backward an allocation belongs to the line and module of the forward operator whose node
is running; the two meet in autograd's sequence numbers.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from pytest_torchmem.profile.timeline import Origin, Phase
from pytest_torchmem.torch_private.autograd import current_graph_task, current_node, sequence_number

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
#: Installed beside torch where it is: a kernel's launch is the user's, in whose line it stands.
_TRITON_ROOT = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "triton") + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OWN_ROOT = _PACKAGE + os.sep
#: Frames of these files end the search for a user's line: beyond them is who asked for the trace.
_ENDS = (
    os.path.join(_PACKAGE, "step", "step.py"),
    os.path.join(_PACKAGE, "tracing", "trace.py"),
)

_SKIP, _USER, _END = range(3)


class _Place(NamedTuple):
    module: str
    line: str


_NOWHERE = _Place("", "")


class Attribution:
    """Follows modules and autograd nodes of one thread; gives the origin of what happens now."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, int, nn.Module]] = []
        self._paths: dict[int, tuple[weakref.ref[nn.Module], dict[int, str]]] = {}
        self._origins: dict[tuple[Phase, str, str, str], Origin] = {}
        self._codes: dict[CodeType, int] = {}
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._sequence_numbers: list[int] = []
        self._places: list[_Place] = []
        self._thread = threading.get_ident()
        self.outermost_calls = 0
        self.on_outermost_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None
        """Called for modules that no other module calls, except where a backward computes anew."""
        self.on_outermost_call = None
        self.compiled_calls = 0
        """Calls of modules that ``torch.compile`` wraps; in a trace they run eagerly."""

    def origin(self, phase: Phase, operator: str, frame: FrameType | None) -> Origin:
        """Return the origin of an operator issued now from ``frame``."""
        if current_graph_task() == -1:
            place = self._forward_place(frame)
            number = sequence_number()
            if not self._sequence_numbers or self._sequence_numbers[-1] < number:
                self._sequence_numbers.append(number)
                self._places.append(place)
        elif self._modules and self._modules[-1][1] == current_graph_task():
            place = self._forward_place(frame)  # a checkpoint that computes its forward again
        else:
            place = self._backward_place()
        key = (phase, place.module, operator, place.line)
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins[key] = Origin(*key)
        return origin

    def user_line(self) -> str:
        """Return the innermost line outside of torch and of this package, or ""."""
        return self._line(sys._getframe(1))

    @staticmethod
    def asked_from(filename: str) -> bool:
        """Return whether the innermost code outside of this package stands in ``filename``."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_ROOT):
            frame = frame.f_back
        return frame.f_code.co_filename == filename

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Follow every module's call on this thread."""
        original = nn.Module.__call__
        attribution, stack, thread = self, self._modules, self._thread

        # torch's Python tracer reads this frame's module as its local ``self``, and ends the
        # process where there is none (torch/csrc/autograd/profiler_python.cpp, recordPyCall).
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if threading.get_ident() != thread:
                return original(self, *args, **kwargs)
            if stack and stack[-1][2] is self:  # a subclass's ``__call__`` that calls ours
                return original(self, *args, **kwargs)
            task = attribution._begin_call(self, args, kwargs)
            stack.append((attribution._path(self), task, self))
            try:
                return original(self, *args, **kwargs)
            finally:
                stack.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            stack.clear()
            self._paths.clear()

    def _begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Report a call that begins; return the engine's task that it is part of, -1 for none."""
        if type(module).__name__ == "OptimizedModule":
            self.compiled_calls += 1
        task = current_graph_task()
        if self.on_outermost_call is not None and not self._modules and task == -1:
            self.on_outermost_call(module, args, kwargs)
        return task

    def _path(self, module: nn.Module) -> str:
        if not self._modules:
            self.outermost_calls += 1
            root, name = module, type(module).__name__
        else:
            root = self._modules[0][2]
            name = type(root).__name__
        known = self._paths.get(id(root))
        if known is None or known[0]() is not root:
            names = {id(child): path for path, child in root.named_modules()}
            known = self._paths[id(root)] = (weakref.ref(root), names)
        path = known[1].get(id(module))
        if path is None:  # a module made or attached in the course of the call
            return f"{self._modules[-1][0]}.{type(module).__name__}"
        return f"{name}.{path}" if path else name

    def _forward_place(self, frame: FrameType | None) -> _Place:
        return _Place(self._modules[-1][0] if self._modules else "", self._line(frame))

    def _backward_place(self) -> _Place:
        node = current_node()
        if node is None or not self._places:
            return _NOWHERE
        # An operator's node is made just before the operator is dispatched, so its number is one
        # less than what ``sequence_number()`` gave when the operator was seen
        # (torch/csrc/autograd/function.h, Node's constructor; generated VariableType).
        position = bisect_right(self._sequence_numbers, node._sequence_nr())
        return self._places[min(position, len(self._places) - 1)]

    def _line(self, frame: FrameType | None) -> str:
        codes = self._codes
        while frame is not None:
            code = frame.f_code
            what = codes.get(code)
            if what is None:
                what = codes[code] = _classify(code.co_filename)
            if what == _USER:
                key = (code, frame.f_lineno)
                line = self._lines.get(key)
                if line is None:
                    line = self._lines[key] = f"{short_path(code.co_filename)}:{frame.f_lineno}"
                return line
            if what == _END:
                return ""
            frame = frame.f_back
        return ""


def _classify(filename: str) -> int:
    if filename in _ENDS:
        return _END
    if filename.startswith((_TORCH_ROOT, _TRITON_ROOT, _OWN_ROOT)):
        return _SKIP
    if filename.startswith("<") or os.path.basename(filename) in ("contextlib.py", "functools.py"):
        return _SKIP
    return _USER


def short_path(filename: str) -> str:
    """Return a file's name as it reads on any machine: below an import root, or as it is run."""
    roots = [
        root for root in sys.path if root and filename.startswith(root.rstrip(os.sep) + os.sep)
    ]
    here = os.getcwd()
    if filename.startswith(here + os.sep) and "site-packages" not in filename[len(here) :]:
        return os.path.relpath(filename, here).replace(os.sep, "/")
    if roots:
        return os.path.relpath(filename, max(roots, key=len)).replace(os.sep, "/")
    return os.path.basename(filename)
