"""A timeline in few points: samples of its events, series for pictures, a line of characters."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_torchmem.profile.timeline import Allocation, AllocationKey, Timeline, equal_parts


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
    for start, stop in equal_parts(1, events + 1, bins):
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

    def grouped(
        self, key: AllocationKey, positions: Sequence[int]
    ) -> tuple[list[str], Iterator[list[int]]]:
        """Return the names of groups, and the bytes alive in each of them at each position."""
        names: dict[str, int] = {}
        groups = [names.setdefault(key(one), len(names)) for one in self.distinct]
        live = [0] * len(names)

        def alive(changes: Counter[int]) -> list[int]:
            for number, many in changes.items():
                place = abs(number) - 1
                nbytes = many * self.distinct[place].nbytes
                live[groups[place]] += nbytes if number > 0 else -nbytes
            return list(live)

        return list(names), map(alive, self.changes(positions))


def by_kind(found: Allocation) -> str:
    return found.kind.value


OTHER = "(other)"
NO_MODULE = "(no module)"


@dataclass(frozen=True, slots=True)
class Stack:
    """The bytes alive at each sample, in groups whose sums are the totals."""

    names: tuple[str, ...]
    """The groups, the one that is largest at any sample first; what is small is together."""
    series: tuple[tuple[int, ...], ...]
    """By group and sample."""


def stacked(alike: Alike, positions: Sequence[int], key: AllocationKey, most: int) -> Stack:
    """Return the bytes alive after so many events each, in at most ``most`` groups by ``key``."""
    names, alive = alike.grouped(key, positions)
    columns = list(alive)
    series = {name: [column[number] for column in columns] for number, name in enumerate(names)}
    by_size = sorted(names, key=lambda name: (-max(series[name], default=0), name))
    by_size = [name for name in by_size if any(series[name])]
    if len(by_size) > most:
        rest = by_size[most - 1 :]
        by_size = by_size[: most - 1]
        series[OTHER] = [sum(parts) for parts in zip(*(series[n] for n in rest), strict=True)]
        by_size.append(OTHER)
    return Stack(tuple(by_size), tuple(tuple(series[name]) for name in by_size))


def by_operator(found: Allocation) -> str:
    """Return the operator that made an allocation, or its kind where no operator did."""
    return found.origin.operator or f"({found.kind.value})"


def by_module_of(depth: int) -> AllocationKey:
    """Return the key that tells modules apart by the first ``depth`` parts of their path."""

    def by_module(found: Allocation) -> str:
        return ".".join(found.origin.module.split(".")[:depth]) or NO_MODULE

    return by_module


def module_depth(allocations: Iterable[Allocation], most: int) -> int:
    """Return how many parts of module paths tell apart at most ``most`` modules, at least 1."""
    paths = {tuple(found.origin.module.split(".")) for found in allocations}
    deepest = max(map(len, paths), default=1)
    depths = range(1, deepest + 1)
    fits = [depth for depth in depths if len({path[:depth] for path in paths}) <= most]
    return max(fits, default=1)


_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(timeline: Timeline, width: int = 40) -> str:
    """Return the largest bytes alive in each of ``width`` equal stretches, from 0 to the peak."""
    live = timeline.live()[1:]
    peak, width = max(live, default=0), min(width, len(live))
    if peak <= 0:
        return ""
    highest = (max(live[start:stop]) for start, stop in equal_parts(0, len(live), width))
    return "".join(_LEVELS[min(7, 8 * nbytes // peak)] for nbytes in highest)
