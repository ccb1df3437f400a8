"""Addresses that storages without memory say they lie at.

Programs compare them, and libraries read and write there without torch (safetensors): each is the
beginning of pages that the operating system gives when they are first touched.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""``MAP_NORESERVE`` of Linux: pages that nobody touches are not counted (mmap(2))."""
_APART = 1 << 40
"""Between addresses that stand for nothing, where there are no such pages."""


class Addresses:
    """The addresses given to the storages of one trace, by their devices and numbers."""

    def __init__(self) -> None:
        self._pages: dict[tuple[torch.device, int], tuple[mmap.mmap, int]] = {}

    def of(self, device: torch.device, number: int, nbytes: int) -> int:
        """Return the address of the storage with that number on ``device``, of ``nbytes``."""
        known = self._pages.get((device, number))
        if known is not None and len(known[0]) >= nbytes:
            return known[1]
        if not hasattr(mmap, "MAP_ANONYMOUS"):
            return number * _APART
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            pages = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, ValueError, OverflowError):
            return number * _APART
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._pages[device, number] = (pages, address)
        return address
