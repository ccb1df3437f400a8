"""A static plan: one arena for everything that a step makes and gives back, from its lifetimes.

The lifetimes of a traced step are known, so offsets can be chosen ahead, as static runtimes and
compilers for small devices do. What the caching allocator reserves beyond such an arena is
fragmentation that a plan would save.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tabulate import tabulate

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.timeline import Allocation, Phase, Timeline
from pytest_torchmem.units import format_size

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Of c10's CPU allocator (c10/core/alignment.h, ``gAlignment``) and of cuda's caching allocator
(c10/cuda/CUDACachingAllocator.cpp, ``kMinBlockSize``)."""
_SEARCHED = 2500
"""How many storages, the largest, are placed with a search among all that live beside them."""


class Lifetime(NamedTuple):
    """A storage that is to be placed: alive from event ``start`` until event ``stop``."""

    number: int
    """The number of its allocation in the timeline."""
    nbytes: int
    """Its bytes, rounded up to the alignment."""
    start: int
    stop: int


class Placed(NamedTuple):
    """A storage of the plan: ``nbytes`` bytes of the arena from ``offset`` on."""

    offset: int
    nbytes: int
    start: int
    """How many events there were when it was made, among those of the timeline."""
    stop: int
    """And when it was given back."""
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class StaticPlan:
    """The offsets of an arena; all figures are bytes.

    What was there before the step, and what outlives it, is not in the arena: it is ``outside``.
    """

    storages: tuple[Placed, ...]
    """In the order in which they are made."""
    alignment: int
    strategy: str
    """Which of ``arenas`` the offsets are of: the smallest."""
    arenas: dict[str, int]
    """The size of the arena by strategy: ``"by size"`` places large storages first, each in the
    smallest gap that is free for its whole life; ``"over time"`` places them as they are made, each
    in the smallest gap; ``"no reuse"`` gives each storage bytes of its own."""
    live_peak: int
    """The most that storages of the plan have alive together: no arena is smaller."""
    outside: int
    """What is not in the arena: parameters and whatever else was there before, and what outlives
    the step."""
    reserved_peak: int | None
    """What the caching allocator reserves for all of it (cuda)."""

    @property
    def arena(self) -> int:
        """Return the bytes of the arena."""
        return self.arenas[self.strategy]

    @property
    def planned_peak(self) -> int:
        """Return the arena and what is outside of it."""
        return self.arena + self.outside

    @property
    def overhead(self) -> float:
        """Return by which part the arena is larger than what lives in it at its peak."""
        return self.arena / self.live_peak - 1 if self.live_peak else 0.0

    @property
    def saved(self) -> int | None:
        """Return what the caching allocator reserves beyond the plan; ``None`` for cpu."""
        return None if self.reserved_peak is None else self.reserved_peak - self.planned_peak

    def table(self) -> str:
        """Return the figures as text."""
        rows = [
            ("live at the peak", self.live_peak, ""),
            (f"planned arena ({self.strategy})", self.arena, f"{self.overhead:+.1%}"),
        ]
        rows += [
            (f"arena, {name}", size, f"{size / self.live_peak - 1:+.1%}" if self.live_peak else "")
            for name, size in self.arenas.items()
            if name != self.strategy
        ]
        rows += [("outside of the arena", self.outside, "")]
        if self.reserved_peak is not None:
            more = self.reserved_peak / self.planned_peak - 1 if self.planned_peak else 0.0
            rows += [("arena and outside", self.planned_peak, "")]
            rows += [("reserved by the caching allocator", self.reserved_peak, f"{more:+.1%}")]
        lines = [(name, format_size(size), f"{size:,}", part) for name, size, part in rows]
        return tabulate(lines, ("", "", "bytes", ""), colalign=("left", "right", "right", "right"))

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON: its figures, and a line for each storage."""
        return {
            "alignment": self.alignment,
            "strategy": self.strategy,
            "arena": self.arena,
            "arenas": dict(self.arenas),
            "live_peak": self.live_peak,
            "outside": self.outside,
            "reserved_peak": self.reserved_peak,
            "storages": [
                {
                    "offset": one.offset,
                    "nbytes": one.nbytes,
                    "start": one.start,
                    "stop": one.stop,
                    "kind": one.allocation.kind.value,
                    "module": one.allocation.origin.module,
                    "operator": one.allocation.origin.operator,
                    "line": one.allocation.origin.line,
                    "shape": list(one.allocation.shape),
                    "dtype": one.allocation.dtype,
                }
                for one in self.storages
            ],
        }


def plan_of(
    timeline: Timeline, alignment: int, reserved_peak: int | None = None, outputs: bool = False
) -> StaticPlan:
    """Return the plan of what a timeline makes after its baseline and gives back.

    ``alignment`` is that of offsets and sizes in bytes, ``reserved_peak`` what it is compared with,
    and with ``outputs`` what outlives the timeline is in the arena too. Raises ``UsageError`` for
    an alignment that is no power of two.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise UsageError(f"alignment={alignment!r}: expected a power of two")
    lifetimes = list(_lifetimes(timeline, alignment, outputs))
    planned = {one.number for one in lifetimes}
    born_before = _baseline_end(timeline)
    last = len(timeline.events)
    outside = sum(
        timeline.allocations[index - 1].nbytes
        for index in _outside(timeline, born_before)
        if index not in planned
    )
    strategies: dict[str, Callable[[Sequence[Lifetime]], dict[int, int]]] = {
        "by size": _by_size,
        "over time": _over_time,
        "no reuse": _no_reuse,
    }
    offsets = {name: place(lifetimes) for name, place in strategies.items()}
    arenas = {name: _arena(lifetimes, found) for name, found in offsets.items()}
    strategy = min(arenas, key=arenas.__getitem__)
    storages = tuple(
        Placed(
            offsets[strategy][one.number],
            one.nbytes,
            one.start,
            min(one.stop, last),
            timeline.allocations[one.number - 1],
        )
        for one in lifetimes
    )
    live_peak = _live_peak(lifetimes)
    return StaticPlan(storages, alignment, strategy, arenas, live_peak, outside, reserved_peak)


