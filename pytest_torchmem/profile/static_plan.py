"""A static plan: one arena for everything that a step makes and gives back, from its lifetimes.

The lifetimes of a traced step are known, so offsets can be chosen ahead, as static runtimes and
compilers for small devices do. What the caching allocator reserves beyond such an arena is
fragmentation that a plan would save.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest, nsmallest
from itertools import accumulate, islice
from operator import add, neg
from typing import Any, NamedTuple

from tabulate import tabulate

from pytest_torchmem.errors import UsageError
from pytest_torchmem.printable import Tabular
from pytest_torchmem.profile.timeline import (
    Allocation,
    ComputedLater,
    Later,
    Phase,
    Timeline,
    without_collections,
)
from pytest_torchmem.units import format_size

ALIGNMENT = {"cpu": 64, "cuda": 512}
"""Of c10's CPU allocator (c10/core/alignment.h, ``gAlignment``) and of cuda's caching allocator
(c10/cuda/CUDACachingAllocator.cpp, ``kMinBlockSize``)."""
_BITS = 56
_OFFSET = (1 << _BITS) - 1
"""What a gap's offset takes of the number that it is sorted by: an arena has fewer bytes."""
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
class _Lives:
    """The storages that are to be placed, by the numbers of their allocations from 1 on."""

    numbers: array[int]
    """Those that are, in the order in which they are made."""
    sizes: array[int]
    """Bytes, rounded up to the alignment; 0 for what is not placed."""
    starts: array[int]
    stops: array[int]
    """Events until which they are alive; one more than there are for what outlives them all."""
    outside: int
    """The bytes of what was there before the step, or is there after it, and is not placed."""

    def of(self, number: int) -> Lifetime:
        return Lifetime(number, self.sizes[number], self.starts[number], self.stops[number])

    def changes(self) -> array[int]:
        """Return the bytes that each event changes what is placed by, with the event as index."""
        sizes = self.sizes
        return sizes + array("q", map(neg, islice(reversed(sizes), len(sizes) - 1)))

    def largest(self, most: int) -> list[Lifetime]:
        numbers, sizes = self.numbers, self.sizes
        limit = nlargest(most, sizes)[-1] if len(numbers) > most else 0
        found = map(self.of, (number for number in numbers if sizes[number] >= limit))
        return nsmallest(most, found, lambda one: (-one.nbytes, one.start - one.stop, one.start))


def _placed(lives: _Lives, offsets: Sequence[int], timeline: Timeline) -> tuple[Placed, ...]:
    end, allocations = len(timeline.events), timeline.allocations
    return tuple(
        Placed(
            offsets[number],
            lives.sizes[number],
            lives.starts[number],
            min(lives.stops[number], end),
            allocations[number - 1],
        )
        for number in lives.numbers
    )


