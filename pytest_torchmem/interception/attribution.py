"""Who made an allocation: the module, the operator and the source line.

Modules are followed by a ``Module.__call__`` of our own for the length of a trace: module hooks
would be visible to the program (``nn.TransformerEncoderLayer`` leaves its fast path when it finds
one). In a backward an allocation belongs to the line and module of the forward operator whose node
is running; the two meet in autograd's sequence numbers.
"""

import os
import sys
import tempfile
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from traceback import walk_tb
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.facts import Called, FactCollector, Mode
from pytest_torchmem.printable import working_directory
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.timeline import Origin, Phase
from pytest_torchmem.step.imports import is_installed
from pytest_torchmem.step.trees import modules_by_path
from pytest_torchmem.torch_private import modes, module_calls, tensors

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_FUNCTORCH = os.path.join(_TORCH_ROOT, "_functorch", "")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
"""``sysconfig.get_path("stdlib")``, without reading how Python was built."""
#: A kernel's launch is the user's, in whose line it stands.
_TRITON = os.path.join(os.sep, "triton", "runtime", "")
#: ``typing_extensions.deprecated`` stands around functions of torch.
_DEPRECATED = os.sep + "typing_extensions.py"
_CALLS_OF_MODULES = sys.modules[nn.Module.__module__].__file__
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OWN_ROOT = _PACKAGE + os.sep
#: Frames of these files end the search for a user's line: beyond them is who asked for the trace.
_ENDS = (os.path.join(_PACKAGE, "step", "step.py"), os.path.join(_PACKAGE, "tracing", "trace.py"))

_SKIP, _USER, _END = range(3)
_OF_OTHER_THREAD = (
    "{} is called while another thread traces it, and its parameters have no memory meanwhile: "
    "wait for the trace, or trace a copy"
)

CALL_MODULES = frozenset({"_call", "call"})
"""The package's own functions in which modules of the program run."""

_tuple: Any = tuple.__new__
"""Makes an ``Origin`` as its class does, without a call of Python for each."""
_Place = tuple[str, str]
"""Module and line; a plain tuple, since one is made for every operator."""
_NOWHERE: _Place = ("", "")

_Paths = dict[int, tuple[str, "weakref.ref[nn.Module]"]]
"""The path of each module, by its id."""
_Call = tuple[str, int, nn.Module, Mode]
_Left = tuple[int, CodeType | None, int]
"""The node number when a module returned, and the code that called and the place in it."""
_NOT_LEFT: _Left = (-1, None, 0)


class _Modules(threading.local):
    """The calls of modules that a thread is in: path, the engine's task, module, and its mode."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.left = _NOT_LEFT
        """Of the last call that returned within the present one."""


class _Places:
    """Where a thread's autograd nodes were made, by their sequence numbers, which it counts."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.places: list[_Place] = []
        self.last = -1
        """The last of the numbers."""

    def of(self, number: int) -> tuple[_Place, bool]:
        """Return the place of a node, and whether the thread made a node of that number."""
        # An operator's node is made just before the operator is dispatched, so its number is one
        # less than what ``sequence_number()`` gave when the operator was seen
        # (torch/csrc/autograd/function.h, Node's constructor; generated VariableType).
        position = min(bisect_right(self.numbers, number), len(self.numbers) - 1)
        if position < 0:
            return _NOWHERE, False
        return self.places[position], self.numbers[position] == number + 1

    def add(self, number: int, place: _Place) -> None:
        """Take note that nodes since the last place, below ``number``, are of ``place``."""
        self.numbers.append(number)
        self.places.append(place)
        self.last = number


