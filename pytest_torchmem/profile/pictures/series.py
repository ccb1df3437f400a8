"""A timeline as the few hundred points that a picture has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pytest_torchmem.profile.sampled import Alike
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


def stacked(
    alike: Alike, positions: Sequence[int], key: Callable[[Allocation], str], most: int
) -> Stack:
    """Return the bytes alive after so many events each, in at most ``most`` groups by ``key``."""
    names, groups = alike.grouped(key)
    columns = list(alike.bytes_in_groups(positions, groups, len(names)))
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
    """Return the operator that made it, or what it is where none did."""
    return found.origin.operator or f"({found.kind.value})"


def by_module_of(depth: int) -> Callable[[Allocation], str]:
    """Return the key that tells modules apart by the first ``depth`` parts of their path."""

    def by_module(found: Allocation) -> str:
        return ".".join(found.origin.module.split(".")[:depth]) or NO_MODULE

    return by_module


def module_depth(allocations: Iterable[Allocation], most: int) -> int:
    """Return how many parts of module paths tell apart at most ``most`` modules, at least 1."""
    paths = {tuple(found.origin.module.split(".")) for found in allocations}
    deepest = max(map(len, paths), default=1)
    fits = [
        depth for depth in range(1, deepest + 1) if len({path[:depth] for path in paths}) <= most
    ]
    return max(fits, default=1)


def phases(timeline: Timeline) -> list[tuple[int, int, Phase]]:
    """Return where each time in a phase starts and stops, without those in which nothing was."""
    return [span for span in timeline.spans() if span[1] > span[0]]