@dataclass(frozen=True, slots=True)
class StaticPlan(ComputedLater, Tabular):
    """The offsets of an arena; all figures are bytes.

    What was there before the step, and what outlives it, is not in the arena: it is ``outside``.
    """

    storages: Sequence[Placed]
    """In the order of making. There may be millions: they are made when they are asked for."""
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
    """What is not in the arena: what was there before the step, and what outlives it."""
    reserved_peak: int | None
    """What the caching allocator reserves for all of it (cuda)."""
    _later: dict[str, Later] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._put_off("storages")

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
        own = ("alignment", "strategy", "arena", "arenas", "live_peak", "outside", "reserved_peak")
        return {
            **{name: getattr(self, name) for name in own},
            "storages": [
                {
                    **dict(zip(Placed._fields[:4], one[:4], strict=True)),
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
    """Return ``MemoryProfile.plan``, and ``reserved_peak`` with it to be compared."""
    if alignment < 1 or alignment & (alignment - 1):
        raise UsageError(f"alignment={alignment!r}: expected a power of two")
    with without_collections():
        lives, events = _lives(timeline, alignment, outputs), timeline.events
        changes, sizes = lives.changes(), lives.sizes
        live_peak = max(accumulate(map(changes.__getitem__, events)), default=0)
        offsets = {
            "by size": _by_size(lives, events),
            "over time": _over_time(events, changes),
            "no reuse": array("q", islice(accumulate(sizes, initial=0), len(sizes))),
        }
        arenas = {name: max(map(add, found, sizes), default=0) for name, found in offsets.items()}
        strategy = min(arenas, key=arenas.__getitem__)
        storages: Any = Later(partial(_placed, lives, offsets[strategy], timeline))
        return StaticPlan(
            storages, alignment, strategy, arenas, live_peak, lives.outside, reserved_peak
        )


def _numbers(count: int) -> array[int]:
    """Return so many zeros, which are integers of 8 bytes each, not objects."""
    return array("q", bytes(8 * count))


def _lives(timeline: Timeline, alignment: int, outputs: bool) -> _Lives:
    events, bytes_of, last = timeline.events, timeline.changes(), len(timeline.events)
    steps = (start for start, phase in timeline.phases if phase is not Phase.BASELINE)
    begin = next(steps, last if timeline.phases else 0)
    count = len(timeline.allocations) + 1
    sizes, starts, stops = _numbers(count), _numbers(count), array("q", [last + 1]) * count
    for place, event in enumerate(events):
        if event < 0:
            stops[-event] = place
        else:
            starts[event] = place
    outside = sum(bytes_of[event] for event in events[:begin] if event > 0)
    numbers = array("q")
    for event in islice(events, begin, None):
        if event > 0:
            nbytes = bytes_of[event]
            if stops[event] > last and not outputs:
                outside += nbytes
            elif nbytes:
                sizes[event] = -(-nbytes // alignment) * alignment
                numbers.append(event)
    return _Lives(numbers, sizes, starts, stops, outside)


def _over_time(events: Iterable[int], changes: Sequence[int]) -> array[int]:
    """Return the offsets of storages that are placed as they are made, each in the smallest gap of
    what is alive then. The arena grows where there is none.

    ``changes`` are the bytes by which each event changes what is alive, 0 for what is not placed.
    """
    offsets = _numbers(len(changes) // 2 + 1)
    gaps: list[int] = []  # size and then offset, each in a number, sorted
    begins: dict[int, int] = {}  # the size of gaps by their offset
    ends: dict[int, int] = {}  # the offset of gaps by their end
    top, none = 0, None
    for event in events:
        nbytes = changes[event]
        if nbytes > 0:
            place = bisect_left(gaps, nbytes << _BITS)
            if place < len(gaps):
                gap = gaps.pop(place)
                offset = gap & _OFFSET
                size = begins.pop(offset)
                if size == nbytes:
                    del ends[offset + size]
                else:
                    rest = offset + nbytes
                    begins[rest] = size = size - nbytes
                    ends[rest + size] = rest
                    insort(gaps, size << _BITS | rest)
            else:  # at the end, from the last gap on if that is there
                offset = ends.pop(top, top)
                if offset < top:
                    del gaps[bisect_left(gaps, begins.pop(offset) << _BITS | offset)]
                top = offset + nbytes
            offsets[event] = offset
        elif nbytes:
            offset, nbytes = offsets[-event], -nbytes
            end = offset + nbytes
            before, after = ends.pop(offset, none), begins.pop(end, none)
            if before is not none:
                size = begins[before]
                del gaps[bisect_left(gaps, size << _BITS | before)]
                nbytes, offset = nbytes + size, before
            if after is not none:
                del gaps[bisect_left(gaps, after << _BITS | end)]
                nbytes += after
                end += after
            begins[offset] = nbytes
            ends[end] = offset
            insort(gaps, nbytes << _BITS | offset)
    return offsets


def _by_size(lives: _Lives, events: Iterable[int]) -> array[int]:
    """Place storages from the largest on, each in the smallest gap of those it lives beside.

    Of many, the small ones are placed over time, above the others. Of several orders the best one
    is taken: by size, and by size and life together.
    """
    large = lives.largest(_SEARCHED)
    found = _searched(large)
    top = _top(large, found)
    both = [(one.start, one.nbytes) for one in large] + [(one.stop, -one.nbytes) for one in large]
    bound = max(accumulate(nbytes for _, nbytes in sorted(both)), default=0)  # alive together
    for order in _ORDERS:
        if top == bound:
            break
        other = _searched(sorted(large, key=order))
        if _top(large, other) < top:
            found, top = other, _top(large, other)
    offsets = _numbers(len(lives.sizes))
    if len(large) < len(lives.numbers):
        changes = lives.changes()
        for one in large:
            changes[one.number] = changes[-one.number] = 0
        above = _over_time(events, changes)
        offsets = array("q", map(top.__add__, above))
    for number, offset in found.items():
        offsets[number] = offset
    return offsets


def _top(placed: Iterable[Lifetime], offsets: Mapping[int, int]) -> int:
    return max((offsets[one.number] + one.nbytes for one in placed), default=0)


_ORDERS: tuple[Callable[[Lifetime], tuple[int, int]], ...] = (
    lambda one: (one.start - one.stop, -one.nbytes),  # the longest life first
    lambda one: ((one.start - one.stop) * one.nbytes, -one.nbytes),  # bytes times life
)


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
