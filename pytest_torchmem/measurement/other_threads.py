"""The allocator's events, and what threads do that are not recorded: those of gloo, say.

The profiler writes down what recorded threads do. The total that c10 reports beside each event is
the process's (``all_threads_counted``): what any thread takes is added to it, and what it
releases is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_CANDIDATES, _SUMS = 64, 4096
"""How many blocks, and how many sums of their sizes, are tried."""
_ELSEWHERE = "another thread"


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One request (``nbytes`` above 0) or release (below 0) of the block at ``pointer``."""

    time: int
    nbytes: int
    pointer: int
    path: tuple[str, ...]
    """The recorded functions it happened in, outermost first."""
    total: int
    """The bytes that the process has after it, by what c10 counted."""

    @property
    def maps_file(self) -> bool:
        """Whether it is a file that is mapped, which c10 reports without a total and does not count
        (``MapAllocator::initializeAlloc``, aten/src/ATen/MapAllocator.cpp).
        """
        return self.nbytes > 0 and self.total == 0


def with_other_threads(events: Sequence[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events in order of time, and before each what other threads did since the last.

    Which blocks these released is told by their sizes. Of several that it may be, the newest is
    taken. What they took and released between two events is not there, nor what was seen in the
    course of one operator alone: each worker of a kernel may take memory of its own, and whether
    two of them have it at once is chance (``dsum`` in ``cpu_flash_attention_backward``,
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    if not events:
        return []
    matches = _Matches.among(events)
    counted = next((event for event in events if not event.maps_file), events[0])
    others = _OtherThreads({}, counted.total - counted.nbytes, events[0].time)
    mapped: set[int] = set()
    result: list[MemoryEvent] = []
    for index, event in enumerate(events):
        unmaps = event.total == 0 != others.total + event.nbytes and index in matches.unrequested
        if event.maps_file or event.pointer in mapped or unmaps:
            mapped ^= {event.pointer}
            result.append(event)
            continue
        result += others.before(event, index in matches.reusing)
        result.append(others.released(event) if index in matches.unrequested else event)
        if index in matches.unreleased:
            others.live[event.pointer] = event
    return _without_workers(result)


def _without_workers(events: Sequence[MemoryEvent]) -> list[MemoryEvent]:
    """Leave out what other threads had in the course of one operator alone."""
    left_out: set[int] = set()
    taken: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.nbytes > 0 and event.path == (_ELSEWHERE,):
            taken[event.pointer] = index
        elif event.pointer in taken:
            begin = taken.pop(event.pointer)
            # The event before says that the operator was under way when the block was taken.
            recorded = [one.path for one in events[max(begin - 1, 0) : index]]
            operators = {_operator_of(path) for path in recorded if path != (_ELSEWHERE,)}
            if len(operators) == 1 and () not in operators:
                left_out |= {begin, index}
    return [event for index, event in enumerate(events) if index not in left_out]


def _operator_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the outermost operator that an event happened in, with what calls it."""
    names = (index for index, name in enumerate(path, start=1) if name.startswith("aten::"))
    return path[: next(names, 0)] or path


@dataclass(slots=True)
class _Matches:
    """Which events, by their index, have no counterpart at their address."""

    unreleased: set[int] = field(default_factory=set)
    """Requests without a release."""
    unrequested: set[int] = field(default_factory=set)
    """Releases without a request."""
    reusing: set[int] = field(default_factory=set)
    """Requests that get the address of one without a release."""

    @classmethod
    def among(cls, events: Sequence[MemoryEvent]) -> _Matches:
        found = cls()
        live: dict[int, int] = {}
        for index, event in enumerate(events):
            before = live.pop(event.pointer, None)
            if event.nbytes < 0:
                if before is None:
                    found.unrequested.add(index)
                continue
            live[event.pointer] = index
            if before is not None:
                found.unreleased.add(before)
                found.reusing.add(index)
        found.unreleased.update(live.values())
        return found


@dataclass(slots=True)
class _OtherThreads:
    """What they did, and may do."""

    live: dict[int, MemoryEvent]
    """What has no recorded release, by address; what they took has addresses below 0."""
    total: int
    """The bytes that the process has, by the events that are known."""
    time: int
    """That of the last event: what was released since counts as released at once."""
    unexplained: int = 0
    acted: bool = False
    """Whether they did anything so far."""

    def before(self, event: MemoryEvent, reuses: bool) -> list[MemoryEvent]:
        """Return what they did between the last event and this one."""
        gone = [self.live.pop(event.pointer)] if reuses and event.pointer in self.live else []
        missing = self.total + event.nbytes - event.total - sum(block.nbytes for block in gone)
        taken: list[MemoryEvent] = []
        if missing > 0 and missing != self.unexplained:
            blocks = _adding_up_to(missing, list(self.live.values())[::-1])
            for block in blocks:
                del self.live[block.pointer]
            gone += blocks
            self.unexplained = 0 if blocks else missing
        elif missing < 0:
            address = min([0, *self.live]) - 1
            taken = [replace(event, nbytes=-missing, pointer=address, path=(_ELSEWHERE,))]
            self.live[address] = taken[0]
        where = (_ELSEWHERE,)
        freed = [
            MemoryEvent(self.time, -one.nbytes, one.pointer, where, event.total) for one in gone
        ]
        self.time = event.time
        self.total += event.nbytes + sum(one.nbytes for one in [*freed, *taken])
        self.acted = self.acted or bool(freed or taken)
        return [*freed, *taken]

    def released(self, event: MemoryEvent) -> MemoryEvent:
        """Return a release of what another thread took, at the address that it has in the record.

        It may have taken as much as it released between two events: then the block that it released
        seems to live on.
        """
        same = [block for block in self.live.values() if block.nbytes == -event.nbytes]
        if not self.acted or not same:  # from before the recording
            return event
        return replace(event, pointer=self.live.pop(same[-1].pointer).pointer)


def _adding_up_to(nbytes: int, blocks: Sequence[MemoryEvent]) -> list[MemoryEvent]:
    """Return blocks, the first possible ones, that have so many bytes together; [] if none have."""
    sums: dict[int, tuple[MemoryEvent, ...]] = {0: ()}
    for block in [block for block in blocks if block.nbytes <= nbytes][:_CANDIDATES]:
        for total, chosen in tuple(sums.items()):
            if len(sums) < _SUMS and total + block.nbytes <= nbytes:
                sums.setdefault(total + block.nbytes, (*chosen, block))
        if nbytes in sums:
            return list(sums[nbytes])
    return []
