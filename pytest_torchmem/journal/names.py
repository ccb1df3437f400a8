"""Names that are bound elsewhere than in a container: in a cell, a class, slots or globals."""

import types
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_DESCRIPTORS = (
    *FUNCTIONS,
    staticmethod,
    classmethod,
    property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)
"""What classes hold that is no state of a program."""
_NO_STATE = frozenset(_DESCRIPTORS)


class Names:
    """What is bound in one place: names and values, read anew each time."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        bind: Callable[[str, Any], None],
        unbind: Callable[[str], None],
    ) -> None:
        self.read, self._bind, self._unbind = read, bind, unbind

    def write(self, contents: dict[str, Any]) -> None:
        """Bind these and no others; a class may not let itself be changed."""
        now = self.read()
        for name, value in contents.items():
            if name not in now or now[name] is not value:
                with suppress(AttributeError, TypeError):
                    self._bind(name, value)
        for name in now.keys() - contents.keys():
            with suppress(AttributeError, TypeError, KeyError):
                self._unbind(name)


def names_of_cell(cell: types.CellType) -> Names:
    """Return the variable of a closure, under the name ""."""

    def read() -> dict[str, Any]:
        try:
            return {"": cell.cell_contents}
        except ValueError:  # not assigned yet
            return {}

    def bind(_: str, value: Any) -> None:
        cell.cell_contents = value

    def unbind(_: str) -> None:
        del cell.cell_contents

    return Names(read, bind, unbind)


def names_of_globals(variables: dict[str, Any], names: Collection[str]) -> Names:
    """Return some of a module's global variables."""

    def read() -> dict[str, Any]:
        return {name: variables[name] for name in names if name in variables}

    return Names(read, variables.__setitem__, variables.__delitem__)


def names_of_class(kind: type) -> Names:
    """Return the attributes of a class that are no methods."""

    def read() -> dict[str, Any]:
        own = dict(vars(kind))
        states = map(_NO_STATE.isdisjoint, zip(map(type, own.values())))  # most are methods
        return {
            name: own[name]
            for name in compress(own, states)
            if not name.startswith(("__", "_abc_")) and not isinstance(own[name], _DESCRIPTORS)
        }

    return Names(read, partial(setattr, kind), partial(delattr, kind))


_SLOTS: WeakKeyDictionary[type, list[str]] = WeakKeyDictionary()
"""By class: to look at all that a class has takes as long as a small operator."""


def names_of_slots(one: Any) -> Names | None:
    """Return the slots of an object, ``None`` if its class has none."""
    names = _SLOTS.get(type(one))
    if names is None:
        names = _SLOTS[type(one)] = [
            name
            for kind in type(one).__mro__
            for name, value in vars(kind).items()
            if isinstance(value, types.MemberDescriptorType) and not name.startswith("__")
        ]
    if not names:
        return None

    def read() -> dict[str, Any]:
        return {name: getattr(one, name) for name in names if hasattr(one, name)}

    return Names(read, partial(object.__setattr__, one), partial(object.__delattr__, one))
