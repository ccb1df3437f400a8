"""Timelines of the same step at other sizes, in a form in which they can be compared.

Whether a kernel takes a workspace, and in how many requests, depends on sizes. What matters of it
for peaks is how much it holds beyond what is alive when its operator returns: so each call of an
operator has one workspace of these bytes, taken last, in the place of all that it gives back.
"""

from typing import NamedTuple

from pytest_torchmem.profile.operator_calls import OperatorCall
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.profile.timeline import Allocation, Kind, Phase, Timeline


class Comparable(NamedTuple):
    """A timeline with the same peaks as a trace's, and the operators that made its allocations."""

    timeline: Timeline
    calls: tuple[OperatorCall, ...]
    made: tuple[range, ...]
    """The places of the allocations that each call made, its workspace the last."""

    def bytes_of(self, call: int) -> tuple[int, ...]:
        """Return the bytes of what a call leaves, and then those of its workspace."""
        allocations = self.timeline.allocations
        return tuple(allocations[place].nbytes for place in self.made[call])


def comparable(profile: MemoryProfile) -> Comparable:
    """Return the timeline of a trace with the same peaks, and one workspace for each operator."""
    walk, made = _Walk(profile.timeline), []
    calls = profile.calls or ()
    for call in calls:
        walk.outside(call.start)
        first = len(walk.allocations)
        walk.through(call)
        made.append(range(first, len(walk.allocations)))
    walk.outside(len(profile.timeline.events))
    timeline = Timeline(tuple(walk.allocations), tuple(walk.events), tuple(walk.phases))
    return Comparable(timeline, calls, tuple(made))


class _Walk:
    """A walk through a timeline that writes another."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._position = 0
        self._upcoming = list(timeline.phases[::-1])
        self._numbers: dict[int, int] = {}
        self.allocations: list[Allocation] = []
        self.events: list[int] = []
        self.phases: list[tuple[int, Phase]] = []

    def outside(self, stop: int) -> None:
        """Copy what belongs to no operator."""
        while self._upcoming and self._upcoming[-1][0] <= stop:
            start, phase = self._upcoming.pop()
            self._copy(self._timeline.events[self._position : start])
            self._position = max(start, self._position)
            self.phases.append((len(self.events), phase))
        self._copy(self._timeline.events[self._position : stop])
        self._position = max(stop, self._position)

    def through(self, call: OperatorCall) -> None:
        """Copy what an operator leaves, and then its workspace."""
        events = self._timeline.events[self._position : call.stop]
        self._position = max(call.stop, self._position)
        made = {event for event in events if event > 0}
        given_back = {-event for event in events if event < 0} & made
        self._copy(tuple(event for event in events if abs(event) not in given_back))
        live = most = 0
        for event in events:
            nbytes = self._timeline.allocations[abs(event) - 1].nbytes
            live += nbytes if event > 0 else -nbytes
            most = max(most, live)
        number = self._add(Allocation(most - live, Kind.WORKSPACE, call.origin))
        self.events += [number, -number]

    def _copy(self, events: tuple[int, ...]) -> None:
        for event in events:
            if event > 0:
                self._numbers[event] = self._add(self._timeline.allocations[event - 1])
                self.events.append(self._numbers[event])
            else:
                self.events.append(-self._numbers[-event])

    def _add(self, allocation: Allocation) -> int:
        self.allocations.append(allocation)
        return len(self.allocations)
