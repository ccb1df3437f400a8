"""A static plan: one arena for everything that a step makes and gives back, from its lifetimes.

The lifetimes of a traced step are known, so offsets can be chosen ahead, as static runtimes and
compilers for small devices do. What the caching allocator reserves beyond such an arena is
fragmentation that a plan would save.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import accumulate, islice
from operator import add
from typing import Any, NamedTuple

from tabulate import tabulate

from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.garbage import without_collections
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
    with without_collections():
        return _plan_of(timeline, alignment, reserved_peak, outputs)


def _plan_of(
    timeline: Timeline, alignment: int, reserved_peak: int | None, outputs: bool
) -> StaticPlan:
    lifetimes = list(_lifetimes(timeline, alignment, outputs))
    sizes = _numbers(len(timeline.allocations) + 1)
    for one in lifetimes:
        sizes[one.number] = one.nbytes
    outside = sum(
        timeline.allocations[index - 1].nbytes
        for index in _outside(timeline, _baseline_end(timeline))
        if not sizes[index]
    )
    events = array("q", [event for event in timeline.events if sizes[abs(event)]])
    offsets = {
        "by size": _by_size(lifetimes, events, sizes),
        "over time": _over_time(events, sizes),
        "no reuse": _no_reuse(sizes),
    }
    arenas = {name: _arena(found, sizes) for name, found in offsets.items()}
    strategy = min(arenas, key=arenas.__getitem__)
    placed, last, allocations = offsets[strategy], len(timeline.events), timeline.allocations
    storages = tuple(
        Placed(
            placed[number], nbytes, start, stop if stop < last else last, allocations[number - 1]
        )
        for number, nbytes, start, stop in lifetimes
    )
    live_peak = _live_peak(events, sizes)
    return StaticPlan(storages, alignment, strategy, arenas, live_peak, outside, reserved_peak)


def _numbers(count: int) -> array[int]:
    """Return so many zeros, which are integers of 8 bytes each, not objects."""
    return array("q", bytes(8 * count))


def _baseline_end(timeline: Timeline) -> int:
    """Return how many events there were when the step began."""
    for start, phase in timeline.phases:
        if phase is not Phase.BASELINE:
            return start
    return len(timeline.events) if timeline.phases else 0


def _lifetimes(timeline: Timeline, alignment: int, outputs: bool) -> Iterator[Lifetime]:
    """Yield what is to be planned, in the order in which it is made."""
    begin, last = _baseline_end(timeline), len(timeline.events)
    deaths = array("q", [last + 1]) * (len(timeline.allocations) + 1)
    for place, event in enumerate(timeline.events):
        if event < 0:
            deaths[-event] = place
    for place, event in enumerate(timeline.events):
        if event < 0 or place < begin:
            continue
        nbytes, stop = timeline.allocations[event - 1].nbytes, deaths[event]
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


def _arena(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    return max(map(add, offsets, sizes), default=0)


def _live_peak(events: Iterable[int], sizes: Sequence[int]) -> int:
    changes = (sizes[event] if event > 0 else -sizes[-event] for event in events)
    return max(accumulate(changes), default=0)


def _no_reuse(sizes: Sequence[int]) -> Sequence[int]:
    """Give each storage bytes of its own."""
    return array("q", islice(accumulate(sizes, initial=0), len(sizes)))


def _over_time(events: Iterable[int], sizes: Sequence[int]) -> array[int]:
    """Return the offsets of storages that are placed as they are made, each in the smallest gap of
    what is alive then. The arena grows where there is none.
    """
    offsets = _numbers(len(sizes))
    gaps: list[tuple[int, int]] = []  # size and offset, sorted
    begins: dict[int, int] = {}  # the size of gaps by their offset
    ends: dict[int, int] = {}  # the offset of gaps by their end
    top = 0
    for event in events:
        if event > 0:
            nbytes = sizes[event]
            place = bisect_left(gaps, (nbytes,))
            if place < len(gaps):
                size, offset = gaps.pop(place)
                del begins[offset]
                if size == nbytes:
                    del ends[offset + size]
                else:
                    rest = offset + nbytes
                    begins[rest] = size - nbytes
                    ends[offset + size] = rest
                    insort(gaps, (size - nbytes, rest))
            else:  # at the end, from the last gap on if that is there
                offset = ends.pop(top, top)
                if offset < top:
                    del gaps[bisect_left(gaps, (begins.pop(offset), offset))]
                top = offset + nbytes
            offsets[event] = offset
            continue
        offset, nbytes = offsets[-event], sizes[-event]
        before = ends.pop(offset, None)
        if before is not None:
            size = begins.pop(before)
            del gaps[bisect_left(gaps, (size, before))]
            nbytes, offset = nbytes + size, before
        after = begins.pop(offset + nbytes, None)
        if after is not None:
            del gaps[bisect_left(gaps, (after, offset + nbytes))]
            nbytes += after
        begins[offset] = nbytes
        ends[offset + nbytes] = offset
        insort(gaps, (nbytes, offset))
    return offsets


def _by_size(
    lifetimes: Sequence[Lifetime], events: Sequence[int], sizes: Sequence[int]
) -> array[int]:
    """Place storages from the largest on, each in the smallest gap of those it lives beside.

    Of many, the small ones are placed over time, above the others. Of several orders the best one
    is taken: by size, and by size and life together.
    """
    large = nsmallest(_SEARCHED, lifetimes, key=_largest)
    are_large = bytearray(len(sizes))
    for one in large:
        are_large[one.number] = 1
    bound = _live_peak((event for event in events if are_large[abs(event)]), sizes)
    found = _searched(large)
    top = _top(large, found)
    for order in (_longest, _largest_area):
        if top == bound:
            break
        other = _searched(sorted(large, key=order))
        if _top(large, other) < top:
            found, top = other, _top(large, other)
    offsets = _numbers(len(sizes))
    if len(large) < len(lifetimes):
        above = _over_time([event for event in events if not are_large[abs(event)]], sizes)
        for number, nbytes in enumerate(sizes):
            if nbytes:
                offsets[number] = top + above[number]
    for number, offset in found.items():
        offsets[number] = offset
    return offsets


def _top(placed: Iterable[Lifetime], offsets: Mapping[int, int]) -> int:
    return max((offsets[one.number] + one.nbytes for one in placed), default=0)


def _largest(one: Lifetime) -> tuple[int, int, int]:
    return -one.nbytes, one.start - one.stop, one.start


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
