"""From the allocator's events to a timeline with phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from pytest_torchmem.errors import UsageError
from pytest_torchmem.measurement.events import (
    ENGINE,
    ENGINE_NODE,
    MARKS,
    MODULE,
    OPTIMIZER_STEP,
    STEP,
    Range,
    Recording,
)
from pytest_torchmem.measurement.labels import Label
from pytest_torchmem.measurement.other_threads import MemoryEvent
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline
from pytest_torchmem.step.phases import StepPhases

_PHASES = {ENGINE: Phase.BACKWARD, ENGINE_NODE: Phase.BACKWARD, OPTIMIZER_STEP: Phase.OPTIMIZER}
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
    )
)
"""Operators that only take memory: what called them is what made the allocation."""


def build_timeline(
    recording: Recording, before: Mapping[int, Label], after: Mapping[int, Label]
) -> Timeline:
    """Return the timeline of the recorded step.

    The first events are what was live when the step began. ``before`` names the storages of the
    model and the inputs by address, ``after`` the gradients and optimizer state at the step's end.

    Raises ``UsageError`` where a profiler of the program's own ended the recording.
    """
    step = next((found for found in recording.ranges if found.name == STEP), None)
    if step is None:
        raise UsageError(
            "the step runs torch.profiler itself, which ends the recording of its allocations: "
            "remove the profiler from the measured step, or use trace()"
        )
    changes = deque(_phase_changes(recording.ranges, step))
    live: dict[int, MemoryEvent] = {}
    during: list[MemoryEvent] = []
    for event in recording.events:
        if event.time > step.stop:
            break
        if event.time >= step.start:
            during.append(event)
        elif event.nbytes > 0:
            live[event.pointer] = event
        else:
            live.pop(event.pointer, None)
    builder = Builder()
    builder.begin(Phase.BASELINE)
    for event in [*live.values(), *during]:
        while changes and changes[0][0] <= event.time:
            builder.begin(changes.popleft()[1])
        if event.nbytes > 0:
            path = operators_in(event.path)
            phase = builder.phases[-1][1]
            label = before.get(event.pointer) if phase is Phase.BASELINE else None
            origin = Origin(phase, operator=path[-1] if path else "")
            builder.request(event.pointer, event.nbytes, origin, label, " > ".join(path))
        elif event.nbytes < 0:
            builder.release(event.pointer)
    for _, phase in changes:
        builder.begin(phase)
    return builder.timeline(after)


class Builder:
    """Matches releases with requests by address."""

    def __init__(self) -> None:
        self.phases: list[tuple[int, Phase]] = []
        self._allocations: list[Allocation] = []
        self._events: list[int] = []
        self._live: dict[int, int] = {}

    def begin(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phases.append((len(self._events), phase))

    def request(
        self, address: int, nbytes: int, origin: Origin, label: Label | None, made_in: str = ""
    ) -> None:
        """Add an allocation, which has a label or else is only known by what it was ``made_in``."""
        allocation = Allocation(nbytes, Kind.OTHER, origin, label=made_in)
        self._live[address] = len(self._allocations)
        self._allocations.append(allocation if label is None else _labelled(allocation, label))
        self._events.append(len(self._allocations))

    def release(self, address: int) -> None:
        """Free what is at an address, if that is known."""
        index = self._live.pop(address, None)
        if index is not None:
            self._events.append(-(index + 1))

    def timeline(self, after: Mapping[int, Label]) -> Timeline:
        """Return the timeline; ``after`` names what is alive at the end and has no name yet."""
        for address, label in after.items():
            index = self._live.get(address)
            if index is not None and self._allocations[index].kind is Kind.OTHER:
                self._allocations[index] = _labelled(self._allocations[index], label)
        return Timeline(tuple(self._allocations), tuple(self._events), tuple(self.phases))


def _labelled(allocation: Allocation, label: Label) -> Allocation:
    return Allocation(
        allocation.nbytes, label.kind, allocation.origin, label.shape, label.dtype, label.name
    )


def operators_in(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the autograd node and operators of a path, outermost first, marks left out.

    Factories are left out as well unless there is nothing else. An allocation that no operator made
    has the name of the autograd node or ``record_function`` that it was made in.
    """
    found = tuple(name for name in path if not name.startswith(MARKS))
    made = tuple(name for name in found if name not in _FACTORIES)
    return made or found[-1:]


def _phase_changes(ranges: Iterable[Range], step: Range) -> list[tuple[int, Phase]]:
    """Return when the phase changes."""
    phases = StepPhases()
    bounds: list[tuple[int, int, Callable[[], None]]] = []
    for found in ranges:
        if found.name == MODULE and step.start <= found.start:
            bounds.append((found.start, 2, phases.module_called))
        phase = next(
            (phase for name, phase in _PHASES.items() if found.name.startswith(name)), None
        )
        if phase is Phase.BACKWARD and found.works is None:
            continue  # a trace sees nothing of a backward that only makes views
        if phase is not None and step.start <= found.start and found.stop <= step.stop:
            begins = found.works if phase is Phase.BACKWARD else found.start
            bounds.append((begins or found.start, 1, partial(phases.begin, phase)))
            bounds.append((found.stop, 0, phases.end))
    changes = [(step.start, phases.phase)]
    for time, _, take_note in sorted(bounds, key=lambda bound: bound[:2]):
        take_note()
        if phases.phase is not changes[-1][1]:
            changes.append((time, phases.phase))
    return changes
