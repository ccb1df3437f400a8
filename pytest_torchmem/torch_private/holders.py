"""Modules that hold functions of others by names of their own: ``from torch import tensor``.

What is replaced in ``torch`` has to be replaced there too. Modules of torch and of Python itself
are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

_OWN = frozenset({"torch", "pytest_torchmem", *sys.stdlib_module_names} - {"__main__"})


class Holders:
    """Finds such names, and remembers them for modules that have not grown since."""

    def __init__(self) -> None:
        self._wanted: dict[int, Any] = {}
        self._seen: dict[str, Any] = {}
        """What ``sys.modules`` had when it was looked at; it need not be a module."""
        self._state: object = None
        """What told the last time which modules there are."""
        self._names: dict[str, dict[str, Any]] = {}
        """By module, what its names stand for while nothing is replaced."""

    def of(self, originals: Sequence[Any]) -> Iterator[tuple[ModuleType, str, Any]]:
        """Yield modules, and the names by which they hold one of ``originals``."""
        wanted = {id(one): one for one in originals}
        if not wanted.keys() <= self._wanted.keys():
            self._wanted |= wanted
            self._seen.clear()
            self._state = None
        self._look()
        for name, held in self._names.items():
            module = sys.modules.get(name)
            if module is None:  # it was taken away
                continue
            for attribute, value in held.items():
                if id(value) in wanted and vars(module).get(attribute) is value:
                    yield module, attribute, value

    def give_back(self, originals: Mapping[int, Any]) -> None:
        """Let modules that were imported meanwhile hold originals, by the ids of what they got."""
        if self._state is not None and self._state == _state_of_modules():
            return
        seen = self._seen
        for name, module in tuple(sys.modules.items()):
            if seen.get(name) is module or not isinstance(module, ModuleType):
                continue
            attributes = vars(module)
            for key, value in tuple(attributes.items()):
                if id(value) in originals:
                    attributes[key] = originals[id(value)]

    def _look(self) -> None:
        """Look at modules that are new, and at the one that runs, which may have grown."""
        state = _state_of_modules()
        if state != self._state:
            self._state = state
            for name, module in tuple(sys.modules.items()):
                if self._seen.get(name) is module:
                    continue
                if isinstance(module, ModuleType):
                    self._look_at(name, module)
                else:
                    self._seen[name] = module
        main = sys.modules.get("__main__")
        if main is not None:
            self._look_at("__main__", main)

    def _look_at(self, name: str, module: ModuleType) -> None:
        wanted, attributes = self._wanted, vars(module)
        if getattr(attributes.get("__spec__"), "_initializing", False):
            self._state = None  # it has not all its names yet
        else:
            self._seen[name] = module
        if name.partition(".")[0] in _OWN:
            return
        # What is replaced now is found as its replacement: what was found before stays.
        found = {key: one for key, one in tuple(attributes.items()) if id(one) in wanted}
        if found:
            self._names.setdefault(name, {}).update(found)


def _state_of_modules() -> tuple[int, str, int]:
    """Return what is another as soon as a module was imported."""
    last = next(reversed(sys.modules))
    return len(sys.modules), last, id(sys.modules[last])


HOLDERS = Holders()
