"""From the caching allocator's own history to a timeline with phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_torchmem.measurement.labels import Label
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline

REQUEST, ASKED_BACK, RELEASE = "alloc", "free_requested", "free_completed"


def timeline_of(
    history: Sequence[Mapping[str, Any]],
    boundaries: Sequence[tuple[int, Phase]],
    before: Mapping[int, Label],
    after: Mapping[int, Label],
) -> Timeline:
    """Return the timeline of what ``torch.cuda.memory._snapshot`` has of one device.

    An entry has ``action``, ``addr`` and ``size``, of a request and its release the bytes asked for
    (c10/cuda/CUDACachingAllocator.cpp, ``record_trace``). ``boundaries`` tell how many requests and
    releases (as asked for) came before each phase; ``before`` and ``after`` name storages by
    address, at the beginning of the step and at its end. A block that was there before the history
    began is not part of it.
    """
    allocations: list[Allocation] = []
    events: list[int] = []
    phases: list[tuple[int, Phase]] = []
    live: dict[int, int] = {}
    waiting = list(boundaries)
    counted = 0

    def begin_phases() -> None:
        while waiting and waiting[0][0] <= counted:
            phases.append((len(events), waiting.pop(0)[1]))

    begin_phases()
    for entry in history:
        action, address = entry["action"], entry["addr"]
        if action == REQUEST:
            begin_phases()
            counted += 1
            phase = phases[-1][1] if phases else Phase.BASELINE
            label = before.get(address) if phase is Phase.BASELINE else None
            live[address] = len(allocations)
            allocations.append(_allocation(entry["size"], phase, label))
            events.append(len(allocations))
        elif action == ASKED_BACK:
            begin_phases()
            counted += 1
        elif action == RELEASE and address in live:
            events.append(-(live.pop(address) + 1))
    counted = max([counted, *(start for start, _ in waiting)])
    begin_phases()
    for address, label in after.items():
        index = live.get(address)
        if index is not None and allocations[index].kind is Kind.OTHER:
            found = allocations[index]
            allocations[index] = _allocation(found.nbytes, found.origin.phase, label)
    return Timeline(tuple(allocations), tuple(events), tuple(phases))


def _allocation(nbytes: int, phase: Phase, label: Label | None) -> Allocation:
    if label is None:
        return Allocation(nbytes, Kind.OTHER, Origin(phase))
    return Allocation(nbytes, label.kind, Origin(phase), label.shape, label.dtype, label.name)
