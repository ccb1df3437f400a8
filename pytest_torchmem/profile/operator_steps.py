"""A timeline cut at its operators: what each took and left, and what happened in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pytest_torchmem.profile.operator_calls import OperatorCall
from pytest_torchmem.profile.timeline import Origin, Phase, Timeline


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

    What is alive when a phase begins counts for its first step: the highest ``peak`` of a phase's
    steps is the phase's own. Where all that happens between two of them is that storages are freed,
    there is no step: nothing is needed for it.
    """
    walk = _Walk(timeline)
    for call in calls:
        if not walk.is_at(call.start):
            yield from walk.outside(call.start)
        yield walk.step(call.stop, call.origin, call)
    yield from walk.outside(len(timeline.events))


class _Walk:
    """A walk through the events, and what is alive on the way."""

    def __init__(self, timeline: Timeline) -> None:
        self._events = timeline.events
        self._changes = timeline.changes()
        self._starts = list(timeline.phases)
        self._next = 0
        """Which phase begins next."""
        self._origin: Origin | None = None
        self._phase: Phase | None = None
        """Of the last step."""
        self._position = 0
        self._live = 0

    def is_at(self, stop: int) -> bool:
        """Return whether nothing has to be gone through before ``stop`` events have happened."""
        starts, following = self._starts, self._next
        begun = following == len(starts) or starts[following][0] > stop
        return begun and self._position >= stop

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
            if self._phase is self._origin.phase and self._frees(stop):
                return
            yield self.step(stop, self._origin)

    def _frees(self, stop: int) -> bool:
        """Go on to ``stop`` if nothing is made until then, and return whether that is so."""
        events = self._events[self._position : stop]
        if max(events) > 0:
            return False
        self._position = stop
        self._live += sum(map(self._changes.__getitem__, events))
        return True

    def step(self, stop: int, origin: Origin, call: OperatorCall | None = None) -> OperatorStep:
        """Go on to where ``stop`` events have happened, in one step."""
        position = self._position
        live = peak = self._live
        self._phase = origin.phase
        if stop <= position:
            return OperatorStep(origin, call, (), 0, peak)
        changes = self._changes
        if stop == position + 1:  # as most steps are
            event = self._events[position]
            self._position = stop
            self._live = live = live + changes[event]
            return (
                OperatorStep(origin, call, (), peak - live, peak)
                if event < 0
                else OperatorStep(origin, call, (event,), 0, live)
            )
        made: dict[int, None] = {}
        for event in self._events[position:stop]:
            live += changes[event]
            if event < 0:
                made.pop(-event, None)
            else:
                made[event] = None
                if live > peak:
                    peak = live
        self._position, self._live = stop, live
        return OperatorStep(origin, call, tuple(made), peak - live, peak)