class Attribution:
    """Follows the modules and autograd nodes of threads; gives the origin of what happens now."""

    def __init__(self) -> None:
        self._modules = _Modules()
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str, _Paths]] = {}
        """By the id of an outermost module: that, its class, and the paths of those in it."""
        self._origins: dict[tuple[Phase, str, str, str, bool], Called] = {}
        self.facts = FactCollector(line_of_program)
        self._forward_lines: dict[tuple[str, str], str] = {}
        """Where an operator was called first in a module, outside of a backward."""
        self._codes: dict[int, tuple[CodeType, int]] = {}
        """By their ids: the hash of code is that of its constants, and some of these have none."""
        self._lines: dict[tuple[int, int], str] = {}
        self._files: dict[str, str] = {}
        """The names of files as lines have them."""
        self._places = _Places()
        self._all_places = [self._places]
        self._node_places = self._places
        """The thread that made the node that ran last; its others run beside it."""
        self.per_thread = {"_places": partial(_places_of_new_thread, self._all_places)}
        self.outermost_calls = 0
        self.outermost_module = 0
        """The ``id`` of the module that was called last of those that no other module calls."""
        self.on_outermost_call: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None
        """Called for modules that no other module calls, except where a backward computes anew."""
        self.on_outermost_call = None
        self.traced: Container[int] = ()
        """The ids of modules whose tensors have no memory meanwhile, on any thread."""
        self.on_optimizer_step: Callable[[torch.optim.Optimizer], None] | None = None
        self._creating: set[int] = set()
        """Tasks of the engine whose backward makes a graph of its own (``create_graph``)."""
        self._backwards: set[int] = set()
        """Tasks of the engine of which was taken note."""
        self.node_number = 0
        """Of the last operator: one more than the sequence number of the node that autograd makes
        of it, if it records it; minus that, if a node of the backward called it."""
        self.compiled: dict[str, None] = {}
        """Lines that called what ``torch.compile`` wraps; in a trace it runs eagerly."""
        self.fused: dict[str, str] = {}
        """Functions that were counted as fused kernels, and the line that called each first."""

    def origin(
        self, phase: Phase, operator: str, frame: FrameType | None, node: int | None = None
    ) -> Origin:
        """Return the origin of an operator issued now from ``frame``. ``node`` is the sequence
        number of the autograd node that is running, if it is at hand; -1 for none.
        """
        modules, recomputed, task = self._modules.calls, False, tensors.current_graph_task()
        if task == -1:
            place = (modules[-1][0] if modules else "", self._line(frame))
            made = self._places
            self.node_number = number = tensors.sequence_number()
            if made.last < number:  # as ``_note_nodes``
                made.add(number, place)
        elif modules and modules[-1][1] == task:
            module, recomputed = modules[-1][0], True  # by a checkpoint
            line = self._line_in_backward(frame) or self._forward_lines.get((module, operator), "")
            place = module, line
            self._note_nodes(place)  # which a backward in the backward runs, if it is reentrant
        else:
            module, line = self._backward_place(node)
            computes_anew = torch.is_grad_enabled() and task not in self._creating
            # What a hook, a ``Function.backward`` or a checkpoint's function calls is made there.
            own = self._line_in_backward(frame)
            if computes_anew and not own:
                own = self._forward_lines.get((module, operator), "")
            place = module, own or line
            if computes_anew:
                recomputed = True
                self._note_nodes(place)
                if place[0]:
                    self.facts.recomputed(place[0])
        module, line = place
        key = (phase, module, operator, line, recomputed)
        called = self._origins.get(key)
        if called is None:
            made_by: Origin = _tuple(Origin, key)
            if phase is Phase.OPTIMIZER and not made_by.line:  # of ``optimizer=``
                made_by = made_by._replace(line=_line_of_asker(frame))
            called = self._origins[key] = Called(made_by)
            self.facts.calls.append(called)
            if phase is Phase.FORWARD and task == -1 and (site := _site_of(frame)) is not None:
                self.facts.sites[made_by] = site
            if task == -1:
                # The first of several alike modules that comes there tells it for all.
                lines, at = self.facts.library_lines, (fold(module)[0], line)
                if at not in lines:
                    lines[at] = _caller_of_library(frame)
            if phase is Phase.FORWARD:
                self._forward_lines.setdefault((module, operator), line)
        called.times += 1
        return called.origin

    def _note_nodes(self, place: _Place) -> None:
        """Give the nodes that were made since the last operator, and that of this one, a place."""
        number, made = tensors.sequence_number(), self._places
        self.node_number = number
        if made.last < number:
            made.add(number, place)

    def cut(self) -> None:
        """Forget where nodes were made: those that are left belong to nobody who asks any more."""
        kept = [one for one in self._all_places if one.numbers or one is self._places]
        self._all_places[:] = kept  # which makes those of new threads
        for places in self._all_places:
            places.numbers.clear()
            places.places.clear()
            places.last = -1
        self._paths.clear()
        self._origins.clear()
        self._forward_lines.clear()
        self.facts = FactCollector(line_of_program)

    def user_line(self) -> str:
        """Return the innermost line outside of torch and of this package, or ""."""
        return self._line(sys._getframe(1))

    def line_of(self, error: BaseException) -> str:
        """Return the innermost line outside of torch and of this package that raised, or ""."""
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        return self._line(frames[-1]) if frames else ""

    def note_fused(self, name: str) -> None:
        """Take note that a function, compiled, is counted as its fused kernel."""
        self.fused.setdefault(name, self.user_line())

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.facts.optimizer(optimizer)
        if self.on_optimizer_step is not None:
            self.on_optimizer_step(optimizer)

    def note_backward(self) -> None:
        """Take note of a backward that has begun, and of what the program asked the engine for. One
        that runs in another is a part of it: a checkpoint with ``use_reentrant=True`` has one for
        each module (torch/utils/checkpoint.py, ``CheckpointFunction.backward``).
        """
        frame = _engine_frame(sys._getframe(1))
        if frame is None or "args" not in frame.f_locals:  # C++ has called the engine
            return
        # ``_engine_run_backward(t_outputs, *args)``: gradients, keep_graph, create_graph, inputs
        # (torch/autograd/graph.py; torch/csrc/autograd/python_engine.cpp, run_backward).
        asked = (*frame.f_locals["args"][1:3], False, False)
        task = tensors.current_graph_task()
        if asked[1] is True:
            self._creating.add(task)
        # ``torch.func.grad`` asks for a graph, whether a program uses it or not
        # (torch/_functorch/eager_transforms.py, _autograd_grad).
        callers = (frame.f_back, frame.f_back and frame.f_back.f_back)
        functional = any(one and one.f_code.co_filename.startswith(_FUNCTORCH) for one in callers)
        creates = asked[1] is True and not functional
        # While operators run, functorch has left its levels.
        vmapped = functional and any(one.f_code is tensors.VMAP_CODE for one in outward(frame))
        if task not in self._backwards and _engine_frame(frame.f_back) is None:
            self.facts.backward(asked[0] is True, creates, vmapped, self._line(frame))
        self._backwards.add(task)

    @contextmanager
    def following_modules(self, on_thread: Callable[[], bool]) -> Iterator[None]:
        """Follow every module's call where ``on_thread()`` is true."""
        before, _FOLLOWING.now = _FOLLOWING.now, (self, on_thread)
        try:
            with _FOLLOWING.methods:
                yield
        finally:
            _FOLLOWING.now = before
            self._modules.calls.clear()
            self._modules.left = _NOT_LEFT
            self._paths.clear()
            self._codes.clear()
            self._lines.clear()
            self._files.clear()

    def calls_of_new_thread(self) -> Callable[[], None]:
        """Return the module calls in which a thread begins that the present thread starts."""
        calls = [*self._modules.calls]

        def begin() -> None:
            if not self._modules.calls:
                self._modules.calls.extend(calls)

        return begin

    def _enter(self, caller: FrameType, task: int) -> None:
        """Give the nodes of views that were made since the last operator to who calls a module.
        Views do not come to the interceptor, which sees nodes when the next operator runs.
        """
        modules, places, number = self._modules, self._places, tensors.sequence_number()
        modules.left = _NOT_LEFT
        if task == -1 and places.numbers and places.numbers[-1] < number:
            module = modules.calls[-1][0] if modules.calls else ""
            places.add(number, (module, self._line(caller)))

    def _leave(self, caller: FrameType, task: int) -> None:
        """Give the nodes of views at the end of a module's call to that module. Their line is not
        known: it is that of the last operator or call in the module, if any.
        """
        modules, places, number = self._modules, self._places, tensors.sequence_number()
        if task == -1 and places.numbers and places.numbers[-1] < number:
            path, (module, line) = modules.calls[-1][0], places.places[-1]
            returned, code, at = modules.left
            if code is not None and returned >= places.numbers[-1]:
                line = ""  # of torch or of this package
                if _classify(code.co_filename) == _USER:
                    lines = (number for start, end, number in code.co_lines() if start <= at < end)
                    found = next(filter(None, lines), code.co_firstlineno)
                    line = f"{short_path(code.co_filename)}:{found}"
            elif module != path:
                line = ""
            places.add(number, (path, line or self._line(caller)))
        modules.left = number, caller.f_code, caller.f_lasti

    def _path(self, calls: list[_Call], module: nn.Module) -> str:
        if not calls:
            self.outermost_calls += 1
            self.outermost_module = id(module)
            root, name = module, self._path_before(module)
        else:
            name, task, root, _ = calls[0]
            if task != -1 and "." not in name:  # a checkpoint of what no model has as a module
                before = self._path_before(module)
                if "." in before:
                    return before
        known = self._paths.get(id(root))
        if known is None or known[0]() is not root:
            paths = {id(child): (path, weakref.ref(child)) for path, child in modules_by_path(root)}
            known = self._paths[id(root)] = (weakref.ref(root), type(root).__name__, paths)
        path = known[2][id(module)][0] if id(module) in known[2] else None
        if path is None:  # a module made or attached in the course of the call
            return f"{calls[-1][0]}.{type(module).__name__}"
        return f"{name}.{path}" if path else name

    def _path_before(self, module: nn.Module) -> str:
        """Return the path of a module that no other calls; a checkpoint calls one by itself."""
        name = type(module).__name__
        if tensors.current_graph_task() == -1:
            return name
        for _, root, paths in self._paths.values():  # which may be gone: graphs hold what they call
            path, reference = paths.get(id(module), ("", None))
            if path and reference is not None and reference() is module:
                return f"{root}.{path}"
        return name

    def _backward_place(self, number: int | None) -> _Place:
        if number is None:
            node = tensors.current_node()
            number = tensors.node_number(node)
        if number == -1:
            self.node_number = 0
            return _NOWHERE
        self.node_number = -1 - number
        place, made = self._node_places.of(number)
        if not made and len(self._all_places) > 1:
            for places in self._all_places:  # a node does not say which thread made it
                found, made = places.of(number)
                if made:
                    self._node_places, place = places, found
                    break
        return place

    def _line_in_backward(self, frame: FrameType | None) -> str:
        """Return the innermost line of Python that the backward has called, "" if none."""
        inner = frame
        while inner is not None and inner.f_code is not tensors.ENGINE_CODE:
            known = self._codes.get(id(inner.f_code))
            kind = known[1] if known is not None else _classify(inner.f_code.co_filename)
            if kind == _USER:
                return self._line(inner)
            inner = inner.f_back
        return ""

    def _line(self, frame: FrameType | None) -> str:
        codes = self._codes
        while frame is not None:
            code = frame.f_code
            number = id(code)
            known = codes.get(number)
            if known is None:
                known = codes[number] = code, _classify(code.co_filename)
            what = known[1]
            if what == _SKIP:
                frame = frame.f_back
                continue
            if what == _USER:
                key = (number, frame.f_lasti)  # a line's number takes ten times as long to find
                line = self._lines.get(key)
                if line is None:
                    name = code.co_filename
                    file = self._files.get(name) or self._files.setdefault(name, short_path(name))
                    line = self._lines[key] = f"{file}:{frame.f_lineno}"
                return line
            return ""
        return ""


