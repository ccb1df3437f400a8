"""What a class says a copy of its objects is, read as ``copy.deepcopy`` reads it (Lib/copy.py)."""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

COPY_RULES: Mapping[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
"""Types for which Python has a rule of its own."""
RULES_OF_ONE = ("__deepcopy__", "__reduce_ex__", "__getstate__")
"""What an object may have among its attributes in the place of its class's."""
_OWN_RULES = ("__deepcopy__", "__getnewargs_ex__", "__getnewargs__")
_WEAK_MAPPINGS = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, WeakIdKeyDictionary)
_PROTOCOL = 4
"""Of pickle, in which ``copy`` asks."""


class _Plain:
    """What is nothing but its attributes."""


def is_plain(kind: Any) -> bool:
    """Return whether ``copy.deepcopy`` makes an object of a class and copies its attributes."""
    return (
        is_of_attributes(kind)
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and kind not in copyreg.dispatch_table
        and kind not in COPY_RULES
        and (hasattr(kind, "__setstate__") or not has_state(kind))
        and not any(hasattr(kind, name) for name in _OWN_RULES)
    )


def is_of_attributes(kind: Any) -> bool:
    """Return whether objects of a class have a dictionary of attributes, and nothing beside it."""
    return bool(
        kind.__basicsize__ == _Plain.__basicsize__
        and kind.__dictoffset__ == _Plain.__dictoffset__
        and kind.__weakrefoffset__ == _Plain.__weakrefoffset__
    )


def has_state(kind: Any) -> bool:
    """Return whether a class says itself what its objects consist of."""
    return getattr(kind, "__getstate__", None) is not getattr(object, "__getstate__", None)


def has_own_state(kind: Any) -> bool:
    """Return whether a class says so, and is not a module as any other."""
    rule = getattr(kind, "__getstate__", None)
    return has_state(kind) and rule is not getattr(nn.Module, "__getstate__", None)


def is_of_attributes_alone(module: nn.Module) -> bool:
    """Return whether a module's attributes, in slots as well, are all that a step needs of it.

    A ``__deepcopy__`` of the program's may return the module itself, or build another.
    """
    kind: Any = type(module)
    rule = getattr(kind, "__deepcopy__", None)
    if rule is not None:
        return not str(rule.__module__).startswith("torch.")
    return kind.__setstate__ is nn.Module.__setstate__ and not has_own_state(kind)


def has_own_rule(value: Any) -> bool:
    """Return whether an object says itself what its copy is.

    Its class is asked: an object that has the attributes of another one has none of its rules.
    """
    return hasattr(type(value), "__deepcopy__") or "__deepcopy__" in getattr(value, "__dict__", ())


def says_its_copy(kind: Any) -> bool:
    """Return whether a class of modules says what a copy is, and may say what is none."""
    rules = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return hasattr(kind, "__deepcopy__") or has_own_state(kind) or not rules


def new_of(value: Any) -> Any:
    """Return another object of a plain one's class, or itself where its class has no other.

    A class may want arguments, or hand out what it has made before.
    """
    kind: Any = type(value)
    if kind.__new__ is object.__new__ or isinstance(value, nn.Module):
        return object.__new__(kind)
    try:
        made = kind.__new__(kind)
    except TypeError:
        return object.__new__(kind)
    return made if made is value or not made.__dict__ else object.__new__(kind)


def reduced(value: Any) -> tuple[Any, ...]:
    """Return how an object is made anew, and of what."""
    rule = copyreg.dispatch_table.get(type(value))
    found: Any = value.__reduce_ex__(_PROTOCOL) if rule is None else rule(value)
    return (lambda: value,) if isinstance(found, str) else found


def give_state(made: Any, state: Any) -> None:
    """Let an object consist of what another one does."""
    if hasattr(type(made), "__setstate__"):
        made.__setstate__(state)
        return
    own, in_slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if own is not None:
        made.__dict__.update(own)
    for name, one in (in_slots or {}).items():
        setattr(made, name, one)


def in_slots(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object has in slots."""
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        if hasattr(value, name):
            yield name, getattr(value, name)


def weak_items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what is in a container that does not keep it alive, ``None`` of any other."""
    if isinstance(value, weakref.WeakSet):
        return [(one, None) for one in value]
    return list(value.items()) if isinstance(value, _WEAK_MAPPINGS) else None
