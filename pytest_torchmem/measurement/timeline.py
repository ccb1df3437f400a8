"""From the allocator's events to a timeline with phases."""

from __future__ import annotations

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
    MemoryEvent,
    Range,
    Recording,
)
from pytest_torchmem.measurement.labels import Label
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
    changes = _phase_changes(recording.ranges, step)
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
    builder = _Builder()
    for event in live.values():
        builder.request(event, Phase.BASELINE, before.get(event.pointer))
    phases = [(0, Phase.BASELINE)]
    position = 0
    for event in during:
        while position < len(changes) and changes[position][0] <= event.time:
            phases.append((len(builder.events), changes[position][1]))
            position += 1
        if event.nbytes > 0:
            builder.request(event, phases[-1][1])
        elif event.nbytes < 0:
            builder.release(event)
    phases.extend((len(builder.events), phase) for _, phase in changes[position:])
    builder.label(after)
    return Timeline(tuple(builder.allocations), tuple(builder.events), tuple(phases))


class _Builder:
    """Matches releases with requests by address."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[int] = []
        self._live: dict[int, int] = {}

    def request(self, event: MemoryEvent, phase: Phase, label: Label | None = None) -> None:
        index = len(self.allocations)
        origin = Origin(phase, operator=operator_of(event.path))
        if label is None:
            chain = " > ".join(operators_in(event.path))
            allocation = Allocation(event.nbytes, Kind.OTHER, origin, label=chain)
        else:
            allocation = _labelled(event.nbytes, origin, label)
        self.allocations.append(allocation)
        self.events.append(index + 1)
        self._live[event.pointer] = index

    def release(self, event: MemoryEvent) -> None:
        index = self._live.pop(event.pointer, None)
        if index is not None:
            self.events.append(-(index + 1))

    def label(self, labels: Mapping[int, Label]) -> None:
        for pointer, label in labels.items():
            index = self._live.get(pointer)
            if index is not None and self.allocations[index].kind is Kind.OTHER:
                known = self.allocations[index]
                self.allocations[index] = _labelled(known.nbytes, known.origin, label)


def _labelled(nbytes: int, origin: Origin, label: Label) -> Allocation:
    return Allocation(nbytes, label.kind, origin, label.shape, label.dtype, label.name)


def operator_of(path: tuple[str, ...]) -> str:
    """Return the innermost operator that is more than a factory, ``"aten::clone"``, or ``""``.

    An allocation that no operator made has the name of the autograd node or ``record_function``
    that it was made in.
    """
    operators = operators_in(path)
    return operators[-1] if operators else ""


def operators_in(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the autograd node and operators of a path, outermost first, marks left out.

    Factories are left out as well unless there is nothing else.
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