def _baseline_end(timeline: Timeline) -> int:
    """Return how many events there were when the step began."""
    for start, phase in timeline.phases:
        if phase is not Phase.BASELINE:
            return start
    return len(timeline.events) if timeline.phases else 0


def _lifetimes(timeline: Timeline, alignment: int, outputs: bool) -> Iterator[Lifetime]:
    """Yield what is to be planned, in the order in which it is made."""
    begin, last = _baseline_end(timeline), len(timeline.events)
    deaths = {-event: place for place, event in enumerate(timeline.events) if event < 0}
    for place, event in enumerate(timeline.events):
        if event < 0 or place < begin:
            continue
        nbytes = timeline.allocations[event - 1].nbytes
        stop = deaths.get(event, last + 1)
        if nbytes and (outputs or stop <= last):
            yield Lifetime(event, -(-nbytes // alignment) * alignment, place, stop)


def _outside(timeline: Timeline, begin: int) -> Iterator[int]:
    """Yield what was there before the step, or is there after it."""
    alive: set[int] = set()
    for place, event in enumerate(timeline.events):
        if event < 0:
            alive.discard(-event)
        else:
            alive.add(event)
            if place < begin:
                yield event
    early = set(timeline.events[:begin])
    yield from (index for index in alive if index not in early)


def _arena(lifetimes: Sequence[Lifetime], offsets: dict[int, int]) -> int:
    return max((offsets[one.number] + one.nbytes for one in lifetimes), default=0)


def _live_peak(lifetimes: Sequence[Lifetime]) -> int:
    changes = sorted(
        [(one.start, one.nbytes) for one in lifetimes]
        + [(one.stop, -one.nbytes) for one in lifetimes]
    )
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def _no_reuse(lifetimes: Sequence[Lifetime]) -> dict[int, int]:
    """Give each storage bytes of its own."""
    offsets, top = {}, 0
    for one in lifetimes:
        offsets[one.number] = top
        top += one.nbytes
    return offsets


def _over_time(lifetimes: Sequence[Lifetime]) -> dict[int, int]:
    """Place storages as they are made, in the smallest gap of what is alive then."""
    offsets: dict[int, int] = {}
    space = _Space()
    sizes = {one.number: one.nbytes for one in lifetimes}
    changes = [(one.start, one.number) for one in lifetimes]
    changes += [(one.stop, -one.number) for one in lifetimes]
    for _, index in sorted(changes):  # no two events are at one place
        if index > 0:
            offsets[index] = space.take(sizes[index])
        else:
            space.give_back(offsets[-index], sizes[-index])
    return offsets


class _Space:
    """The gaps below the top of an arena that grows."""

    def __init__(self) -> None:
        self._gaps: list[tuple[int, int]] = []
        """Size and offset, sorted."""
        self._begin: dict[int, int] = {}
        """The size of gaps by their offset."""
        self._end: dict[int, int] = {}
        """The offset of gaps by their end."""
        self._top = 0

    def take(self, nbytes: int) -> int:
        """Return the offset of the smallest gap that is large enough; grow where there is none."""
        place = bisect_left(self._gaps, (nbytes, -1))
        if place < len(self._gaps):
            size, offset = self._gaps[place]
            self._remove(size, offset)
            if size > nbytes:
                self._add(size - nbytes, offset + nbytes)
            return offset
        offset = self._end.get(self._top, self._top)
        if offset < self._top:
            self._remove(self._top - offset, offset)
        self._top = offset + nbytes
        return offset

    def give_back(self, offset: int, nbytes: int) -> None:
        """Make a gap, and one with its neighbours."""
        before = self._end.get(offset)
        if before is not None:
            self._remove(offset - before, before)
            nbytes, offset = nbytes + offset - before, before
        after = self._begin.get(offset + nbytes)
        if after is not None:
            self._remove(after, offset + nbytes)
            nbytes += after
        self._add(nbytes, offset)

    def _add(self, size: int, offset: int) -> None:
        insort(self._gaps, (size, offset))
        self._begin[offset] = size
        self._end[offset + size] = offset

    def _remove(self, size: int, offset: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, offset))]
        del self._begin[offset]
        del self._end[offset + size]


