"""The course of a step's memory in a few numbers: what a snapshot keeps of a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from pytest_torchmem.profile.timeline import Timeline

POINTS = 96
"""Numbers of an outline, over all of its stretches."""
_MOST_STRETCHES = 12
"""Changes of phase beyond which a step is one stretch."""
FULL = 1000
"""What stands for the largest bytes of the step: shares are per mille of it."""


class Stretch(NamedTuple):
    """One time in a phase."""

    phase: str
    """"" for a step with too many phases to tell them apart."""
    events: int
    """How many allocations and frees there were."""
    shares: tuple[int, ...]
    """The largest bytes alive in each of as many equal parts, per mille of the step's largest."""


Outline = tuple[Stretch, ...]


def outline_of(timeline: Timeline, points: int = POINTS) -> Outline:
    """Return the outline of a timeline in about as many ``points``."""
    sizes = [0, *(allocation.nbytes for allocation in timeline.allocations)]
    steps = (sizes[event] if event > 0 else -sizes[-event] for event in timeline.events)
    live = [0, *accumulate(steps)]
    peak = max(live)
    spans = [span for span in timeline.spans() if span[1] > span[0]]
    if not spans or peak <= 0:
        return ()
    parts = [(start, stop, phase.value) for start, stop, phase in spans]
    if len(parts) > _MOST_STRETCHES:
        parts = [(0, len(timeline.events), "")]
    return tuple(
        Stretch(
            phase,
            stop - start,
            tuple(
                -(-FULL * max(live[first : last + 1]) // peak)
                for first, last in _equal(start, stop, points * (stop - start) // len(live))
            ),
        )
        for start, stop, phase in parts
    )


def bytes_along(
    outline: Outline, peak: int, timeline: Timeline, positions: Sequence[int]
) -> list[int]:
    """Return the bytes of another step's ``outline`` at positions of a timeline.

    Where both have the same phases, each is stretched over its own; else the whole over the whole.
    """
    spans = [(start, stop, p.value) for start, stop, p in timeline.spans() if stop > start]
    if [one.phase for one in outline] == [phase for _, _, phase in spans]:
        places = [(start, stop) for start, stop, _ in spans]
    else:
        shares = tuple(share for one in outline for share in one.shares)
        outline = (Stretch("", 0, shares),)
        places = [(0, len(timeline.events))]
    found, number = [], 0
    for position in positions:
        while number + 1 < len(places) and position > places[number][1]:
            number += 1
        (start, stop), shares = places[number], outline[number].shares
        at = (position - start) * len(shares) // max(stop - start, 1)
        found.append(shares[min(max(at, 0), len(shares) - 1)] * peak // FULL)
    return found


def _equal(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield where equal parts of a stretch of events start and stop, at most one for each event."""
    parts = min(max(parts, 2), stop - start)
    for number in range(parts):
        length = stop - start
        yield start + number * length // parts, start + (number + 1) * length // parts
