"""The caching allocator's statistics, as ``torch.cuda.memory_stats`` names them.

c10/core/CachingDeviceAllocator.h, ``DeviceStats``; each is kept for the small pool, the large pool
and both together.
"""

from __future__ import annotations

from collections.abc import Iterator

_COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


class Stat:
    """One figure: its current value, its peak, and the sums of what was added and taken away."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int) -> None:
        """Add ``amount``."""
        self.current = current = self.current + amount
        self.allocated += amount
        if current > self.peak:
            self.peak = current

    def decrease(self, amount: int) -> None:
        """Take ``amount`` away."""
        self.current -= amount
        self.freed += amount

    def change(self, amount: int) -> None:
        """Add ``amount``, or take it away where it is negative."""
        if amount < 0:
            self.decrease(-amount)
        else:
            self.increase(amount)


class PoolStatistics:
    """The statistics of one pool, or of both."""

    def __init__(self) -> None:
        self.allocation = Stat()
        self.segment = Stat()
        self.active = Stat()
        self.inactive_split = Stat()
        self.allocated_bytes = Stat()
        self.reserved_bytes = Stat()
        self.active_bytes = Stat()
        self.inactive_split_bytes = Stat()
        self.requested_bytes = Stat()


NAMES = tuple(vars(PoolStatistics()))


class Statistics:
    """All statistics of one device's allocator."""

    def __init__(self) -> None:
        self.all, self.small, self.large = PoolStatistics(), PoolStatistics(), PoolStatistics()
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_device_alloc = self.num_device_free = self.num_sync_all_streams = 0

    def of(self, small: bool) -> tuple[PoolStatistics, PoolStatistics]:
        """Return the statistics that a block of the small or large pool counts in."""
        return self.all, self.small if small else self.large

    def reset_peaks(self) -> None:
        """Begin every peak anew from what is there now (``resetPeakStats``)."""
        for _, stat in self._stats():
            stat.peak = stat.current

    def reset_totals(self) -> None:
        """Begin the running totals anew (``resetAccumulatedStats``)."""
        for _, stat in self._stats():
            stat.allocated = stat.freed = 0
        for name in _COUNTERS:
            setattr(self, name, 0)

    def as_dict(self, max_split_size: int | None) -> dict[str, int]:
        """Return what ``torch.cuda.memory_stats`` does, in order of name."""
        figures = {
            f"{name}.{part}": getattr(stat, part)
            for name, stat in self._stats()
            for part in Stat.__slots__
        }
        figures |= {name: getattr(self, name) for name in _COUNTERS}
        figures["max_split_size"] = -1 if max_split_size is None else max_split_size
        return dict(sorted(figures.items()))

    def _stats(self) -> Iterator[tuple[str, Stat]]:
        """Yield every figure with its name."""
        pools = {"all": self.all, "small_pool": self.small, "large_pool": self.large}
        for name in NAMES:
            for pool, statistics in pools.items():
                yield f"{name}.{pool}", getattr(statistics, name)
        yield "oversize_allocations", self.oversize_allocations
        yield "oversize_segments", self.oversize_segments
