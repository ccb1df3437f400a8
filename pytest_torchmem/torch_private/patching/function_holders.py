"""Modules that hold functions of others by names of their own: ``from torch import tensor``.

What is replaced in ``torch`` has to be replaced there too. Modules of torch and of Python itself
are left alone.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

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
        self._since: tuple[object, list[ModuleType]] | None = None
        """Modules that nobody has looked at, with what told then which there are."""
        self._places: dict[int, dict[tuple[str, str], None]] = {}
        """The modules and names that hold each, while nothing is replaced, by its id."""
        self._ids: dict[str, tuple[Any, int, frozenset[int]]] = {}
        """What modules hold, by ids: with how many names each had then."""
        self._standing: dict[int, Mapping[int, Any]] = {}
        """What stands in the place of something now: what stood there first, by the ids of what
        stands there; by the ids of these."""

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

    def of(self, firsts: Mapping[int, list[Any]]) -> Iterator[tuple[ModuleType, str, Any]]:
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

    def firsts_of(self, replacements: Mapping[int, Any]) -> dict[int, Any]:
        """Return what stood first where originals stand, by the same ids of what replaces them."""
        return {number: self.original(one) for number, one in replacements.items()}

    def note(self, firsts: Mapping[int, Any]) -> None:
        """Take note of what stands in the place of what from now on, by the ids of what does."""
        if firsts:
            self._standing[id(firsts)] = firsts

    def forget(self, firsts: Mapping[int, Any]) -> None:
        """Forget what was noted and stands there no more."""
        self._standing.pop(id(firsts), None)

    def original(self, value: Any) -> Any:
        """Return what ``value`` stands in the place of, or ``value`` itself."""
        number = id(value)
        for firsts in self._standing.values():
            if number in firsts:
                return firsts[number]
        return value

    def give_back(self, originals: Mapping[int, Any]) -> None:
        """Let modules that were imported meanwhile hold originals, by the ids of what they got."""
        state = _state_of_modules()
        if self._state is not None and self._state == state:
            return
        if self._since is None or self._since[0] != state:
            seen, modules = self._seen, tuple(sys.modules.items())
            unseen = [one for name, one in modules if seen.get(name) is not one]
            self._since = state, [one for one in unseen if isinstance(one, ModuleType)]
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
            for name, module in tuple(sys.modules.items()):
                if seen.get(name) is module:
                    continue
                if name.partition(".")[0] in _OWN or not isinstance(module, ModuleType):
                    seen[name] = module
                else:
                    self._look_at(name, module)
        if new:
            for name, (module, number_of_names, ids) in tuple(self._ids.items()):
                grown = len(vars(module)) != number_of_names or name == "__main__"
                if (grown or not new.isdisjoint(ids)) and sys.modules.get(name) is module:
                    self._look_at(name, module)
        main = sys.modules.get("__main__")
        if main is not None and not self._standing:  # once for all that is replaced together
            self._look_at("__main__", main)

    def _look_at(self, name: str, module: ModuleType) -> None:
        wanted, standing, attributes = self._wanted, self._standing.values(), vars(module)
        if getattr(attributes.get("__spec__"), "_initializing", False):
            self._state = None  # it has not all its names yet
        else:
            self._seen[name] = module
        known, number_of_names, ids = self._ids.get(name, _UNKNOWN)
        changed = known is not module or number_of_names != len(attributes)
        if changed or name == "__main__":  # whose names a program binds anew as it runs
            ids = frozenset(map(id, tuple(attributes.values())))
            self._ids[name] = module, len(attributes), ids
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
