"""What the objects of a program hold, so that it can be run again as if for the first time.

A program may be traced several times: on each device, and once more with real values. What it
writes down in objects that it did not make itself (an optimizer's state, ``self.calls += 1``, a
list of losses, a table in a cache) would be there in the next run, with tensors of a trace that is
over.
"""

from __future__ import annotations

import operator
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dis import get_instructions, opmap
from functools import partial
from typing import Any, NamedTuple
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
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
#: What takes no memory of a device, and holds nothing that does.
_PLAIN = (type, *(kind for kind in _WITHOUT_STATE if kind is not Tensor), type(None))
_HOLD_NOTHING = (*_PLAIN, *_FUNCTIONS)
_STORES = frozenset({opmap["STORE_GLOBAL"], opmap["DELETE_GLOBAL"]})
_GONE: Any = object()
"""Stands for what was there before, and is no more."""


class _Names:
    """Names that are bound elsewhere than in a container: in a cell, a class, slots, globals."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        bind: Callable[[str, Any], None],
        unbind: Callable[[str], None],
    ) -> None:
        self.read, self._bind, self._unbind = read, bind, unbind

    def bind(self, name: str, value: Any) -> None:
        """Bind a name; a class may not let itself be changed."""
        with suppress(AttributeError, TypeError):
            self._bind(name, value)

    def unbind(self, name: str) -> None:
        """Undo that a name was bound."""
        with suppress(AttributeError, TypeError, KeyError):
            self._unbind(name)


class _Holder(NamedTuple):
    """Something whose contents a program can change."""

    place: Any
    """A container, or ``_Names``."""
    shared: bool
    """Whether it belongs to a module or a library rather than to who asked for the trace."""


class Reached:
    """What can be changed of all that a function, or a module's forward, can reach.

    Functions are followed through closures, defaults and the globals that they name. Of the classes
    of modules and other objects, and of the files that define modules, only what stands there is
    looked at: there is no end to what a library's functions name.

    Shared is what other programs use, too: global variables and the containers in them, attributes
    of classes, and those of modules.
    """

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        self.holders: list[_Holder] = []
        self.parameters: list[dict[str, Tensor | None]] = []
        """Tables of modules' parameters."""
        self._keep: list[Any] = []
        """What was looked at lives on, so that no other object gets its address."""
        self._seen: set[int] = set()
        self._kinds: set[type] = set()
        self._globals: list[Any] = []
        if isinstance(target, nn.Module):  # a trace has a copy of it
            self._kinds.update(map(type, target.modules()))
        else:
            arguments = (target, *arguments)
        self._walk([*arguments], shared=False)
        while self._globals and len(self._seen) < _MOST:
            waiting, self._globals = self._globals, []
            self._walk(waiting, shared=True)
        self._look_at_classes()

    def _walk(self, waiting: list[Any], *, shared: bool) -> None:
        while waiting and len(self._seen) < _MOST:
            found: list[Any] = []
            for one in waiting:
                if id(one) in self._seen or isinstance(one, _WITHOUT_STATE) or one is None:
                    continue
                self._seen.add(id(one))
                self._keep.append(one)
                found.extend(self._inside(one, shared))
            waiting = found

    def _inside(self, one: Any, shared: bool) -> Iterator[Any]:
        """Note what can be changed of an object, and yield where to look next."""
        kind = type(one)
        if kind in _MAPPINGS:
            self.holders.append(_Holder(one, shared))
            yield from list(one.values())
        elif kind in _SEQUENCES or kind is set:
            self.holders.append(_Holder(one, shared))
            yield from list(one)
        elif kind is tuple or kind is frozenset:
            yield from one
        elif kind is types.FunctionType:
            yield from self._of_function(one, shared)
        elif kind is types.MethodType:
            yield from (one.__self__, one.__func__)
        elif kind is partial:
            yield from (one.func, one.args, one.keywords)
        elif _is_of_program(kind):
            yield from self._of_object(one, shared)

    def _of_function(self, function: types.FunctionType, shared: bool) -> Iterator[Any]:
        """Yield what a function has at hand, and note the globals that it names."""
        for cell in function.__closure__ or ():
            names = _of_cell(cell)
            self.holders.append(_Holder(names, shared))
            yield from names.read().values()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            yield wrapped
        if (function.__module__ or "").partition(".")[0] in _OTHERS:
            return
        variables = function.__globals__
        for code in _codes(function.__code__):
            if written := _written(code):
                self.holders.append(_Holder(_of_globals(variables, written), shared=True))
            self._globals += [variables[name] for name in code.co_names if name in variables]

    def _of_object(self, one: Any, shared: bool) -> Iterator[Any]:
        self._kinds.add(type(one))
        own = getattr(one, "__dict__", None)
        module = isinstance(one, nn.Module)
        if type(own) is dict:
            self.holders.append(_Holder(own, shared or module))
            for name, value in own.items():
                # Of a module's own tables only these change with a step.
                if module and name == PARAMETERS:
                    self.parameters.append(value)
                elif not (module and name.endswith(("hooks", "hooks_with_kwargs"))):
                    yield value
        slots = _of_slots(one)
        if slots is not None:
            self.holders.append(_Holder(slots, shared))
            yield from slots.read().values()

    def _look_at_classes(self) -> None:
        """Note what can be changed of classes, and of the files that define those of modules."""
        kinds = {base for kind in self._kinds for base in kind.__mro__}
        kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in _OTHERS}
        self.holders += [_Holder(_of_class(kind), shared=True) for kind in kinds]
        files = {kind.__module__ for kind in kinds if issubclass(kind, nn.Module)}
        for file in files & sys.modules.keys():
            variables = vars(sys.modules[file])
            states = {
                name: value
                for name, value in variables.items()
                if not name.startswith("__") and not _is_code(value)
            }
            self.holders.append(_Holder(_of_globals(variables, states), shared=True))
            for value in states.values():
                kept = type(value) in _MAPPINGS or type(value) in _SEQUENCES
                if kept and id(value) not in self._seen:
                    self._seen.add(id(value))
                    self._keep.append(value)
                    self.holders.append(_Holder(value, shared=True))