def _by_size(lifetimes: Sequence[Lifetime]) -> dict[int, int]:
    """Place storages from the largest on, each in the smallest gap of those it lives beside.

    Of many, the small ones are placed over time, above the others. Of several orders the best one
    is taken: by size, and by size and life together.
    """
    by_size = sorted(lifetimes, key=lambda one: (-one.nbytes, one.start - one.stop, one.start))
    large, small = by_size[:_SEARCHED], by_size[_SEARCHED:]
    bound = _live_peak(large)
    offsets = _searched(large)
    for order in (_longest, _largest_area):
        if _arena(large, offsets) == bound:
            break
        other = _searched(sorted(large, key=order))
        if _arena(large, other) < _arena(large, offsets):
            offsets = other
    top = _arena(large, offsets)
    above = _over_time(sorted(small, key=lambda one: one.start))
    return offsets | {index: top + offset for index, offset in above.items()}


def _longest(one: Lifetime) -> tuple[int, int]:
    return one.start - one.stop, -one.nbytes


def _largest_area(one: Lifetime) -> tuple[int, int]:
    return -(one.stop - one.start) * one.nbytes, -one.nbytes


def _searched(ordered: Sequence[Lifetime]) -> dict[int, int]:
    """Place storages in their order, each in the smallest gap that is free for its whole life."""
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, int, int]] = []
    """Offset, end, start and stop, by offset."""
    for number, nbytes, start, stop in ordered:
        top, best, found = 0, 0, -1
        for offset, end, other_start, other_stop in placed:
            if other_start >= stop or other_stop <= start:
                continue
            gap = offset - top
            if gap >= nbytes and (found < 0 or gap < best):
                best, found = gap, top
            if end > top:
                top = end
        if found < 0:
            found = top
        offsets[number] = found
        insort(placed, (found, found + nbytes, start, stop))
    return offsets
