"""Operator calls of a trace: their place among the events, inputs and costs.

A timeline cut at its operators: what each took and left, and what happened in between.
"""

import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from pytest_torchmem.profile.timeline import Origin, Phase, Timeline

GRAPH_NODE: ContextVar[str] = ContextVar("graph node", default="")
"""The node of a graph whose operators run, where a graph is run node by node."""


class Work(Protocol):
    """What one call of an operator has a device do."""

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition as two."""

    @property
    def read(self) -> int:
        """Bytes of the arguments that the kernel reads, each once."""

    @property
    def written(self) -> int:
        """Bytes of what the kernel returns or writes to, each once."""


class KnownWork(NamedTuple):
    """Work whose figures are at hand."""

    flops: int = 0
    read: int = 0
    written: int = 0


class OperatorCall(NamedTuple):
    """One call of an operator, with what its body called."""

    start: int
    """How many events there were when it began."""
    stop: int
    """And when it returned."""
    origin: Origin
    node: int
    """Of a call that autograd recorded: one more than the sequence number of its node. Of a call
    that the autograd engine's node made: minus one more than that node's sequence number. 0 for
    any other."""
    node_name: str
    """The name of the autograd node that made the call, where no recorded call has its number."""
    reads: tuple[int, ...]
    """Its arguments' allocations, as events number them (index + 1), in order."""
    work: Work
    label: str = ""
    """The node of a graph that the call belongs to, where one is run node by node."""


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
    events, changes, make = timeline.events, walk.changes, tuple.__new__
    for call in calls:
        stop, position = call.stop, walk.position
        if position < call.start or walk.begins <= call.start:
            yield from walk.outside(call.start)
            position = walk.position
        if stop != position + 1:
            yield walk.step(stop, call.origin, call)
            continue
        event, live = events[position], walk.live  # as most steps are: one of millions
        after = live + changes[event]
        walk.position, walk.live, walk.phase = stop, after, call.origin.phase
        if event < 0:
            yield make(OperatorStep, (call.origin, call, (), live - after, live))
        else:
            yield make(OperatorStep, (call.origin, call, (event,), 0, after))
    yield from walk.outside(len(events))


class _Walk:
    """A walk through the events, and what is alive on the way."""

    def __init__(self, timeline: Timeline) -> None:
        self._events = timeline.events
        self.changes = timeline.changes()
        self._starts = iter(timeline.phases)
        self._coming: Phase | None = None
        """The phase that begins next."""
        self.begins = 0
        """How many events there are when it does."""
        self._origin: Origin | None = None
        self.phase: Phase | None = None
        """Of the last step."""
        self.position = 0
        """How many events have happened."""
        self.live = 0
        self._look_ahead()

    def outside(self, stop: int) -> Iterator[OperatorStep]:
        """Go on to where ``stop`` events have happened, in a step for each phase on the way."""
        while self.begins <= stop and self._coming is not None:
            if self._origin is not None and self.begins > self.position:
                yield self.step(self.begins, self._origin)
            begun = self.begins >= self.position
            self._origin = Origin(self._coming)
            self._look_ahead()
            if begun:
                yield self.step(self.position, self._origin)
        if stop > self.position and self._origin is not None:
            if self.phase is self._origin.phase and self._frees(stop):
                return
            yield self.step(stop, self._origin)

    def _look_ahead(self) -> None:
        self.begins, self._coming = next(self._starts, (sys.maxsize, None))

    def _frees(self, stop: int) -> bool:
        """Go on to ``stop`` if nothing is made until then, and return whether that is so."""
        position = self.position
        if stop == position + 1:
            change = self.changes[self._events[position]]
            if self._events[position] > 0:
                return False
        else:
            events = self._events[position:stop]
            if max(events) > 0:
                return False
            change = sum(map(self.changes.__getitem__, events))
        self.position = stop
        self.live += change
        return True

    def step(self, stop: int, origin: Origin, call: OperatorCall | None = None) -> OperatorStep:
        """Go on to where ``stop`` events have happened, in one step."""
        position = self.position
        live = peak = self.live
        self.phase = origin.phase
        if stop <= position:
            return OperatorStep(origin, call, (), 0, peak)
        changes = self.changes
        made: dict[int, None] = {}
        for event in self._events[position:stop]:
            live += changes[event]
            if event < 0:
                made.pop(-event, None)
            else:
                made[event] = None
                if live > peak:
                    peak = live
        self.position, self.live = stop, live
        return OperatorStep(origin, call, tuple(made), peak - live, peak)
