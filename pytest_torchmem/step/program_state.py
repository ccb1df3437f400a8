"""What the objects of a program hold, so that it can be run again as if for the first time.

A program may be traced several times: on each device, and once more with real values. What it
writes down in objects that it did not make itself (an optimizer's state, ``self.calls += 1``, a
list of losses) would be there in the next run, with tensors of a trace that is over.
"""

from __future__ import annotations

import operator
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pytest_torchmem.torch_private.patches import replaced
from pytest_torchmem.torch_private.tensors import PARAMETERS

#: The most objects that are looked at: behind that, a program has data rather than state.
_MOST = 50_000
_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, deque})
#: Where state belongs to the interpreter, the test run, torch or a trace, not to the program.
_OTHERS = frozenset({"_pytest", "pytest", "pluggy", "xdist", "execnet", "torch", "pytest_torchmem"})
_OTHERS |= sys.stdlib_module_names - {"argparse", "collections", "types"}
_WITHOUT_STATE = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    Tensor,
    str,
    bytes,
    int,
    float,
    complex,
)

#: What takes no memory of a device, and holds nothing that does.
_PLAIN = (*(kind for kind in _WITHOUT_STATE if kind is not Tensor), type(None))


class ProgramState:
    """The contents of all containers and objects that a function can reach."""

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self._before: list[tuple[Any, Any]] = []
        self._keep: list[Any] = []
        """What was looked at lives on, so that no other object gets its address."""
        self._parameters: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        """Of the parameters of modules no more than weak references, or it would not be seen that
        they are gone."""
        self._walk([target, *arguments])

    def has_let_go(self) -> bool:
        """Return whether a container has lost something that only what is kept here holds.

        Its memory was not freed then, as it would have been.
        """
        for container, contents in self._before:
            now = set(map(id, _parts(container)))
            gone = (one for one in _parts(contents) if id(one) not in now)
            if any(isinstance(one, Tensor) or not isinstance(one, _PLAIN) for one in gone):
                return True
        return False

    def restore(self) -> None:
        """Give everything its contents back."""
        for container, contents in self._before:
            if type(container) in _MAPPINGS:
                if not _same(_parts(container), _parts(contents)):
                    container.clear()
                    container.update(contents)
            elif type(container) is set:
                container.clear()
                container.update(contents)
            elif not _same(list(container), contents):
                container.clear()
                container.extend(contents)
        for table, references in self._parameters:
            found = {name: held and held() for name, held in references.items()}
            lost = any(held and found[name] is None for name, held in references.items())
            if not lost and not _same(_parts(table), _parts(found)):
                table.clear()
                table.update(found)

    def _walk(self, waiting: list[Any]) -> None:
        seen: set[int] = set()
        while waiting and len(seen) < _MOST:
            found: list[Any] = []
            for one in waiting:
                if id(one) in seen or isinstance(one, _WITHOUT_STATE) or one is None:
                    continue
                seen.add(id(one))
                self._keep.append(one)
                found.extend(self._contents(one))
            waiting = found

    def _contents(self, one: Any) -> Iterator[Any]:
        """Note what an object holds, and yield where to look next."""
        kind = type(one)
        if kind in _MAPPINGS:
            named = dict(one)
            self._before.append((one, named))
            yield from named.values()
        elif kind in _SEQUENCES or kind is set:
            parts = list(one)
            self._before.append((one, parts))
            yield from parts
        elif kind is tuple or kind is frozenset:
            yield from one
        elif isinstance(one, types.FunctionType):
            yield from _reached_from(one)
        elif isinstance(one, types.MethodType):
            yield from (one.__self__, one.__func__)
        elif isinstance(one, partial):
            yield from (one.func, one.args, one.keywords)
        elif _is_of_program(kind):
            yield from self._attributes(one)

    def _attributes(self, one: Any) -> Iterator[Any]:
        own = getattr(one, "__dict__", None)
        if type(own) is not dict:
            return
        self._before.append((own, dict(own)))
        for name, value in own.items():
            # Of a module's own tables only these change with a step.
            if not isinstance(one, nn.Module):
                yield value
            elif name == PARAMETERS:
                held = {key: ref(part) if part is not None else None for key, part in value.items()}
                self._parameters.append((value, held))
            elif not name.endswith(("hooks", "hooks_with_kwargs")):
                yield value


def _is_of_program(kind: type) -> bool:
    """Whether objects of a class have state of the program: optimizers and modules do."""
    if kind.__module__.startswith(("torch.optim", "torch.nn", "torch.distributions")):
        return True
    return kind.__module__.partition(".")[0] not in _OTHERS


def _reached_from(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function has at hand: closure, defaults and the globals that it names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield wrapped
    root = function.__module__ or ""
    if root.partition(".")[0] in _OTHERS:
        return
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _parts(container: Any) -> list[Any]:
    """Return what a container holds, keys and values alike."""
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def _same(now: list[Any], before: list[Any]) -> bool:
    """Whether a container holds the very same things."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


@contextmanager
def optimizers_kept(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Give optimizers that the program brought with it the state they came with.

    Otherwise the next trace, or a real step, would find tensors of a trace that is over.
    """
    made: WeakSet[Optimizer] = WeakSet()
    before: dict[int, tuple[Optimizer, dict[Any, Any]]] = {}
    initialize = Optimizer.__init__

    def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        if on_thread():
            made.add(self)
        initialize(self, *args, **kwargs)

    def first_step(optimizer: Optimizer, *call: Any) -> None:
        if id(optimizer) in before or optimizer in made or not on_thread():
            return
        state = {
            key: copy(value) if isinstance(value, dict) else value
            for key, value in optimizer.state.items()
        }
        before[id(optimizer)] = optimizer, state

    handle = register_optimizer_step_pre_hook(first_step)
    try:
        with replaced(Optimizer, __init__=noted):
            yield
    finally:
        handle.remove()
        for optimizer, state in before.values():
            optimizer.state.clear()
            optimizer.state.update(state)
