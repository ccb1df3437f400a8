"""What the objects of a program hold, so that it can be run again as if for the first time.

A program may be traced several times: on each device, and once more with real values. What it
writes down in objects that it did not make itself (an optimizer's state, ``self.calls += 1``, a
list of losses, a table in a cache) would be there in the next run, with tensors of a trace that is
over.
"""

import operator
from abc import ABCMeta
from collections.abc import Callable, Mapping
from copy import copy
from enum import EnumMeta
from itertools import chain, compress
from operator import itemgetter
from types import NoneType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from pytest_torchmem.journal.reached import (
    CHANGEABLE,
    CODE,
    CONTAINERS,
    FUNCTIONS,
    MAPPINGS,
    PLAIN,
    Names,
    Reached,
    Scope,
    container_of,
    is_of_program,
    items_of,
)

_HOLD_NOTHING = (*PLAIN, *FUNCTIONS)
_NOTHING_OF_INTEREST = (*_HOLD_NOTHING, nn.Module)
_QUICK = frozenset({*_HOLD_NOTHING, bool, ABCMeta, EnumMeta})
"""The same for most objects, told by their own type."""
_AS_THEY_ARE = _QUICK | CHANGEABLE
"""What is noted of objects of these types keeps none of the program's alive."""
_DEEPEST = 3
"""Levels of containers and objects that are looked into."""
_SETTINGS = (int, float, str, NoneType)
_OF_OPTIMIZERS = "param_groups", "params"
"""The lists of groups, and of the parameters of one."""
GONE: Any = object()
"""Stands for what was there before, and is no more."""


class Reference:
    """What stands for something that is held elsewhere, or not kept alive."""

    __slots__ = ()

    def found(self) -> Any:
        """Return that, ``GONE`` if it is no more."""
        raise NotImplementedError


class Weak(Reference, ref):  # type: ignore[type-arg]
    """Stands for what is not kept alive; contents may be weak references themselves."""

    __slots__ = ()

    def found(self) -> Any:
        one = self()
        return GONE if one is None else one