class _Following:
    """Who follows the calls of modules now."""

    def __init__(self) -> None:
        self.now: tuple[Attribution, Callable[[], bool]] | None = None
        self.methods = module_calls.ModuleMethods({"__call__": self._following})

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        following = self

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            now = following.now
            if now is None or not now[1]():
                if now is not None and id(self) in now[0].traced:
                    raise UsageError(_OF_OTHER_THREAD.format(type(self).__name__))
                return original(self, *args, **kwargs)
            attribution = now[0]
            stack = attribution._modules.calls
            if stack and stack[-1][2] is self:  # a subclass's ``__call__`` that calls ours
                return original(self, *args, **kwargs)
            task = tensors.current_graph_task()
            if attribution.on_outermost_call is not None and not stack and task == -1:
                # It asks for sizes, which would be written down, or handed to a program's mode.
                with modes.not_jit_tracing(), modes.NoFunctionModes():
                    attribution.on_outermost_call(self, args, kwargs)
            path = attribution._path(stack, self)
            outer = stack[-1][3] if stack else None
            mode = attribution.facts.called(path, self, (args, kwargs), task, outer)
            caller = sys._getframe(1)
            if is_own(caller.f_code) and caller.f_back is not None:
                caller = caller.f_back
            attribution._enter(caller, task)
            stack.append((path, task, self, mode))
            try:
                return original(self, *args, **kwargs)
            finally:
                attribution._leave(caller, task)
                stack.pop()

        return call


