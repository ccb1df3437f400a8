"""A timeline cut at its operators: what each took and left, and what happened in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_torchmem.profile.operator_calls import OperatorCall
from pytest_torchmem.profile.timeline import Origin, Timeline


class OperatorStep(NamedTuple):
    """One call of an operator, or what happened before the next one; figures are bytes."""

    origin: Origin
    call: OperatorCall | None
    """``None`` for what happened outside of operators."""
    made: tuple[int, ...]
    """The allocations that it left alive, as events number them (index + 1)."""
    temporary: int
    """What it held at its peak beyond what was alive when it returned."""
    peak: int
    """The most that was alive on the device while it ran."""


def operator_steps(timeline: Timeline, calls: Sequence[OperatorCall]) -> Iterator[OperatorStep]:
    """Yield the calls in order, and between them the events that belong to none.

    Every event is in one step, and what is alive when a phase begins counts for its first step: the
    highest ``peak`` of a phase's steps is the phase's own.
    """
    walk = _Walk(timeline)
    for call in calls:
        yield from walk.outside(call.start)
        yield walk.step(call.stop, call.origin, call)
    yield from walk.outside(len(timeline.events))


class _Walk:
    """A walk through the events, and what is alive on the way."""

    def __init__(self, timeline: Timeline) -> None:
        self._events = timeline.events
        self._sizes = [allocation.nbytes for allocation in timeline.allocations]
        self._starts = list(timeline.phases)
        self._next = 0
        """Which phase begins next."""
        self._origin: Origin | None = None
        self._position = 0
        self._live = 0

    def outside(self, stop: int) -> Iterator[OperatorStep]:
        """Go on to where ``stop`` events have happened, in a step for each phase on the way."""
        while self._next < len(self._starts) and self._starts[self._next][0] <= stop:
            start, phase = self._starts[self._next]
            if self._origin is not None and start > self._position:
                yield self.step(start, self._origin)
            self._origin = Origin(phase)
            self._next += 1
            if start >= self._position:
                yield self.step(self._position, self._origin)
        if stop > self._position and self._origin is not None:
            yield self.step(stop, self._origin)

    def step(self, stop: int, origin: Origin, call: OperatorCall | None = None) -> OperatorStep:
        """Go on to where ``stop`` events have happened, in one step."""
        live = peak = self._live
        sizes = self._sizes
        made: dict[int, None] = {}
        for event in self._events[self._position : stop]:
            if event > 0:
                live += sizes[event - 1]
                made[event] = None
                if live > peak:
                    peak = live
            else:
                live -= sizes[-event - 1]
                made.pop(-event, None)
        self._position, self._live = max(stop, self._position), live
        return OperatorStep(origin, call, tuple(made), peak - live, peak)
