"""From the caching allocator's own history to a timeline with phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_torchmem.measurement.labels import Label
from pytest_torchmem.measurement.timeline import Builder
from pytest_torchmem.profile.timeline import Origin, Phase, Timeline

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
    builder = Builder()
    waiting = deque(boundaries)
    counted = 0

    def begin_phases() -> None:
        while waiting and waiting[0][0] <= counted:
            builder.begin(waiting.popleft()[1])

    begin_phases()
    for entry in history:
        action, address = entry["action"], entry["addr"]
        if action in (REQUEST, ASKED_BACK):
            begin_phases()
            counted += 1
        if action == REQUEST:
            phase = builder.phases[-1][1] if builder.phases else Phase.BASELINE
            label = before.get(address) if phase is Phase.BASELINE else None
            builder.request(address, entry["size"], Origin(phase), label)
        elif action == RELEASE:
            builder.release(address)
    counted = max([counted, *(start for start, _ in waiting)])
    begin_phases()
    return builder.timeline(after)