_FOLLOWING = _Following()


def _places_of_new_thread(all_places: list[_Places]) -> _Places:
    made = _Places()
    all_places.append(made)
    return made


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_user(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames outside of torch and of this package, up to who asks for the trace."""
    frame = innermost
    while frame is not None and (kind := _classify(frame.f_code.co_filename)) != _END:
        if kind == _USER:
            yield frame
        frame = frame.f_back


def _line_in(frame: FrameType) -> str:
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def line_of_program() -> str:
    """Return the innermost line of the program that is not in an installed library, or ""."""
    frames = _of_user(sys._getframe(1))
    own = (one for one in frames if not is_installed(one.f_code.co_filename))
    return next(map(_line_in, own), "")


def callers_of(line: str, innermost: FrameType | None) -> tuple[str, ...] | None:
    """Return the program's lines that lead to one of its own, the nearest first; ``None`` where
    that does not run. Of the forwards of modules it is the nearest alone: paths tell the others.
    """
    file, _, number = line.rpartition(":")
    found, frames = dict[str, None](), _of_user(innermost)
    at_number = (one for one in frames if str(one.f_lineno) == number)
    if not any(one.f_code.co_filename.endswith(file) for one in at_number):
        return None
    for frame in frames:  # beyond that line
        own = not is_installed(frame.f_code.co_filename)
        if own and (not found or frame.f_code.co_name != "forward"):
            found[_line_in(frame)] = None
    found.pop(line, None)
    return (*found,)


def _caller_of_library(innermost: FrameType | None) -> str:
    """Return the program's line that calls an installed library in which a frame runs, or ""."""
    is_within = False
    for frame in _of_user(innermost):
        filename = frame.f_code.co_filename
        if not is_installed(filename) and not _is_generated(filename):
            return _line_in(frame) if is_within else ""
        is_within = True
    return ""


@lru_cache(maxsize=4096)
def _is_generated(filename: str) -> bool:
    """Tell whether a file was written for the process, as torch_geometric writes some."""
    temporary = os.path.join(tempfile.gettempdir(), "")
    here = working_directory()
    is_of_program = bool(here) and filename.startswith(os.path.join(here, ""))
    return filename.startswith(temporary) and not is_of_program


def _site_of(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """Return the program's code that runs and the place in it; ``None`` in the call of a module."""
    while frame is not None:  # not by a generator: asked of every operator at a new place
        code = frame.f_code
        if code.co_filename == _CALLS_OF_MODULES:
            return None
        kind = _classify(code.co_filename)
        if kind != _SKIP:
            return (code, frame.f_lasti) if kind == _USER else None
        frame = frame.f_back
    return None


def _line_of_asker(innermost: FrameType | None) -> str:
    """Return the line that asked for the trace in which a frame runs, "" for a command."""
    for frame in outward(innermost):
        filename = frame.f_code.co_filename
        if is_installed(filename) and not filename.startswith((_TORCH_ROOT, _OWN_ROOT)):
            return ""
        if _classify(filename) == _USER:
            return _line_in(frame)
    return ""


def _engine_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that asks the autograd engine for a backward."""
    return next((one for one in outward(frame) if one.f_code is tensors.ENGINE_CODE), None)


@lru_cache(maxsize=4096)
def _classify(filename: str) -> int:
    if filename in _ENDS:
        return _END
    if filename.startswith((_TORCH_ROOT, _OWN_ROOT)) or _TRITON in filename:
        return _SKIP
    if filename.endswith(_DEPRECATED):
        return _SKIP
    if filename.startswith(_STANDARD_LIBRARY) and not is_installed(filename):
        return _SKIP  # ``copy.deepcopy`` and ``contextlib`` are nobody's line
    return _SKIP if filename.startswith("<") else _USER


def place_among(frames: Sequence[tuple[str, int]]) -> str:
    """Return the innermost place outside of torch and of this package among files and lines."""
    for filename, line in reversed(frames):
        if _classify(filename) == _USER:
            return f"{short_path(filename)}:{line}"
    return ""


def code_made_by(function: Callable[..., Any], name: str) -> CodeType:
    """Return the code of the function of this name that another one defines when it is called."""
    made = (one for one in function.__code__.co_consts if isinstance(one, CodeType))
    return next(one for one in made if one.co_name == name)


def asking_frame() -> FrameType:
    """Return the innermost frame outside of this package, or the caller's where there is none."""
    caller = sys._getframe(1)
    return next((one for one in outward(caller) if not is_own(one.f_code)), caller)


def is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN_ROOT)


def runs_profiler(frame: FrameType | None) -> bool:
    """Return whether a frame is of this package, or of the standard library that it calls."""
    while frame is not None and frame.f_code.co_filename.startswith(("<", _STANDARD_LIBRARY)):
        if is_installed(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return frame is not None and is_own(frame.f_code)


def short_path(filename: str) -> str:
    """Return a file's name as it reads on any machine: below an import root, or as it is run."""
    roots = [
        root for root in sys.path if root and filename.startswith(root.rstrip(os.sep) + os.sep)
    ]
    here = working_directory()
    if here and filename.startswith(here + os.sep) and "site-packages" not in filename[len(here) :]:
        roots = [here]
    if not roots:
        return os.path.basename(filename)
    root = max(roots, key=len).rstrip(os.sep)  # ``os.path.relpath`` takes ten times as long
    return os.path.normpath(filename[len(root) + 1 :]).replace(os.sep, "/")
