"""What compiling takes on the host and gives back: no part of a step, as in a trace.

Dynamo records what it does as ranges of the profiler that end in ``(dynamo_timed)``
(torch/_dynamo/utils.py, ``dynamo_timed``). In there it keeps the states of random generators (5,056
bytes each), tries patterns on tensors, and folds constants. What outlives a compilation, such as
the state of an optimizer, is the program's. A program that calls AOTAutograd itself, without
``torch.compile``, has that in its step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from pytest_torchmem.measurement.other_threads import MemoryEvent

_MARK = " (dynamo_timed)"
_AUTOGRAD_ALONE = f"create_aot_dispatcher_function{_MARK}"


def compiles(name: str) -> bool:
    """Return whether a recorded function is a part of a compilation."""
    return name.endswith(_MARK) and name != _AUTOGRAD_ALONE


def without_compilations(
    events: Sequence[MemoryEvent], spans: Sequence[tuple[int, int]]
) -> list[MemoryEvent]:
    """Return the events without what one compilation both took and released.

    ``spans`` are the times in which something was compiled, beginning and end; they may be nested.
    """
    outermost: list[tuple[int, int]] = []
    for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not outermost or start > outermost[-1][1]:
            outermost.append((start, stop))
    starts = [start for start, _ in outermost]
    taken: dict[int, tuple[int, int]] = {}
    left_out: set[int] = set()
    for index, event in enumerate(events):
        span = bisect_right(starts, event.time) - 1
        if span >= 0 and event.time > outermost[span][1]:
            span = -1
        if event.nbytes > 0:
            taken[event.pointer] = index, span
        elif event.pointer in taken:
            begin, within = taken.pop(event.pointer)
            if within == span >= 0:
                left_out |= {begin, index}
    return [event for index, event in enumerate(events) if index not in left_out]
