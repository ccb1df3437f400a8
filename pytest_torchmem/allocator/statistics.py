"""The caching allocator's statistics, as ``torch.cuda.memory_stats`` names them.

c10/core/CachingDeviceAllocator.h, ``DeviceStats``; each is kept for the small pool, the large pool
and both together.
"""

from __future__ import annotations

from collections.abc import Iterator

NAMES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
POOLS = ("all", "small_pool", "large_pool")


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

    def items(self) -> Iterator[tuple[str, int]]:
        """Yield the figure's parts by the names of ``memory_stats``."""
        yield "current", self.current
        yield "peak", self.peak
        yield "allocated", self.allocated
        yield "freed", self.freed


class PoolStatistics:
    """The statistics of one pool, or of both."""

    __slots__ = NAMES

    allocation: Stat
    segment: Stat
    active: Stat
    inactive_split: Stat
    allocated_bytes: Stat
    reserved_bytes: Stat
    active_bytes: Stat
    inactive_split_bytes: Stat
    requested_bytes: Stat

    def __init__(self) -> None:
        for name in NAMES:
            setattr(self, name, Stat())

    def stats(self) -> Iterator[tuple[str, Stat]]:
        """Yield every figure with its name."""
        for name in NAMES:
            yield name, getattr(self, name)


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
        for stat in self._every():
            stat.peak = stat.current

    def reset_totals(self) -> None:
        """Begin the running totals anew (``resetAccumulatedStats``)."""
        for stat in self._every():
            stat.allocated = stat.freed = 0
        self.num_alloc_retries = self.num_ooms = 0
        self.num_device_alloc = self.num_device_free = self.num_sync_all_streams = 0

    def as_dict(self, max_split_size: int | None) -> dict[str, int]:
        """Return what ``torch.cuda.memory_stats`` does, in order of name."""
        figures = {
            f"{name}.{pool}.{part}": value
            for pool, statistics in zip(POOLS, (self.all, self.small, self.large), strict=True)
            for name, stat in statistics.stats()
            for part, value in stat.items()
        }
        for name in ("oversize_allocations", "oversize_segments"):
            for part, value in getattr(self, name).items():
                figures[f"{name}.{part}"] = value
        for name in (
            "num_alloc_retries",
            "num_ooms",
            "num_sync_all_streams",
            "num_device_alloc",
            "num_device_free",
        ):
            figures[name] = getattr(self, name)
        figures["max_split_size"] = -1 if max_split_size is None else max_split_size
        return dict(sorted(figures.items()))

    def _every(self) -> Iterator[Stat]:
        for statistics in (self.all, self.small, self.large):
            for _, stat in statistics.stats():
                yield stat
        yield self.oversize_allocations
        yield self.oversize_segments
