"""The figures that ``torch.cuda``'s memory functions give, from the ledger of the fake device.

The caching allocator rounds a request up to a multiple of 512 bytes and counts the block
(c10/cuda/CUDACachingAllocator.cpp, ``round_size``). Blocks of the large pool that are handed out
with up to 1 MiB to spare, and fragmentation, are not part of these figures: what is reserved is the
most that was allocated since the cache was emptied, in segments of 2 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pytest_torchmem.profiler.ledger import DeviceLedger

_BLOCK = 512
_SEGMENT = 2 * 1024**2


def rounded(nbytes: int, multiple: int = _BLOCK) -> int:
    """Return the bytes of the block that a request takes."""
    return -(-nbytes // multiple) * multiple


@dataclass(slots=True)
class _Count:
    """One of the allocator's statistics: ``current``, ``peak``, ``allocated`` and ``freed``."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount

    def as_dict(self, name: str) -> dict[str, int]:
        return {
            f"{name}.all.current": self.current,
            f"{name}.all.peak": self.peak,
            f"{name}.all.allocated": self.allocated,
            f"{name}.all.freed": self.freed,
        }


class MemoryStatistics:
    """Statistics of a device's allocator, brought up to date whenever they are asked for."""

    def __init__(self, ledger: DeviceLedger) -> None:
        self._ledger = ledger
        self._events = self._earlier = 0
        self._blocks, self._bytes, self._requested = _Count(), _Count(), _Count()
        self._reserved = _Count()

    def allocated(self) -> int:
        """Return what ``memory_allocated`` gives."""
        self._follow()
        return self._bytes.current

    def peak_allocated(self) -> int:
        """Return what ``max_memory_allocated`` gives."""
        self._follow()
        return self._bytes.peak

    def reserved(self) -> int:
        """Return what ``memory_reserved`` gives."""
        self._follow()
        return self._reserved.current

    def peak_reserved(self) -> int:
        """Return what ``max_memory_reserved`` gives."""
        self._follow()
        return self._reserved.peak

    def reset_peaks(self) -> None:
        """Begin the peaks anew from what is there now."""
        self._follow()
        for count in (self._blocks, self._bytes, self._requested, self._reserved):
            count.peak = count.current

    def reset_totals(self) -> None:
        """Begin the running totals anew."""
        self._follow()
        for count in (self._blocks, self._bytes, self._requested, self._reserved):
            count.allocated = count.freed = 0

    def empty_cache(self) -> None:
        """Give back what is reserved and not allocated."""
        self._follow()
        self._reserved.add(rounded(self._bytes.current, _SEGMENT) - self._reserved.current)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys of ``memory_stats`` that have a meaning here."""
        self._follow()
        return {
            **self._blocks.as_dict("allocation"),
            **self._bytes.as_dict("allocated_bytes"),
            **self._bytes.as_dict("active_bytes"),
            **self._blocks.as_dict("active"),
            **self._requested.as_dict("requested_bytes"),
            **self._reserved.as_dict("reserved_bytes"),
            "num_alloc_retries": 0,
            "num_ooms": 0,
            "max_split_size": -1,
        }

    def _follow(self) -> None:
        ledger = self._ledger
        for events, start in ((ledger.earlier, self._earlier), (ledger.events, self._events)):
            for event in events[start:]:
                nbytes = ledger.entries[abs(event) - 1].nbytes
                if nbytes == 0:
                    continue
                sign = 1 if event > 0 else -1
                self._blocks.add(sign)
                self._requested.add(sign * nbytes)
                self._bytes.add(sign * rounded(nbytes))
                segments = rounded(self._bytes.current, _SEGMENT)
                if segments > self._reserved.current:
                    self._reserved.add(segments - self._reserved.current)
        self._earlier, self._events = len(ledger.earlier), len(ledger.events)
