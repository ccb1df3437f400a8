"""The real CPU allocator's events, as torch.profiler records them; private torch API stands here.

c10's ``ProfiledCPUMemoryReporter`` (c10/core/CPUAllocator.cpp) reports every request and every
release of the thread that records, with the requested bytes, unrounded. oneDNN takes its buffers
from the same allocator (aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), so they are among the
events. A block allocated before the recording began is not known to the reporter, and its release
is not reported; whatever belongs to a step must therefore be allocated inside the recording.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.profiler import profile

from pytest_torchmem.errors import UsageError
from pytest_torchmem.torch_private.operators import (
    OpOverloadPacket,
    has_kernels,
    is_composite_implicit,
    is_view,
)

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
    """When it first took memory or ran an operator that is more than a view; None where never."""


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
            stack.enter_context(_marked_engine())
            stack.enter_context(_marked_modules())
            self._profile = profile(profile_memory=True)
            try:
                stack.enter_context(self._profile)
            except RuntimeError as error:
                raise UsageError(
                    f"the allocations of a step cannot be recorded while another profiler runs "
                    f"({error}): end that one first"
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
        return _mark(STEP)


def _mark(name: str) -> Any:
    return torch._C._profiler._RecordFunctionFast(name)


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


class _MarkedEngine:
    """The autograd engine, with a mark around every run that Python starts."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with _mark(ENGINE):
            return self._engine.run_backward(*args, **kwargs)


@contextmanager
def _marked_engine() -> Iterator[None]:
    """Every run that Python starts goes through ``Variable._execution_engine`` (autograd/graph.py).

    A run that a C++ extension starts is known by the nodes the engine evaluates.
    """
    engine = Variable._execution_engine
    Variable._execution_engine = _MarkedEngine(engine)  # type: ignore[assignment]
    try:
        yield
    finally:
        Variable._execution_engine = engine


@contextmanager
def _marked_modules() -> Iterator[None]:
    """Mark every call of a module that is not inside another's: a forward begins there."""
    original = torch.nn.Module.__call__
    thread = threading.get_ident()
    depth = 0

    # torch's Python tracer reads this frame's module as its local ``self``, and ends the process
    # where there is none (torch/csrc/autograd/profiler_python.cpp, recordPyCall).
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if depth or threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        depth += 1
        try:
            with _mark(MODULE):
                return original(self, *args, **kwargs)
        finally:
            depth -= 1

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]


def _read(roots: list[Any]) -> Recording:
    """Flatten the profiler's event tree; the order of events is that of their time stamps."""
    from torch._C._profiler import _EventType

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
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                time, size = node.start_time_ns, fields.alloc_size
                events.append(MemoryEvent(time, size, fields.ptr, path))
                if size > 0:
                    works(open_ranges, time)
            continue
        name = node.name
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
