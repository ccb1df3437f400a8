"""Pages that the operating system gives when they are first touched."""

from __future__ import annotations

import mmap
import sys

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""``MAP_NORESERVE`` of Linux: pages that nobody touches are not counted (mmap(2))."""


def untouched_pages(nbytes: int) -> mmap.mmap | None:
    """Return ``nbytes`` bytes of zeros that take no memory; None where there are no such pages."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError, OverflowError):
        return None