class ProgramState:
    """The contents of all that a program can reach and change."""

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._before = [(place, _contents(place)) for place, _ in reached.holders]
        # Of parameters no more than weak references, or it would not be seen that they are gone.
        self._parameters = [
            (table, {name: ref(one) if one is not None else None for name, one in table.items()})
            for table in reached.parameters
        ]

    def has_let_go(self) -> bool:
        """Return whether something was lost that only what is kept here holds.

        Its memory was not freed then, as it would have been.
        """
        for place, contents in self._before:
            now = set(map(id, _parts(_contents(place))))
            gone = (one for one in _parts(contents) if id(one) not in now)
            if any(isinstance(one, Tensor) or not isinstance(one, _PLAIN) for one in gone):
                return True
        return False

    def restore(self) -> None:
        """Give everything its contents back."""
        for (place, shared), (_, contents) in zip(self._reached.holders, self._before, strict=True):
            if isinstance(place, _Names):
                _bind_as(place, contents)
            elif type(place) in _MAPPINGS:
                if not _same(_parts(place), _parts(contents)):
                    # What a library registers as it is imported is registered once in a process.
                    kept = {key: place[key] for key in place if key not in contents}
                    kept = {key: one for key, one in kept.items() if shared and _is_code(one)}
                    place.clear()
                    place.update(contents | kept)
            elif type(place) is set:
                place.clear()
                place.update(contents)
            elif not _same(list(place), contents):
                place.clear()
                place.extend(contents)
        for table, references in self._parameters:
            found = {name: held() if held else None for name, held in references.items()}
            lost = any(held and found[name] is None for name, held in references.items())
            if not lost and not _same(_parts(table), _parts(found)):
                table.clear()
                table.update(found)


class SharedState:
    """What is shared with other programs, which is to hold no tensors of a trace that is over.

    Tensors that it held before are not kept alive: a program may let go of them.
    """

    def __init__(self, reached: Reached) -> None:
        self._before = [
            (place, _weakly(_contents(place))) for place, shared in reached.holders if shared
        ]

    def let_go(self, is_made_here: Callable[[Tensor], bool]) -> None:
        """Put what was there before in the place of tensors that a trace has made."""

        def holds(one: Any) -> bool:
            return holds_tensor(one, is_made_here)

        for place, before in self._before:
            if isinstance(place, _Names) or type(place) in _MAPPINGS:
                _put_back(place, before, holds)
            elif any(map(holds, place)):
                kept = [one for one in place if not holds(one)]
                contents = [_there(one) for one in before]
                place.clear()
                add = place.update if type(place) is set else place.extend
                add(kept if any(one is _GONE for one in contents) else contents)


