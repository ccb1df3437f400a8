"""Attributes replaced for the length of a trace, and put back exactly as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a class or module; inherited ones are inherited again afterwards."""
    before = {name: vars(owner).get(name, _ABSENT) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(owner, name, replacement)
        yield
    finally:
        for name, original in before.items():
            if original is not _ABSENT:
                setattr(owner, name, original)
            elif name in vars(owner):
                delattr(owner, name)
