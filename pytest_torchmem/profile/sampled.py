"""A timeline looked at after some of its events: millions of them, in the time of a few passes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from pytest_torchmem.profile.timeline import Allocation, Timeline


def samples(timeline: Timeline, most: int) -> list[int]:
    """Return at most ``most`` counts of events, in order, at which to look at a timeline.

    They are the largest of as many equal stretches, the peak of each phase, and the end.
    """
    events = len(timeline.events)
    kept = {found[1] for found in timeline.peaks().values()} | {0, events}
    bins = max(1, most - len(kept))
    if events <= bins:
        return list(range(events + 1))
    live = timeline.live()
    for number in range(bins):
        start, stop = number * events // bins + 1, (number + 1) * events // bins + 1
        part = live[start:stop]
        kept.add(start + part.index(max(part)))
    return sorted(kept)


class Alike:
    """The allocations of a timeline that differ in anything: of a long rollout, few."""

    def __init__(self, timeline: Timeline) -> None:
        numbers: dict[Allocation, int] = {}
        of = [numbers.setdefault(one, len(numbers) + 1) for one in timeline.allocations]
        self.distinct: tuple[Allocation, ...] = tuple(numbers)
        self.counts: Counter[int] = Counter(of)
        """How many there are, by number: one more than the place in ``distinct``."""
        self._events = timeline.events
        self._of_event = array("q", [0, *of, *(-number for number in reversed(of))])

    def changes(self, positions: Sequence[int]) -> Iterator[Counter[int]]:
        """Yield how many of each number were made since the position before; minus, freed."""
        done, number = 0, self._of_event.__getitem__
        for position in positions:
            yield Counter(map(number, self._events[done:position]))
            done = position

    def grouped(self, key: Callable[[Allocation], str]) -> tuple[list[str], list[int]]:
        """Return the names of groups, and that of each number, as a place among them."""
        names: dict[str, int] = {}
        groups = [0, *(names.setdefault(key(one), len(names)) for one in self.distinct)]
        return list(names), groups

    def bytes_in_groups(
        self, positions: Sequence[int], groups: Sequence[int], count: int
    ) -> Iterator[list[int]]:
        """Yield the bytes alive at each position, by the group of their number."""
        sizes = [0, *(one.nbytes for one in self.distinct)]
        live = [0] * count
        for changes in self.changes(positions):
            for number, many in changes.items():
                if number > 0:
                    live[groups[number]] += many * sizes[number]
                else:
                    live[groups[-number]] -= many * sizes[-number]
            yield list(live)


def by_kind(found: Allocation) -> str:
    """Return what an allocation is to the step."""
    return found.kind.value
