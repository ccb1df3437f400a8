"""What the objects of a program hold, so that it can be run again as if for the first time.

A program may be traced several times: on each device, and once more with real values. What it
writes down in objects that it did not make itself (an optimizer's state, ``self.calls += 1``, a
list of losses, a table in a cache) would be there in the next run, with tensors of a trace that is
over.
"""

from __future__ import annotations

import operator
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable
from enum import EnumMeta
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol
from weakref import ref

from torch import Tensor, nn

from pytest_torchmem.step.names import FUNCTIONS, Names
from pytest_torchmem.step.reached import (
    CHANGEABLE,
    CONTAINERS,
    MAPPINGS,
    PLAIN,
    Reached,
    container_of,
    is_code,
    is_of_program,
    items_of,
)
from pytest_torchmem.torch_private.tensors.tensors import PARAMETERS

_HOLD_NOTHING = (*PLAIN, *FUNCTIONS)
_NOTHING_OF_INTEREST = (*_HOLD_NOTHING, nn.Module)
_QUICK = frozenset({*_HOLD_NOTHING, bool, ABCMeta, EnumMeta})
"""The same for most objects, told by their own type."""
_DEEPEST = 3
"""Levels of containers and objects that are looked into."""
_GONE: Any = object()
"""Stands for what was there before, and is no more."""


class Held(Protocol):
    """What holds tensors and modules weakly, by their ids."""

    def __contains__(self, key: int) -> bool: ...

    def __getitem__(self, key: int) -> Any: ...


class _Given(NamedTuple):
    """Stands for a tensor or module that is held elsewhere."""

    key: int


class ProgramState:
    """The contents of all that a program can reach and change.

    What is held ``in_place`` is not held here.
    """

    def __init__(
        self,
        reached: Reached,
        in_place: Held | None = None,
    ) -> None:
        self._reached = reached
        self._held = in_place
        self._before = [(place, self._noted(place)) for place, _ in reached.holders]
        # Of parameters no more than weak references, or it would not be seen that they are gone.
        self._parameters = [
            (table, {name: (id(one), ref(one)) for name, one in table.items() if one is not None})
            for table in reached.parameters
        ]
        self._names = [[*table] for table in reached.parameters]

    def _noted(self, place: Any) -> Any:
        """Return the contents of a place, without what is held elsewhere."""
        contents = _contents(place)
        if self._held is None:
            return contents
        if isinstance(contents, dict):
            return {name: self._stands_for(one) for name, one in contents.items()}
        return [self._stands_for(one) for one in contents]

    def _stands_for(self, one: Any) -> Any:
        return _Given(id(one)) if self._held is not None and id(one) in self._held else one

    def _found(self, contents: Any) -> Any:
        """Return the contents of which note was taken, with what was held elsewhere."""
        if self._held is None:
            return contents
        if isinstance(contents, dict):
            return {name: self._stood_for(one) for name, one in contents.items()}
        return [self._stood_for(one) for one in contents]

    def _stood_for(self, one: Any) -> Any:
        return self._held[one.key] if self._held is not None and type(one) is _Given else one

    def has_let_go(self) -> bool:
        """Return whether something was lost that only what is kept here holds.

        Its memory was not freed then, as it would have been. What is held in place was.
        """
        if self._held is not None:
            return False
        for place, contents in self._before:
            now = _contents(place)
            if is_same(now, contents):
                continue
            there = set(map(id, _parts(now)))
            gone = (one for one in _parts(contents) if id(one) not in there)
            if any(isinstance(one, Tensor) or not isinstance(one, PLAIN) for one in gone):
                return True
        return False

    def restore(self) -> None:
        """Give everything its contents back."""
        for (place, shared), (_, noted) in zip(self._reached.holders, self._before, strict=True):
            contents = self._found(noted)
            if isinstance(place, Names):
                _bind_as(place, contents)
            elif isinstance(place, dict):
                now = _contents(place)
                if not is_same(now, contents):
                    # What a library registers as it is imported is registered once in a process.
                    registers = shared and PARAMETERS not in contents
                    kept = {key: one for key, one in now.items() if key not in contents}
                    kept = {key: one for key, one in kept.items() if registers and is_code(one)}
                    _fill(place, contents | kept)
            elif isinstance(place, set) or not is_same(items_of(place), contents):
                _fill(place, contents)
        for (table, references), names in zip(self._parameters, self._names, strict=True):
            found = dict.fromkeys(names)
            for name, (key, held) in references.items():
                found[name] = held() if self._held is None else self._held[key]
            lost = any(found[name] is None for name in references)
            if not lost and not is_same(table, found):
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
        restorer = _Restorer(is_made_here)
        for place, before in self._before:
            now = _contents(place)
            if not any(map(restorer.holds, now.values() if isinstance(now, dict) else now)):
                continue
            if isinstance(place, Names):
                restorer.names(place, before)
            elif isinstance(place, dict):
                restorer.table(place, before)
            else:
                restorer.items(place, before)


