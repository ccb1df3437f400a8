"""Parts of ``torch.cuda`` that a trace refuses: raw pointers, and what only a driver has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from pytest_torchmem.errors import UsageError


def refused(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return what raises ``UsageError`` in the place of ``torch.cuda``'s ``name``."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(f"torch.cuda.{name}: {reason}")

    return refuse


_NO_POINTERS = (
    "raw GPU pointers are not available in a trace. Allocate a tensor of that size, or skip this "
    "call while tracing"
)

UNSUPPORTED: dict[str, Callable[..., Any]] = {
    name: refused(name, _NO_POINTERS)
    for name in (
        "caching_allocator_alloc",
        "caching_allocator_delete",
        "caching_allocator_enable",
        "change_current_allocator",
    )
}
