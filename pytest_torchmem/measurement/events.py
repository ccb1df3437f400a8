"""The real CPU allocator's events, as torch.profiler records them.

c10's ``ProfiledCPUMemoryReporter`` (c10/core/CPUAllocator.cpp) reports every request and every
release of the thread that records, with the requested bytes, unrounded (``other_threads.py`` adds
what others do). oneDNN takes its buffers from the same allocator
(aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), so they are among the events. A block
allocated before the recording began is not known to the reporter, and its release is not reported;
whatever belongs to a step must therefore be allocated inside the recording.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.autograd.profiler import profile

from pytest_torchmem.errors import UsageError
from pytest_torchmem.measurement.compilations import compiles, without_compilations
from pytest_torchmem.measurement.other_threads import MemoryEvent, with_other_threads
from pytest_torchmem.step.global_state import environment
from pytest_torchmem.step.phases import engine_runs, outermost_module_calls
from pytest_torchmem.torch_private.dispatch.operators import (
    OpOverloadPacket,
    has_kernels,
    is_composite_implicit,
    is_view,
)
from pytest_torchmem.torch_private.tensors.recording import (
    EventType,
    all_threads_counted,
    mark,
)

STEP = "torchmem::step"
ENGINE = "torchmem::engine"
ENGINE_NODE = "autograd::engine::evaluate_function"
MODULE = "torchmem::module"
OPTIMIZER_STEP = "Optimizer.step#"
MARKS = (STEP, ENGINE, ENGINE_NODE, MODULE, OPTIMIZER_STEP)


@dataclass(slots=True)
class Range:
    """The time in which a recorded function ran."""

    start: int
    stop: int
    name: str
    works: int | None = None
    """When it first took memory, ran an operator that is more than a view or began an optimizer's
    step; None where never."""


@dataclass(slots=True)
class Recording:
    """The memory events of the recording thread in order, and the ranges that tell the phases."""

    events: list[MemoryEvent] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the allocations of the thread that enters this; they are there afterwards."""
    recorded, profiler = Recording(), profile(profile_memory=True)
    with ExitStack() as stack:
        # Kineto reads its log level once, at a process' first recording, and else logs every one.
        level = os.environ.get("KINETO_LOG_LEVEL", "99")
        stack.enter_context(environment("KINETO_LOG_LEVEL", level))
        # A run that a C++ extension starts is known by the nodes that the engine evaluates.
        stack.enter_context(engine_runs(lambda: mark(ENGINE)))
        stack.enter_context(outermost_module_calls(lambda: mark(MODULE)))
        try:
            stack.enter_context(profiler)
        except RuntimeError as error:
            raise UsageError(
                f"cannot record allocations while another profiler runs ({error}): stop it first"
            ) from error
        stack.enter_context(all_threads_counted())
        yield recorded
    results: Any = profiler.kineto_results
    _read(results.experimental_event_tree(), recorded)


def _read(roots: list[Any], recorded: Recording) -> None:
    """Flatten the profiler's event tree; the order of events is that of their time stamps."""
    events, ranges = recorded.events, recorded.ranges
    compilations: list[tuple[int, int]] = []

    def works(within: tuple[Range, ...], time: int) -> None:
        for found in within:
            if found.works is None or found.works > time:
                found.works = time

    pending: list[tuple[Any, tuple[str, ...], tuple[Range, ...]]] = [
        (root, (), ()) for root in reversed(roots)
    ]
    while pending:
        node, path, open_ranges = pending.pop()
        if node.tag == EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                time, size = node.start_time_ns, fields.alloc_size
                total = fields.total_allocated
                events.append(MemoryEvent(time, size, fields.ptr, path, total))
                if size > 0:
                    works(open_ranges, time)
            continue
        name = node.name
        if compiles(name):
            compilations.append((node.start_time_ns, node.end_time_ns))
        if name.startswith(OPTIMIZER_STEP):
            works(open_ranges, node.start_time_ns)  # in a hook of the backward, say
        if name.startswith(MARKS):
            found = Range(node.start_time_ns, node.end_time_ns, name)
            ranges.append(found)
            open_ranges = (*open_ranges, found)
        elif open_ranges and computes(name):
            works(open_ranges, node.start_time_ns)
        inner = (*path, name)
        pending.extend((child, inner, open_ranges) for child in reversed(node.children))
    events.sort(key=lambda event: event.time)
    recorded.events = without_compilations(with_other_threads(events), compilations)
    ranges.sort(key=lambda found: (found.start, -found.stop))


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
