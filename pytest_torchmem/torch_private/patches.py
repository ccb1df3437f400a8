"""Attributes replaced for the length of a trace, and put back exactly as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeAlias

_ABSENT = object()

Replacements: TypeAlias = list[tuple[Any, Mapping[str, Any]]]
"""Classes or modules, and their attributes by name.

A bound method among the attributes of a class becomes a method of that class: what the class is
called with follows the object that the method is bound to.
"""


@contextmanager
def replaced(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a class or module; inherited ones are inherited again afterwards."""
    with replaced_all([(owner, replacements)]):
        yield


@contextmanager
def replaced_all(replacements: Sequence[tuple[Any, Mapping[str, Any]]]) -> Iterator[None]:
    """Replace attributes of several classes and modules together."""
    before = []
    try:
        for owner, attributes in replacements:
            own = vars(owner)
            for name, replacement in attributes.items():
                before.append((owner, name, own.get(name, _ABSENT)))
                if isinstance(replacement, MethodType) and isinstance(owner, type):
                    replacement = _unbound(replacement)
                setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(before):
            if original is not _ABSENT:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)


def _unbound(method: MethodType) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return method(*args, **kwargs)

    return function


def is_another(known: Callable[..., Any] | None, function: Callable[..., Any]) -> bool:
    """Return whether a registry's entry would be replaced by a function from another place.

    A module that is imported anew, as under pytester in one process, registers its own again.
    """
    return known is not None and (known.__module__, known.__qualname__) != (
        function.__module__,
        function.__qualname__,
    )
