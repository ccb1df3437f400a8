"""The caching allocator's statistics, as ``torch.cuda.memory_stats`` names them.

c10/core/CachingDeviceAllocator.h, ``DeviceStats``; each is kept for the small pool, the large pool
and both together.
"""

from collections.abc import Iterator
from typing import TypeAlias

_COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


class Stat:
    """One figure: its current value, its peak, and the sums of what was added and taken away."""

    __slots__ = ("_before", "allocated", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = 0
        self._before = 0
        """The value when the sums began."""

    @property
    def freed(self) -> int:
        """The sum of what was taken away."""
        return self._before + self.allocated - self.current

    def increase(self, amount: int) -> None:
        """Add ``amount``."""
        self.current = current = self.current + amount
        self.allocated += amount
        if current > self.peak:
            self.peak = current

    def decrease(self, amount: int) -> None:
        """Take ``amount`` away."""
        self.current -= amount

    def change(self, amount: int) -> None:
        """Add ``amount``, or take it away where it is negative."""
        if amount < 0:
            self.decrease(-amount)
        else:
            self.increase(amount)

    def reset_totals(self) -> None:
        """Begin the sums anew."""
        self.allocated, self._before = 0, self.current


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

    def hand_out(self, size: int, nbytes: int) -> None:
        """Count a block of ``size`` for a request of ``nbytes``."""
        for stat, amount in (
            (self.allocation, 1),
            (self.allocated_bytes, size),
            (self.active, 1),
            (self.active_bytes, size),
            (self.requested_bytes, nbytes),
        ):  # ``Stat.increase``, without five calls for each request of a replay
            stat.allocated += amount
            stat.current = current = stat.current + amount
            if current > stat.peak:
                stat.peak = current

    def free(self, size: int) -> None:
        """Take a block of ``size`` off what is allocated."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size

    def retire(self, size: int, nbytes: int) -> None:
        """Take a block of ``size`` off what is active, with the ``nbytes`` that were asked for."""
        self.active.current -= 1
        self.active_bytes.current -= size
        self.requested_bytes.current -= nbytes


_Counted: TypeAlias = tuple[PoolStatistics, ...]
_PARTS = ("allocated", "current", "freed", "peak")
NAMES = tuple(vars(PoolStatistics()))


class Statistics:
    """All statistics of one device's allocator."""

    def __init__(self) -> None:
        self.all, self.small, self.large = PoolStatistics(), PoolStatistics(), PoolStatistics()
        self.of: tuple[_Counted, _Counted] = ((self.all, self.large), (self.all, self.small))
        """What a block of the large pool counts in, and one of the small: for ``is_small``."""
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.num_alloc_retries = self.num_ooms = 0
        self.num_device_alloc = self.num_device_free = self.num_sync_all_streams = 0

    def reset_peaks(self) -> None:
        """Begin every peak anew from what is there now (``resetPeakStats``)."""
        for _, stat in self._stats():
            stat.peak = stat.current

    def reset_totals(self) -> None:
        """Begin the running totals anew (``resetAccumulatedStats``)."""
        for _, stat in self._stats():
            stat.reset_totals()
        for name in _COUNTERS:
            setattr(self, name, 0)

    def as_dict(self, max_split_size: int | None) -> dict[str, int]:
        """Return what ``torch.cuda.memory_stats`` does, in order of name."""
        figures = {
            f"{name}.{part}": getattr(stat, part) for name, stat in self._stats() for part in _PARTS
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


class NoStatistics(Statistics):
    """For a replay of which nobody asks them: blocks count in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.of = ((), ())
