"""Phases of a step that runs on a real GPU, and what its allocator counted in each."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pytest_torchmem.measurement.device import Device
from pytest_torchmem.profile.timeline import Phase

_COUNTERS = ("requested_bytes", "allocated_bytes", "reserved_bytes")
_REQUESTS, _RELEASES = "allocation.all.allocated", "allocation.all.freed"


@dataclass(frozen=True, slots=True)
class Span:
    """A time in one phase; bytes are those above what was there before the measurement."""

    phase: Phase
    events: int
    """Requests and releases before it, since the measurement began."""
    requests: int
    """Requests in it."""
    peaks: Mapping[str, int]
    ends: Mapping[str, int]


class PhaseMeter:
    """Reads and resets the allocator's peaks wherever the phase changes."""

    def __init__(self, device: Device) -> None:
        device.synchronise()
        device.reset_peaks()
        found = device.statistics()
        self.base = {name: _read(found, f"{name}.all.current") for name in _COUNTERS}
        self.phase = Phase.BASELINE
        self.spans: list[Span] = []
        self._device = device
        self._first = _read(found, _REQUESTS), _read(found, _RELEASES)
        self._counted = (0, 0)

    def change(self, phase: Phase) -> None:
        """Begin ``phase``, unless it is under way."""
        if phase is not self.phase:
            self.finish()
            self.phase = phase

    def finish(self) -> None:
        """End the present phase."""
        self._device.synchronise()
        found = self._device.statistics()
        counted = (
            _read(found, _REQUESTS) - self._first[0],
            _read(found, _RELEASES) - self._first[1],
        )
        self.spans.append(
            Span(
                self.phase,
                sum(self._counted),
                counted[0] - self._counted[0],
                {name: _read(found, f"{name}.all.peak") - self.base[name] for name in _COUNTERS},
                {name: _read(found, f"{name}.all.current") - self.base[name] for name in _COUNTERS},
            )
        )
        self._counted = counted
        self._device.reset_peaks()

    def peaks(self, counter: str) -> dict[Phase, int]:
        """Return the peak of every phase that ran, as a trace's timeline has it."""
        peaks: dict[Phase, int] = {}
        for span in self._counting():
            peaks[span.phase] = max(peaks.get(span.phase, 0), span.peaks[counter])
        return peaks

    def ends(self, counter: str, phase: Phase) -> list[int]:
        """Return what was alive at the end of each time in ``phase``."""
        return [span.ends[counter] for span in self.spans if span.phase is phase]

    def end(self, counter: str) -> int:
        """Return what was alive when the last phase ended."""
        return self.spans[-1].ends[counter]

    def boundaries(self) -> list[tuple[int, Phase]]:
        """Return how many requests and releases came before each phase."""
        return [(span.events, span.phase) for span in self._counting()]

    def _counting(self) -> Iterator[Span]:
        """Leave out a backward that only made views: a trace sees nothing of it either."""
        for span in self.spans:
            if span.phase is not Phase.BACKWARD or span.requests:
                yield span


def _read(found: Mapping[str, int], name: str) -> int:
    # A process that allocated nothing yet has no statistics at all.
    return found.get(name, 0)


@contextmanager
def following_phases(meter: PhaseMeter) -> Iterator[None]:
    """Have ``meter`` follow the phases of what this thread runs.

    Backward is while the autograd engine runs, optimizer while a ``step`` does; what comes after a
    backward outside of both is between, until a module is called again.
    """
    thread = threading.get_ident()
    before: list[Phase] = []

    def here() -> bool:
        return threading.get_ident() == thread

    def enter(phase: Phase) -> None:
        before.append(meter.phase)
        meter.change(phase)

    def leave() -> None:
        ended, outer = meter.phase, before.pop()
        if before or (ended is Phase.OPTIMIZER and outer is Phase.FORWARD):
            meter.change(outer)
        else:
            meter.change(Phase.BETWEEN)

    def called() -> None:
        if not before and meter.phase is Phase.BETWEEN:
            meter.change(Phase.FORWARD)

    with ExitStack() as stack:
        stack.enter_context(_followed_engine(here, enter, leave))
        stack.enter_context(_followed_modules(here, called))
        for hook in (
            register_optimizer_step_pre_hook(lambda *_: enter(Phase.OPTIMIZER) if here() else None),
            register_optimizer_step_post_hook(lambda *_: leave() if here() else None),
        ):
            stack.callback(hook.remove)
        yield


class _FollowedEngine:
    """The autograd engine, with a phase around every run that Python starts."""

    def __init__(self, engine: Any, here: Any, enter: Any, leave: Any) -> None:
        self._engine, self._here, self._enter, self._leave = engine, here, enter, leave

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._here():
            return self._engine.run_backward(*args, **kwargs)
        self._enter(Phase.BACKWARD)
        try:
            return self._engine.run_backward(*args, **kwargs)
        finally:
            self._leave()


@contextmanager
def _followed_engine(here: Any, enter: Any, leave: Any) -> Iterator[None]:
    """Every run that Python starts goes through ``Variable._execution_engine``."""
    engine = Variable._execution_engine
    Variable._execution_engine = _FollowedEngine(engine, here, enter, leave)  # type: ignore[assignment]
    try:
        yield
    finally:
        Variable._execution_engine = engine


@contextmanager
def _followed_modules(here: Any, called: Any) -> Iterator[None]:
    original = torch.nn.Module.__call__

    # The first parameter is named as torch's Python tracer wants it (``events._marked_modules``).
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if here():
            called()
        return original(self, *args, **kwargs)

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = original  # type: ignore[method-assign]
