"""Functions that a module has as attributes or hooks, and that hold parts of it themselves.

``copy.deepcopy`` takes functions over as they are. One that was made for a module often holds it in
its closure: a hook that writes to ``self``, a ``forward`` that wraps the one before. In a copy of
the module it would go on to use the original, whose tensors are elsewhere. So would a method of an
object that holds the module, such as a trainer's loss.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, Protocol

from torch import Tensor, nn

from pytest_torchmem.step.copy_rules import is_of_attributes, new_of
from pytest_torchmem.step.named_globals import Globals, named_globals
from pytest_torchmem.step.reached import is_of_program
from pytest_torchmem.torch_private.tensors.tensors import BUFFERS, CHILDREN, PARAMETERS

_TABLES = (CHILDREN, PARAMETERS, BUFFERS)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, type})
"""Types that hold nothing, and of which a copy is the same."""
_NOT_PARTS = (*_ATOMS, tuple, FunctionType, MethodType, partial, weakref.ref)
"""Of which a copy is the same, or that are looked into."""
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_MOST = 100_000
"""How much is looked through: behind that, a function holds data rather than a model."""
_OF_FUNCTIONS = ("__module__", "__qualname__", "__doc__", "__annotations__")


class Copies(Protocol):
    """What makes the copies of everything else."""

    def copy(self, value: Any) -> Any:
        """Return the copy of a part of a module."""

    def copied(self, value: Any) -> Any:
        """Return the copy that was made already, or None."""

    def remember(self, value: Any, made: Any) -> Any:
        """Let ``made`` be the copy of ``value``, and return it."""


class Parts:
    """What modules that are copied consist of."""

    def __init__(self) -> None:
        self._roots: list[Any] = []
        self._ids: set[int] = set()
        self.elsewhere: dict[int, Any] = {}
        """What holds none of these, by its id."""

    def begin(self, root: Any) -> None:
        """Take note of what is going to be copied."""
        self._roots.append(root)
        self.elsewhere.clear()

    def __contains__(self, value: object) -> bool:
        while self._roots:
            self._ids.update(map(id, _parts_of(self._roots.pop())))
        return id(value) in self._ids


class FunctionCloner:
    """Makes such functions anew, with copies in the place of the ``parts`` that they hold.

    What else they hold stays the same, and so does a variable that they share with others, unless
    such a part is in it. An object that holds one is made anew, of what it is else.
    """

    def __init__(self, copies: Copies, parts: Parts, *, named: bool = False) -> None:
        self._copies, self._parts, self._named = copies, parts, named
        """Whether the global variables that functions name are looked at, too."""

    def clone(self, value: Any) -> Any:
        """Return a function or weak reference that holds copies, or ``value`` itself."""
        return self._held(value) if self._reaches(value) else value

    def _reaches(self, value: Any) -> bool:
        """Return whether a part of a module is within reach of what a function holds."""
        elsewhere = self._parts.elsewhere
        waiting, seen = [value], dict[int, Any]()
        while waiting and len(seen) < _MOST:
            one = waiting.pop()
            if id(one) not in seen and id(one) not in elsewhere:
                if self._is_part(one):
                    return True
                seen[id(one)] = one
                waiting.extend(held for held in _held_by(one) if type(held) not in _ATOMS)
                if self._named and type(one) is FunctionType:
                    waiting.extend(named_globals(one).values())
        elsewhere.update(seen)
        return False

    def _is_part(self, value: Any) -> bool:
        if isinstance(value, _NOT_PARTS):  # so that a plain loss does not have all of them listed
            return False
        if value in self._parts:
            return True
        return isinstance(value, (nn.Module, Tensor)) and self._copies.copied(value) is not None

    def _held(self, value: Any) -> Any:
        """Return what takes the place of something that a function holds."""
        if not self._reaches(value):
            return value
        known = self._copies.copied(value)
        if known is not None:
            return known
        kind = type(value)
        if kind is FunctionType:
            return self._clone_function(value)
        if kind is MethodType:
            return MethodType(self._held(value.__func__), self._held(value.__self__))
        if kind is weakref.ref:
            return weakref.ref(self._held(value()), self._held(value.__callback__))
        if self._is_part(value):
            return self._copies.copy(value)
        if kind is partial:
            return partial_of(value, self._held)
        if isinstance(value, _CONTAINERS):
            return self._clone_container(value)
        made = self._copies.remember(value, kind() if kind is SimpleNamespace else new_of(value))
        if made is not value:
            made.__dict__.update(self._values(value.__dict__))
        return made

    def _clone_container(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, tuple):
            return tuple.__new__(kind, map(self._held, value))
        if isinstance(value, frozenset):
            return kind(map(self._held, value))
        made = self._copies.remember(value, copy.copy(value))
        if isinstance(value, dict):
            dict.update(made, self._values(value))
            return made
        made.clear()
        (made.update if isinstance(value, set) else made.extend)(map(self._held, value))
        return made

    def _values(self, table: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: self._held(one) for key, one in table.items()}

    def _clone_function(self, function: FunctionType) -> FunctionType:
        closure = function.__closure__ or ()
        cells = tuple(map(self._cell, closure))
        variables = function.__globals__
        named = named_globals(function) if self._named else {}
        others = Globals(variables) if any(map(self._reaches, named.values())) else variables
        made = FunctionType(function.__code__, others, function.__name__, None, cells)
        self._copies.remember(function, made)
        if others is not variables:
            others.update(self._values(named))
        for cell, original in zip(cells, closure, strict=True):
            if cell is not original:
                cell.cell_contents = self._held(original.cell_contents)
        if function.__defaults__:
            made.__defaults__ = tuple(map(self._held, function.__defaults__))
        if function.__kwdefaults__:
            made.__kwdefaults__ = self._values(function.__kwdefaults__)
        made.__dict__.update(self._values(function.__dict__))
        for name in _OF_FUNCTIONS:
            setattr(made, name, getattr(function, name))
        return made

    def _cell(self, cell: CellType) -> CellType:
        """Return the variable of a closure for the copy: the same, where no part is in it."""
        if not any(self._reaches(one) for one in _in_cells((cell,))):
            return cell
        known: CellType | None = self._copies.copied(cell)
        return self._copies.remember(cell, CellType()) if known is None else known


def partial_of(value: partial[Any], copy: Callable[[Any], Any]) -> partial[Any]:
    """Return a partial of the copies of all that another one holds."""
    options = {name: copy(one) for name, one in value.keywords.items()}
    made = partial(copy(value.func), *map(copy, value.args), **options)
    made.__dict__.update((name, copy(one)) for name, one in value.__dict__.items())
    return made


def holds_nothing(function: FunctionType) -> bool:
    """Return whether a function is nothing but its code."""
    return (
        function.__closure__ is None
        and function.__defaults__ is None
        and function.__kwdefaults__ is None
        and not function.__dict__
    )


def _held_by(value: Any) -> Iterable[Any]:
    """Return what something holds that a function may hold."""
    kind = type(value)
    if kind is FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return (*_in_cells(value.__closure__ or ()), *defaults, *value.__dict__.values())
    if kind is MethodType:
        return value.__func__, value.__self__
    if kind is partial:
        return value.func, *value.args, *value.keywords.values(), *value.__dict__.values()
    if kind is weakref.ref:
        return value(), value.__callback__
    if isinstance(value, _CONTAINERS):
        return tuple(value.values() if isinstance(value, dict) else value)
    return tuple(value.__dict__.values()) if _is_object(value) else ()


def _is_object(value: Any) -> bool:
    """Return whether something is an object of the program, or a mock in the place of one."""
    kind = type(value)
    if isinstance(value, (type, nn.Module, Tensor)):
        return False
    if kind is SimpleNamespace:
        return True
    known = is_of_program(kind) or kind.__module__ == "unittest.mock"
    return known and is_of_attributes(kind)


def _in_cells(cells: Iterable[CellType]) -> Iterator[Any]:
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield the modules of what is copied, with their tensors and whatever else they have that a
    copy has another of.
    """
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            yield one
            for name, attribute in vars(one).items():
                if name in _TABLES and isinstance(attribute, dict):
                    waiting.extend(attribute.values())
                elif not isinstance(attribute, _NOT_PARTS):
                    yield attribute
        elif isinstance(one, Tensor):
            yield one
        elif type(one) in _CONTAINERS:
            waiting.extend(one.values() if type(one) is dict else one)
