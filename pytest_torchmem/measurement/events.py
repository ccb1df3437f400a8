"""The real CPU allocator's events, as torch.profiler records them.

c10's ``ProfiledCPUMemoryReporter`` (c10/core/CPUAllocator.cpp) reports every request and every
release of the thread that records, with the requested bytes, unrounded. oneDNN takes its buffers
from the same allocator (aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), so they are among the
events. A block allocated before the recording began is not known to the reporter, and its release
is not reported; whatever belongs to a step must therefore be allocated inside the recording.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.autograd.profiler import profile

from pytest_torchmem.errors import UsageError
from pytest_torchmem.step.phases import engine_runs, outermost_module_calls
from pytest_torchmem.torch_private.operators import (
    OpOverloadPacket,
    has_kernels,
    is_composite_implicit,
    is_view,
)
from pytest_torchmem.torch_private.recording import EventType, mark

STEP = "torchmem::step"
ENGINE = "torchmem::engine"
ENGINE_NODE = "autograd::engine::evaluate_function"
MODULE = "torchmem::module"
OPTIMIZER_STEP = "Optimizer.step#"
_RANGES = (STEP, ENGINE, ENGINE_NODE, MODULE, OPTIMIZER_STEP)


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One request (``nbytes`` above 0) or release (below 0) of the block at ``pointer``."""

    time: int
    nbytes: int
    pointer: int
    path: tuple[str, ...]
    """The recorded functions it happened in, outermost first."""


@dataclass(frozen=True, slots=True)
class Range:
    """The time in which a recorded function ran."""

    start: int
    stop: int
    name: str
    works: int | None = None
    """When it first took memory, ran an operator that is more than a view or began an optimizer's
    step; None where never."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The memory events of the recording thread in order, and the ranges that tell the phases."""

    events: tuple[MemoryEvent, ...]
    ranges: tuple[Range, ...]


class Recorder:
    """Records the allocations of the thread that enters it; ``recording`` is there afterwards."""

    def __init__(self) -> None:
        self.recording = Recording((), ())
        self._stack = ExitStack()
        self._profile: Any = None

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:
            stack.enter_context(_quiet_kineto())
            # A run that a C++ extension starts is known by the nodes that the engine evaluates.
            stack.enter_context(engine_runs(lambda: mark(ENGINE)))
            stack.enter_context(outermost_module_calls(lambda: mark(MODULE)))
            self._profile = profile(profile_memory=True)
            try:
                stack.enter_context(self._profile)
            except RuntimeError as error:
                raise UsageError(
                    "cannot record allocations while another profiler runs "
                    f"({error}): stop it first"
                ) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)
        if exception[0] is None:
            self.recording = _read(self._profile.kineto_results.experimental_event_tree())

    @staticmethod
    def step() -> Any:
        """Return a context that marks the step within the recording."""
        return mark(STEP)


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto reads its log level once, at a process' first recording, and else logs every one."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _read(roots: list[Any]) -> Recording:
    """Flatten the profiler's event tree; the order of events is that of their time stamps."""
    events: list[MemoryEvent] = []
    ranges: list[Range] = []

    def works(positions: tuple[int, ...], time: int) -> None:
        for position in positions:
            found = ranges[position]
            if found.works is None or found.works > time:
                ranges[position] = replace(found, works=time)

    pending: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = [
        (root, (), ()) for root in reversed(roots)
    ]
    while pending:
        node, path, open_ranges = pending.pop()
        if node.tag == EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                time, size = node.start_time_ns, fields.alloc_size
                events.append(MemoryEvent(time, size, fields.ptr, path))
                if size > 0:
                    works(open_ranges, time)
            continue
        name = node.name
        if name.startswith(OPTIMIZER_STEP):
            works(open_ranges, node.start_time_ns)  # in a hook of the backward, say
        if name.startswith(_RANGES):
            found = Range(node.start_time_ns, node.end_time_ns, name)
            ranges.append(found)
            open_ranges = (*open_ranges, len(ranges) - 1)
        elif open_ranges and computes(name):
            works(open_ranges, node.start_time_ns)
        inner = (*path, name)
        pending.extend((child, inner, open_ranges) for child in reversed(node.children))
    events.sort(key=lambda event: event.time)
    ranges.sort(key=lambda found: (found.start, -found.stop))
    return Recording(tuple(events), tuple(ranges))


@cache
def computes(name: str) -> bool:
    """Return whether a recorded function is an operator that does more than make a view.

    What it is made of is recorded as well, so composite operators do not count.
    """
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if base else None
    if not isinstance(packet, OpOverloadPacket):
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(
        not is_composite_implicit(overload) and not is_view(overload)
        for overload in overloads
        if has_kernels(overload)
    )
