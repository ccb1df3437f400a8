"""What the body of an operator asks for, request by request, as its plan repeats it.

A body runs once for its geometry. Its plan repeats its requests in their order, with what was given
back between them, so that the caching allocator is asked the same by every call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from pytest_torchmem.interception.ledger import DeviceLedger
from pytest_torchmem.interception.plan import Output, Step, Temporary
from pytest_torchmem.operators.workspace import Buffer
from pytest_torchmem.profile.timeline import Kind


def steps_of(
    device: DeviceLedger,
    position: int,
    asked: Sequence[tuple[int, Buffer]],
    outputs: Mapping[int, Output],
) -> tuple[Step, ...]:
    """Return what was made and given back on ``device`` since ``position`` events.

    ``asked`` are the workspaces that stay that were asked for meanwhile (``DeviceLedger.asked``),
    and ``outputs`` the first outputs on each new storage, by the storage's index in the ledger.
    What is neither theirs nor given back is taken to be given back at the end. From now on what the
    body made for itself counts as its workspace.
    """
    entries, kept = device.entries, frozenset(device.kept.values())
    buffers = deque(asked)
    steps: list[Step] = []
    made = 0
    numbers: dict[int, int] = {}
    """The temporaries so far, from 1 on, by their indices."""
    for place, event in enumerate(device.events[position:], start=position):
        while buffers and buffers[0][0] <= place:
            steps.append(buffers.popleft()[1])
        index = abs(event)
        if event < 0:
            if index in numbers:
                steps.append(-numbers.pop(index))
        elif index in outputs:
            steps.append(outputs[index])
        elif index not in kept:
            entry = entries[index - 1]
            entries[index - 1] = entry._replace(kind=Kind.WORKSPACE)
            made += 1
            numbers[index] = made
            nbytes, _, _, shape, dtype, label, confidence = entry
            steps.append(Temporary(made, nbytes, shape, dtype, label, confidence))
    steps += [buffer for _, buffer in buffers]
    steps += [-number for number in numbers.values()]
    in_order = [step.slot for step in steps if type(step) is Output]
    if len(in_order) == len(steps) and in_order == sorted(in_order):
        return ()  # as the plan makes them anyway
    return tuple(steps)