class _Restorer:
    """Takes tensors that are ``made`` out of what holds them, which stays the object that it is.

    What a program holds beside them is its own: the tables of a cache, with what it had computed.
    """

    def __init__(self, made: Callable[[Tensor], bool]) -> None:
        self._made = made
        self._under_way: set[int] = set()
        """What is being restored, which may hold itself."""

    def holds(self, one: Any) -> bool:
        """Tell whether there is anything to take out."""
        return type(one) not in _QUICK and holds_tensor(one, self._made)

    def names(self, place: Names, before: dict[str, Any]) -> None:
        """Restore what names are bound to; a tensor that is gone leaves ``None``."""
        for name, now in place.read().items():
            if name not in before and self.holds(now):
                place.unbind(name)
            elif (then := self._restored(now, before.get(name, _GONE))) is not now:
                place.bind(name, None if then is _GONE else then)

    def table(self, place: dict[Any, Any], before: dict[Any, Any] | None) -> None:
        """Restore the values of a mapping; ``before`` is ``None`` where that is not known."""
        kind = container_of(type(place))
        known = before if before is not None else dict.fromkeys(place, _GONE)
        for name, now in _contents(place).items():
            is_new = name not in known and self.holds(now)
            then = _GONE if is_new else self._restored(now, known.get(name, _GONE))
            if then is _GONE:
                kind.__delitem__(place, name)
            elif then is not now:
                kind.__setitem__(place, name, then)

    def items(self, place: Any, before: list[Any]) -> None:
        """Restore a list, a deque or a set, or take out what it must not hold."""
        found = items_of(place)
        now = {id(one): one for one in found}
        contents = []
        for one in before:
            there = now.get(one.of, _GONE) if isinstance(one, _Inside) else _there(one)
            contents.append(_there(one) if there is _GONE else self._restored(there, one))
        if any(one is _GONE for one in contents):
            contents = [one for one in found if self._restored(one, _GONE) is one]
        _fill(place, contents)

    def _restored(self, now: Any, before: Any) -> Any:
        """Return what is to be where ``now`` is, ``_GONE`` if that is nothing."""
        if id(now) in self._under_way or not self.holds(now):
            return now
        if isinstance(now, Tensor):
            return _there(before)
        self._under_way.add(id(now))
        self._restore_inside(now, before)
        self._under_way.remove(id(now))
        if isinstance(before, _Inside) and before.of == id(now):
            return now  # whose tensors are those that it held, on other memory
        return _there(before) if self.holds(now) else now

    def _restore_inside(self, now: Any, before: Any) -> None:
        kind = container_of(type(now))
        known = before if isinstance(before, _Inside) else None
        if kind in MAPPINGS:
            self.table(now, known.parts if known is not None and known.kind in MAPPINGS else None)
        elif kind in CHANGEABLE:
            same = known is not None and known.kind is kind
            self.items(now, known.parts if known is not None and same else [_GONE])
        elif kind is not None:
            parts = known.parts if known is not None and known.of == id(now) else ()
            for part, then in zip(items_of(now), chain(parts, repeat(_GONE)), strict=False):
                self._restored(part, then)
        own = getattr(now, "__dict__", None) if kind is not type(now) else None
        if type(own) is dict:
            inside = before.inside if isinstance(before, (_Inside, _Weak, _Gone)) else None
            self.table(own, inside.parts if inside and inside.of == id(own) else None)


def _bind_as(place: Names, contents: dict[str, Any]) -> None:
    now = place.read()
    for name, one in contents.items():
        if now.get(name, _GONE) is not one:
            place.bind(name, one)
    for name in now.keys() - contents.keys():
        place.unbind(name)


def holds_tensor(one: Any, is_meant: Callable[[Tensor], bool], depth: int = _DEEPEST) -> bool:
    """Return whether something is a tensor that is meant, or holds one, not too deep."""
    kind, inside = type(one), []
    if kind not in CONTAINERS:
        if isinstance(one, Tensor):
            return is_meant(one)
        if depth == 0 or isinstance(one, _NOTHING_OF_INTEREST):
            return False
        own = getattr(one, "__dict__", None)
        if type(own) is dict and is_of_program(kind):
            inside = [*own.values()]
        if container_of(kind) is None:
            return any(holds_tensor(part, is_meant, depth - 1) for part in inside)
    elif depth == 0:
        return False
    contents = _contents(one)
    if not inside and _hold_nothing(contents):
        return False
    inside += _parts(contents)
    return any(
        holds_tensor(part, is_meant, depth - 1) for part in inside if type(part) not in _QUICK
    )


