"""A timeline as the few hundred points that a picture has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_torchmem.profile.timeline import Allocation, Phase, Timeline

OTHER = "(other)"
NO_MODULE = "(no module)"


@dataclass(frozen=True, slots=True)
class Stack:
    """The bytes alive at each sample, in groups whose sums are the totals."""

    names: tuple[str, ...]
    """The groups, the one that is largest at any sample first; what is small is together."""
    series: tuple[tuple[int, ...], ...]
    """By group and sample."""


def samples(timeline: Timeline, most: int) -> list[int]:
    """Return at most ``most`` counts of events, in order, at which to look at a timeline.

    They are the largest of as many equal stretches, the peak of each phase, and the end.
    """
    live = [0, *timeline.live_bytes()]
    events = len(timeline.events)
    kept = {found[1] for found in timeline.peaks().values()} | {0, events}
    bins = max(1, most - len(kept))
    if events <= bins:
        return list(range(events + 1))
    for number in range(bins):
        start, stop = number * events // bins + 1, (number + 1) * events // bins + 1
        kept.add(max(range(start, stop), key=live.__getitem__))
    return sorted(kept)


def stacked(
    timeline: Timeline, positions: Sequence[int], key: Callable[[Allocation], str], most: int
) -> Stack:
    """Return the bytes alive after so many events each, in at most ``most`` groups by ``key``."""
    names: dict[str, int] = {}
    group_of = [names.setdefault(key(found), len(names)) for found in timeline.allocations]
    live = [0] * len(names)
    columns: list[list[int]] = []
    done = 0
    for position in positions:
        for event in timeline.events[done:position]:
            index = abs(event) - 1
            nbytes = timeline.allocations[index].nbytes
            live[group_of[index]] += nbytes if event > 0 else -nbytes
        done = position
        columns.append(list(live))
    series = {name: [column[number] for column in columns] for name, number in names.items()}
    by_size = sorted(names, key=lambda name: (-max(series[name], default=0), name))
    by_size = [name for name in by_size if any(series[name])]
    if len(by_size) > most:
        rest = by_size[most - 1 :]
        by_size = by_size[: most - 1]
        series[OTHER] = [sum(parts) for parts in zip(*(series[n] for n in rest), strict=True)]
        by_size.append(OTHER)
    return Stack(tuple(by_size), tuple(tuple(series[name]) for name in by_size))


def by_kind(found: Allocation) -> str:
    """Return what an allocation is to the step."""
    return found.kind.value


def by_operator(found: Allocation) -> str:
    """Return the operator that made it, or what it is where none did."""
    return found.origin.operator or f"({found.kind.value})"


def by_module_of(depth: int) -> Callable[[Allocation], str]:
    """Return the key that tells modules apart by the first ``depth`` parts of their path."""

    def by_module(found: Allocation) -> str:
        return ".".join(found.origin.module.split(".")[:depth]) or NO_MODULE

    return by_module


def module_depth(timeline: Timeline, most: int) -> int:
    """Return how many parts of module paths tell apart at most ``most`` modules, at least 1."""
    paths = {tuple(found.origin.module.split(".")) for found in timeline.allocations}
    deepest = max(map(len, paths), default=1)
    fits = [
        depth for depth in range(1, deepest + 1) if len({path[:depth] for path in paths}) <= most
    ]
    return max(fits, default=1)


def phases(timeline: Timeline) -> list[tuple[int, int, Phase]]:
    """Return where each time in a phase starts and stops, without those in which nothing was."""
    return [span for span in timeline.spans() if span[1] > span[0]]
