"""Attributes replaced for the length of a trace, and put back exactly as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


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
                setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(before):
            if original is not _ABSENT:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)


def is_another(known: Callable[..., Any] | None, function: Callable[..., Any]) -> bool:
    """Return whether a registry's entry would be replaced by a function from another place.

    A module that is imported anew, as under pytester in one process, registers its own again.
    """
    return known is not None and (known.__module__, known.__qualname__) != (
        function.__module__,
        function.__qualname__,
    )