def _put_back(place: Any, before: dict[Any, Any], holds: Callable[[Any], bool]) -> None:
    now = _contents(place)
    for name in [name for name, one in now.items() if holds(one)]:
        then = _there(before[name]) if name in before else _GONE
        if isinstance(place, _Names):
            if name in before:
                place.bind(name, None if then is _GONE else then)
            else:
                place.unbind(name)
        elif then is _GONE:
            del place[name]
        else:
            place[name] = then


def _bind_as(place: _Names, contents: dict[str, Any]) -> None:
    now = place.read()
    for name, one in contents.items():
        if now.get(name, _GONE) is not one:
            place.bind(name, one)
    for name in now.keys() - contents.keys():
        place.unbind(name)


def holds_tensor(one: Any, is_meant: Callable[[Tensor], bool], depth: int = 3) -> bool:
    """Return whether something is a tensor that is meant, or holds one, not too deep."""
    if isinstance(one, Tensor):
        return is_meant(one)
    if depth == 0 or isinstance(one, (*_HOLD_NOTHING, nn.Module)):
        return False
    kind = type(one)
    if kind in _MAPPINGS or kind in _SEQUENCES or kind in (tuple, set, frozenset):
        inside = _parts(one)
    else:
        own = getattr(one, "__dict__", None)
        if type(own) is not dict or not _is_of_program(kind):
            return False
        inside = list(own.values())
    return any(holds_tensor(part, is_meant, depth - 1) for part in inside)


def _weakly(contents: Any) -> Any:
    """Return contents in which no tensor is kept alive; ``_there`` gives them back."""
    if isinstance(contents, dict):
        return {key: _weak(value) for key, value in contents.items()}
    return list(map(_weak, contents))


def _weak(one: Any) -> Any:
    if isinstance(one, _HOLD_NOTHING):
        return one
    if type(one) in (tuple, list, dict):
        parts = _parts(one)
        return one if all(isinstance(part, _HOLD_NOTHING) for part in parts) else _GONE
    with suppress(TypeError):
        return _Weak(one)
    return _GONE


class _Weak(ref):  # type: ignore[type-arg]
    """A reference of ``_weak``: contents may be weak references themselves."""


def _there(one: Any) -> Any:
    if type(one) is not _Weak:
        return one
    found = one()
    return _GONE if found is None else found


def _is_of_program(kind: type) -> bool:
    """Whether objects of a class have state of the program: optimizers and modules do."""
    if kind.__module__.startswith(("torch.optim", "torch.nn", "torch.distributions")):
        return True
    return kind.__module__.partition(".")[0] not in _OTHERS


def _is_code(one: Any) -> bool:
    return isinstance(one, (type, types.ModuleType, *_FUNCTIONS))


def _of_cell(cell: types.CellType) -> _Names:
    def read() -> dict[str, Any]:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    def bind(_: str, value: Any) -> None:
        cell.cell_contents = value

    def unbind(_: str) -> None:
        del cell.cell_contents

    return _Names(read, bind, unbind)


def _of_globals(variables: dict[str, Any], names: Collection[str]) -> _Names:
    def read() -> dict[str, Any]:
        return {name: variables[name] for name in names if name in variables}

    return _Names(read, variables.__setitem__, variables.__delitem__)


def _of_class(kind: type) -> _Names:
    def read() -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(kind).items()
            if not name.startswith(("__", "_abc_")) and not isinstance(value, _DESCRIPTORS)
        }

    return _Names(read, partial(setattr, kind), partial(delattr, kind))


_DESCRIPTORS = (
    *_FUNCTIONS,
    staticmethod,
    classmethod,
    property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
"""What classes hold that is no state of a program."""


def _of_slots(one: Any) -> _Names | None:
    names = [
        name
        for kind in type(one).__mro__
        for name, value in vars(kind).items()
        if isinstance(value, types.MemberDescriptorType) and not name.startswith("__")
    ]
    if not names:
        return None

    def read() -> dict[str, Any]:
        return {name: getattr(one, name) for name in names if hasattr(one, name)}

    return _Names(read, partial(object.__setattr__, one), partial(object.__delattr__, one))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _written(code: types.CodeType) -> list[str]:
    """Return the global variables that a function binds."""
    if _STORES.isdisjoint(code.co_code[::2]):
        return []
    return [str(one.argval) for one in get_instructions(code) if one.opcode in _STORES]


def _contents(place: Any) -> Any:
    if isinstance(place, _Names):
        return place.read()
    return dict(place) if type(place) in _MAPPINGS else list(place)


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
