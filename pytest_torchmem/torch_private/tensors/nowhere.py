"""The address of storages that have no memory: pages that are reserved and that nobody fills.

A kernel that nobody intercepted (of an extension, or on a thread that was there before the trace)
reads zeros there, where at address 0 it would end the process. That pages were touched can be seen.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch

_PLACE = "pytest_torchmem_nowhere"
_SIZE = 1 << 44
_NO_RESERVE = 0x4000
"""``MAP_NORESERVE`` of Linux: pages that nobody touches are not counted (mmap(2))."""
_LOOKED_AT = 256
"""Pages at the beginning by which a touch is seen."""
_LOWEST_BITS = int.from_bytes(b"\1" * _LOOKED_AT, "little")


class Nowhere:
    """Reserved pages of this process; without any, an address of 0."""

    def __init__(self) -> None:
        self.address = 0
        self._pages: Any = None
        self._mincore: Any = None
        self._seen = (ctypes.c_ubyte * _LOOKED_AT)()
        if sys.platform != "linux":
            return
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._pages = mmap.mmap(-1, _SIZE, flags=flags)
        except (OSError, ValueError, OverflowError):  # strict overcommit, a limit of addresses
            return
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        for advice in ("MADV_DONTDUMP", "MADV_NOHUGEPAGE"):
            if hasattr(mmap, advice):
                try:
                    self._pages.madvise(getattr(mmap, advice))
                except OSError:  # of a kernel without it
                    continue
        self._watch()

    def _watch(self) -> None:
        """Find out whether touched pages can be told from others; not every system does."""
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._mincore = mincore
        before = self.touched()
        ctypes.string_at(self.address, 1)
        if before or not self.touched():
            self._mincore = None
        self.forget()

    def touched(self) -> bool:
        """Return whether anybody has read or written where there is no memory."""
        if self._mincore is None:
            return False
        size = _LOOKED_AT * mmap.PAGESIZE
        if self._mincore(self.address, size, self._seen):
            return False
        return bool(int.from_bytes(self._seen, "little") & _LOWEST_BITS)

    def forget(self) -> None:
        """Give touched pages back; they are zeros again."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)


def nowhere() -> Nowhere:
    """Return those of this process, whichever copy of this package reserved them."""
    found: Nowhere | None = vars(torch).get(_PLACE)
    if found is None:
        found = vars(torch)[_PLACE] = Nowhere()
    return found
