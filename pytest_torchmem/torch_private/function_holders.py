"""Who holds functions of torch by names of their own, and what a program put in their place itself.

What is replaced in ``torch`` has to be replaced in a module with ``from torch import tensor``, too.
Modules of torch and of Python itself are left alone.

A mock, or a function of its own, is what the program calls in reality, so it stays there. One that
calls the function whose place it has taken (a spy, a wrapper) calls what a trace has in that place.
"""

import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from operator import is_not
from typing import Any, NamedTuple

_WITHOUT_TORCH = frozenset({"mpmath", "numpy", "sympy"})
"""What torch comes with: large packages that hold nothing of it."""
_OWN = _WITHOUT_TORCH | ({"torch", "pytest_torchmem", *sys.stdlib_module_names} - {"__main__"})
_UNKNOWN: tuple[Any, int, frozenset[int]] = (None, -1, frozenset())


class Holders:
    """Finds such names, and remembers them for modules that have not grown since."""

    def __init__(self) -> None:
        self._wanted: dict[int, Any] = {}
        self._new: set[int] = set()
        """Those that nobody has looked for yet in the modules that were looked at."""
        self._seen: dict[str, Any] = {}
        """What ``sys.modules`` had when it was looked at; it need not be a module."""
        self._state: object = None
        """What told the last time which modules there are."""
        self._since: tuple[object, list[types.ModuleType]] | None = None
        """Modules that nobody has looked at, with what told then which there are."""
        self._places: dict[int, dict[tuple[str, str], None]] = {}
        """The modules and names that hold each, while nothing is replaced, by its id."""
        self._ids: dict[str, tuple[Any, int, frozenset[int]]] = {}
        """What modules hold, by ids: with how many names each had then."""
        self._held: set[int] = set()
        """What any of them has held."""
        self.standing: dict[int, Mapping[int, Any]] = {}
        """What stands in the place of something now: what stood there first, by the ids of what
        stands there; by the ids of the patches that put it there."""

    def firsts(self, originals: Iterable[Any]) -> dict[int, list[Any]]:
        """Return what has each first original in its place now, by the first ones' ids.

        ``originals`` may themselves stand in the place of something. What is first is looked for
        from now on.
        """
        standing: dict[int, list[Any]] = {}
        for one in originals:
            first = self.original(one)
            standing.setdefault(id(first), []).append(one)
            if id(first) not in self._wanted:
                self._wanted[id(first)] = first
                self._new.add(id(first))
        return standing

    def of(self, firsts: Mapping[int, list[Any]]) -> Iterator[tuple[types.ModuleType, str, Any]]:
        """Yield modules, with the names by which they hold a function that ``firsts`` returned."""
        places = self._places
        self._look()
        for number in places.keys() & firsts.keys():
            for name, attribute in places[number]:
                module = sys.modules.get(name)  # it may have been taken away
                if module is not None:
                    found = vars(module).get(attribute)
                    if any(one is found for one in firsts[number]):
                        yield module, attribute, found

    def original(self, value: Any) -> Any:
        """Return what ``value`` stands in the place of, or ``value`` itself."""
        number = id(value)
        for firsts in self.standing.values():
            if number in firsts:
                return firsts[number]
        return value

    def give_back(self, originals: Mapping[int, Any]) -> None:
        """Let modules that were imported meanwhile hold originals, by the ids of what they got."""
        state = _state_of_modules()
        if self._state is not None and self._state == state:
            return
        if self._since is None or self._since[0] != state:
            unseen = (one for _, one in self._unseen())
            self._since = state, [one for one in unseen if isinstance(one, types.ModuleType)]
        for module in self._since[1]:
            attributes = vars(module)
            if originals.keys().isdisjoint(map(id, tuple(attributes.values()))):
                continue
            for key, value in tuple(attributes.items()):
                if id(value) in originals:
                    attributes[key] = originals[id(value)]

    def _look(self) -> None:
        """Search new modules, new names of known modules, and the running module."""
        new, self._new = self._new, set()
        state = _state_of_modules()
        if state != self._state:
            self._state, self._since = state, None
            seen = self._seen
            for name, module in self._unseen():
                if name.partition(".")[0] in _OWN or not isinstance(module, types.ModuleType):
                    seen[name] = module
                else:
                    self._look_at(name, module)
        if new:
            new &= self._held  # most are held by no module
            for name, (module, number_of_names, ids) in tuple(self._ids.items()):
                grown = len(vars(module)) != number_of_names or name == "__main__"
                if (grown or not new.isdisjoint(ids)) and sys.modules.get(name) is module:
                    self._look_at(name, module)
        main = sys.modules.get("__main__")
        if main is not None and not self.standing:  # once for all that is replaced together
            self._look_at("__main__", main)

    def _unseen(self) -> Iterator[tuple[str, types.ModuleType]]:
        """Return the modules that were not looked at, of thousands: without a step of Python."""
        found = [*sys.modules.items()]
        names, modules = zip(*found, strict=True)
        return compress(found, map(is_not, map(self._seen.get, names), modules))

    def _look_at(self, name: str, module: types.ModuleType) -> None:
        wanted, standing, attributes = self._wanted, self.standing.values(), vars(module)
        if getattr(attributes.get("__spec__"), "_initializing", False):
            self._state = None  # it has not all its names yet
        else:
            self._seen[name] = module
        known, number_of_names, ids = self._ids.get(name, _UNKNOWN)
        changed = known is not module or number_of_names != len(attributes)
        if changed or name == "__main__":  # whose names a program binds anew as it runs
            ids = frozenset(map(id, tuple(attributes.values())))
            self._ids[name] = module, len(attributes), ids
            self._held |= ids
        # What was found before stays. Nothing is found in most.
        if wanted.keys().isdisjoint(ids) and all(one.keys().isdisjoint(ids) for one in standing):
            return
        for attribute, one in tuple(attributes.items()):
            first = self.original(one)
            if first is not one or id(one) in wanted:
                number = id(first)
                self._places.setdefault(number, {})[name, attribute] = None