def _hold_nothing(contents: Any) -> bool:
    """Return whether what a container holds, keys and values alike, holds nothing itself."""
    if isinstance(contents, dict):
        return _hold_nothing([*contents]) and _hold_nothing([*contents.values()])
    return _QUICK.issuperset(map(type, contents)) or all(
        type(part) in _QUICK or isinstance(part, _HOLD_NOTHING) for part in contents
    )


class _Inside:
    """What a container held, which is not kept alive, nor are the tensors in it."""

    __slots__ = ("inside", "kind", "of", "parts")

    def __init__(self, container: Any, depth: int) -> None:
        kind = type(container)
        self.of, self.inside = id(container), None
        if kind in CONTAINERS:
            self.kind: Any = kind
        else:
            self.kind, self.inside = container_of(kind), _attributes(container, depth)
        contents = _contents(container)
        self.parts: Any = contents if _hold_nothing(contents) else _weakly(contents, depth)

    def rebuilt(self) -> Any:
        """Return another container of the same, ``_GONE`` if something of it is gone."""
        is_table = self.kind in MAPPINGS
        values = [_there(one) for one in (self.parts.values() if is_table else self.parts)]
        if self.kind is defaultdict or any(one is _GONE for one in values):
            return _GONE
        return self.kind(zip(self.parts, values, strict=True) if is_table else values)


class _Weak(ref):  # type: ignore[type-arg]
    """A reference of ``_weak``: contents may be weak references themselves."""

    inside: _Inside | None = None
    """The attributes of the object, if it is one of the program."""


class _Gone:
    """Of an object that nothing can refer to weakly: it is there as long as it is found."""

    def __init__(self, inside: _Inside) -> None:
        self.inside = inside


def _attributes(one: Any, depth: int) -> _Inside | None:
    """Return the attributes of an object of the program; a container has none."""
    if not depth or isinstance(one, (Tensor, nn.Module)) or type(one) in CONTAINERS:
        return None
    own = getattr(one, "__dict__", None)
    known = type(own) is dict and is_of_program(type(one))
    return _Inside(own, depth - 1) if known else None


def _weakly(contents: Any, depth: int = _DEEPEST) -> Any:
    """Return contents in which no tensor is kept alive; ``_there`` gives them back."""
    if isinstance(contents, dict):
        return {
            key: value if type(value) in _QUICK else _weak(value, depth)
            for key, value in contents.items()
        }
    return [one if type(one) in _QUICK else _weak(one, depth) for one in contents]


def _weak(one: Any, depth: int) -> Any:
    kind = type(one)
    if kind not in CONTAINERS and isinstance(one, _HOLD_NOTHING):
        return one
    if container_of(kind) is not None:
        return _Inside(one, depth - 1) if depth else _GONE
    try:
        found = _Weak(one)
    except TypeError:  # ``SimpleNamespace`` for one
        inside = _attributes(one, depth)
        return _GONE if inside is None else _Gone(inside)
    found.inside = _attributes(one, depth)
    return found


def _there(one: Any) -> Any:
    if isinstance(one, _Inside):
        return one.rebuilt()
    if isinstance(one, _Gone):
        return _GONE
    if type(one) is not _Weak:
        return one
    found = one()
    return _GONE if found is None else found


def _contents(place: Any) -> Any:
    """Return names and values as a dictionary, and anything else as a list."""
    kind = type(place)
    if kind is Names:
        return place.read()
    if kind is dict:
        return place.copy()
    if kind is list:
        return place[:]
    kind = container_of(kind)
    return dict(kind.items(place)) if kind in MAPPINGS else items_of(place)


def _fill(place: Any, contents: Any) -> None:
    """Give a container other contents."""
    kind = container_of(type(place))
    kind.clear(place)
    if kind in MAPPINGS:
        for key, value in contents.items():
            kind.__setitem__(place, key, value)
    else:
        (kind.update if kind is set else kind.extend)(place, contents)


def _parts(container: Any) -> list[Any]:
    """Return what a container holds, keys and values alike."""
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def is_same(now: Any, before: Any) -> bool:
    """Return whether contents are the very same things, in the same order."""
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        return False
    return not isinstance(now, dict) or all(map(operator.is_, now.values(), before.values()))