class _Parts(Reference):
    """Stands for a tuple or a frozenset whose parts are not kept alive."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: type, parts: list[Any]) -> None:
        self.kind, self.parts = kind, parts

    def found(self) -> Any:
        parts = [*map(resolved, self.parts)]
        gone = any(one is GONE for one in parts)
        return GONE if gone else container_of(self.kind).__new__(self.kind, parts)


def resolved(one: Any) -> Any:
    """Return what was noted, ``GONE`` if it is no more."""
    return one.found() if isinstance(one, Reference) else one


def all_resolved(contents: Any) -> Any:
    """Return contents with what was noted in the place of what stands for it."""
    if isinstance(contents, dict):
        return {
            name: one.found() if isinstance(one, Reference) else one
            for name, one in contents.items()
        }
    return [*map(resolved, contents)]


def weakly(one: Any) -> Any:
    """Return what stands for something without keeping it alive, or a tensor in it. Containers that
    can be changed have their own contents noted, and are themselves.
    """
    kind = type(one)
    if kind in _QUICK or isinstance(one, _HOLD_NOTHING):
        return one
    container = container_of(kind)
    if container in CHANGEABLE:
        return one
    if container is not None:
        parts = items_of(one)
        return one if _hold_nothing(parts) else _Parts(kind, [*map(weakly, parts)])
    try:
        return Weak(one)
    except TypeError:  # ``SimpleNamespace`` for one, whose attributes are noted
        return one


class ProgramState:
    """The contents of all that a program can reach and change. What is held ``elsewhere`` is not
    held here: references stand for it, by its ids.
    """

    def __init__(self, reached: Reached, elsewhere: Mapping[int, Reference] | None = None) -> None:
        self._held = elsewhere is not None
        references = elsewhere or {}
        instead, numbers = references.get, references.keys()

        def noted(place: Any) -> Any:
            contents = place.copy() if type(place) is dict else contents_of(place)
            if isinstance(contents, dict):
                if numbers.isdisjoint(map(id, contents.values())):
                    return contents
                return {name: instead(id(one), one) for name, one in contents.items()}
            return [instead(id(one), one) for one in contents] if contents else contents

        self._noted: list[tuple[Any, Scope, Any]] = []
        self._empty: list[tuple[Any, Scope, Any]] = []
        """The same of containers that were empty, as most are."""
        for place, scope in reached.holders:
            contents = noted(place)
            is_empty = not contents and type(place) in CONTAINERS
            (self._empty if is_empty else self._noted).append((place, scope, contents))
        # Of parameters no more than weak references, or it would not be seen that they are gone.
        self._parameters = [
            (table, noted(table) if self._held else mapped(weakly, table))
            for table in reached.parameters
        ]

    def has_let_go(self) -> bool:
        """Return whether something was lost that only what is kept here holds. Its memory was not
        freed then, as it would have been. What is held in place was.
        """
        if self._held:
            return False
        for place, _, contents in chain(self._noted, self._empty):
            now = contents_of(place)
            if is_same(now, contents):
                continue
            there = set(map(id, _parts(now)))
            gone = (one for one in _parts(contents) if id(one) not in there)
            if any(isinstance(one, Tensor) or not isinstance(one, PLAIN) for one in gone):
                return True
        return False

    def restore(self) -> None:
        """Give everything its contents back."""
        filled = compress(self._empty, map(itemgetter(0), self._empty))
        for place, scope, noted in chain(self._noted, filled):
            now = place if type(place) is dict else contents_of(place)
            if is_same(now, noted):  # as most are
                continue
            contents = all_resolved(noted)
            if is_same(now, contents):
                continue
            if scope is Scope.GLOBAL and isinstance(place, dict):
                # What a library registers as it is imported is registered once in a process.
                new = {key: one for key, one in now.items() if key not in contents}
                contents |= {key: one for key, one in new.items() if isinstance(one, CODE)}
            fill(place, contents, now)
        for table, noted in self._parameters:
            found = all_resolved(noted)
            if is_same(table, found):
                continue
            there = (found[name] for name, one in noted.items() if one is not None)
            if not any(one is GONE or one is None for one in there):
                fill(table, found)


class SharedState:
    """What is shared with other programs, which is to hold no tensors of a trace that is over.
    Tensors that it held before are not kept alive: a program may let go of them.
    """

    def __init__(self, reached: Reached) -> None:
        self._settings = [
            (place, {name: copy(one) for name, one in place.items() if _is_setting(one)})
            for place in reached.settings
        ]
        self._groups = [
            (one, mapped(weakly, one))
            for place in reached.settings
            for one in map(place.get, _OF_OPTIMIZERS)
            if type(one) is list
        ]
        places = [place for place, scope in reached.holders if scope is not Scope.OWN]
        self._noted = [
            (
                place,
                contents
                if _AS_THEY_ARE.issuperset(
                    map(type, contents.values() if isinstance(contents, dict) else contents)
                )
                else mapped(weakly, contents),
            )
            for place in (*places, *reached.parameters)
            for contents in (contents_of(place),)
        ]

    def restore_settings(self) -> None:
        """Give optimizers and what goes with them their learning rates, counts and groups back."""
        for place, settings in self._settings:
            place.update(settings)
        for listed, noted in self._groups:
            contents = all_resolved(noted)
            if not any(one is GONE for one in contents):
                fill(listed, contents)

    def let_go(self, is_made_here: Callable[[Tensor], bool]) -> None:
        """Put what was there before in the place of what holds tensors that a trace has made. What
        a program holds beside them is its own: the tables of a cache, with what it had computed.
        """

        def is_over(one: Any, before: Any) -> bool:
            known = type(one) in _QUICK or not holds_tensor(one, is_made_here)
            return not known and not _is_the_same(one, before)

        for place, noted in self._noted:
            now = contents_of(place)
            if isinstance(now, dict):
                contents: Any = {**now}
                for name, one in now.items():
                    before = noted.get(name, GONE)
                    if is_over(one, before):
                        contents[name] = resolved(before)
                        if contents[name] is GONE and name in noted and isinstance(place, Names):
                            contents[name] = None  # a tensor that is gone
                        elif contents[name] is GONE:
                            del contents[name]
            else:
                contents = all_resolved(noted)
                there = {id(one): then for one, then in zip(contents, noted, strict=True)}
                kept = [one for one in now if not is_over(one, there.get(id(one), GONE))]
                if len(kept) == len(now) or any(one is GONE for one in contents):
                    contents = kept
            fill(place, contents, now)


def _is_setting(one: Any) -> bool:
    """Return whether something is a number or a text, or a few of them."""
    return isinstance(one, _SETTINGS) or (
        isinstance(one, (list, tuple)) and all(isinstance(part, _SETTINGS) for part in one)
    )


def _is_the_same(one: Any, noted: Any) -> bool:
    """Return whether something is what was noted, or a tuple of the same."""
    if type(noted) is not _Parts:
        return resolved(noted) is one
    found = items_of(one) if type(one) is noted.kind else []
    return len(found) == len(noted.parts) and all(map(_is_the_same, found, noted.parts))


def mapped(function: Callable[[Any], Any], contents: Any) -> Any:
    """Return contents with what a function returns for each in its place."""
    if isinstance(contents, dict):
        return {name: function(one) for name, one in contents.items()}
    return [*map(function, contents)]


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
    contents = contents_of(one)
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


def contents_of(place: Any) -> Any:
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


def fill(place: Any, contents: Any, now: Any = None) -> None:
    """Give a container, or names, contents unless it has these ``now``."""
    if is_same(contents_of(place) if now is None else now, contents):
        return
    if type(place) is Names:
        place.write(contents)
        return
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
    if not now or len(now) != len(before) or not all(map(operator.is_, now, before)):
        return not now and not before
    return not isinstance(now, dict) or all(map(operator.is_, now.values(), before.values()))