def _state_of_modules() -> tuple[int, str, int]:
    """Return what is another as soon as a module was imported."""
    last = next(reversed(sys.modules))
    return len(sys.modules), last, id(sys.modules[last])


HOLDERS = Holders()

_LIBRARIES = frozenset({"torch", "safetensors", "pytest_torchmem"})
"""Whose functions are replaced in a trace, and what replaces them."""
_OURS = f"{__name__.partition('.')[0]}."
_DECORATORS = frozenset({"contextlib", "functools", "typing_extensions", "warnings"})
"""Where functions come from that stand for the one that they decorate."""
_OF_PYBIND = "instancemethod"
"""What pybind11 makes of a method (``PyInstanceMethod_New``); Python has no name for the type."""
_IN_C = (
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
_WITH_PLACES = (types.FunctionType, types.MethodType)
_DEPTH = 5
"""How far a function's own one is looked for: a spy of ``unittest.mock`` has it fourth."""


def is_of_program(owner: Any, name: str, found: Any) -> bool:
    """Return whether a program has put ``found`` where torch had a public function or method."""
    if name.startswith("_") or not (callable(found) or isinstance(found, property)):
        return False
    place = "__name__" if isinstance(owner, types.ModuleType) else "__module__"
    package, *inner = str(getattr(owner, place, "")).split(".")
    if package not in _LIBRARIES or any(part.startswith("_") for part in inner):
        return False
    return not _is_own(found)


def is_left_over(found: Any) -> bool:
    """Return whether a function is one that this package puts in the place of others."""
    found = _function_in(found)
    if isinstance(found, types.FunctionType):
        return str(found.__globals__.get("__name__")).startswith(_OURS)
    return not isinstance(found, type) and str(type(found).__module__).startswith(_OURS)


def _function_in(found: Any) -> Any:
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    return found.fget if isinstance(found, property) else found


def _is_own(found: Any) -> bool:
    """Return whether a library has defined a function itself."""
    found = _function_in(found)
    if isinstance(found, type):  # a class that torch's is the base of stands for that
        bases = {str(one.__module__).partition(".")[0] for one in found.__mro__[:-1]}
        return bool(bases & (_LIBRARIES | {"builtins"}))
    while found is not None and not isinstance(found, _IN_C):
        if isinstance(found, types.MethodType) or type(found).__name__ == _OF_PYBIND:
            found = found.__func__
            continue
        is_function = isinstance(found, types.FunctionType)
        names = found.__globals__ if is_function else vars(type(found))
        where = str(names.get("__name__" if is_function else "__module__"))
        package = where.partition(".")[0]
        if package in _LIBRARIES:
            return True
        if package not in _DECORATORS and not isinstance(found, partial):
            return False
        found = found.func if isinstance(found, partial) else _attributes(found).get("__wrapped__")
    return True


class HeldOriginal(NamedTuple):
    """A place in what a program put there that holds the function whose place it has taken."""

    original: Any
    put: Callable[[Any], object]
    """Puts something else into the place."""


def held_originals(found: Any, name: str) -> list[HeldOriginal]:
    """Return the places in a program's function, or mock, that hold torch's own of that name."""
    return list(_held(found, name, set(), _DEPTH))


@contextmanager
def program_functions_aside(replaced: Sequence[tuple[Any, Mapping[str, Any]]]) -> Iterator[bool]:
    """Have torch's own functions there, for a while, where a program's call them and stand in their
    place. Yields whether there are any.
    """
    found = [
        (owner, name, vars(owner)[name])
        for owner, attributes in replaced
        for name in attributes
        if name in vars(owner) and is_of_program(owner, name, vars(owner)[name])
    ]
    calling = [(one, held_originals(one[2], one[1])) for one in found]
    calling = [(one, held) for one, held in calling if held]
    try:
        for (owner, name, _), held in calling:
            setattr(owner, name, held[0].original)
        yield bool(calling)
    finally:
        for (owner, name, function), _ in calling:
            setattr(owner, name, function)


def _held(found: Any, name: str, seen: set[int], depth: int) -> Iterator[HeldOriginal]:
    if id(found) in seen or not depth:
        return
    seen.add(id(found))
    for value, put in _places(found):
        if callable(value) and getattr(value, "__name__", "") == name and _is_own(value):
            yield HeldOriginal(value, put)
        elif type(value) in _WITH_PLACES or type(value).__module__ == "unittest.mock":
            yield from _held(value, name, seen, depth - 1)


def _places(found: Any) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """Yield what a function or a mock calls, with what puts something else there."""
    if isinstance(found, types.MethodType):
        yield found.__func__, lambda _: None  # which cannot be replaced
        found = found.__self__
    if isinstance(found, types.FunctionType):
        for cell in found.__closure__ or ():
            try:
                yield cell.cell_contents, partial(setattr, cell, "cell_contents")
            except ValueError:  # of a name that is not bound yet
                continue
        names = found.__globals__
        for name in found.__code__.co_names:
            if callable(names.get(name)):
                yield names[name], partial(names.__setitem__, name)
    attributes = _attributes(found)
    for name, value in list(attributes.items()):
        if name != "__wrapped__":  # is only told of
            yield value, partial(attributes.__setitem__, name)


def _attributes(found: Any) -> dict[str, Any]:
    attributes = getattr(found, "__dict__", {})
    return attributes if isinstance(attributes, dict) else {}
