"""Phases of a step that runs on a real GPU, and what its allocator counted in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from pytest_torchmem.measurement.device import Device
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.phases import (
    StepPhases,
    engine_runs,
    optimizer_steps,
    outermost_module_calls,
)

REQUESTED, ALLOCATED, RESERVED = "requested_bytes", "allocated_bytes", "reserved_bytes"
_COUNTERS = (REQUESTED, ALLOCATED, RESERVED)
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
        self._device = device
        device.synchronise()
        device.reset_peaks()
        found = self._statistics()
        self.base = {name: found[f"{name}.all.current"] for name in _COUNTERS}
        self.phase = Phase.BASELINE
        self.spans: list[Span] = []
        self._first = found[_REQUESTS], found[_RELEASES]
        self._counted = (0, 0)

    def change(self, phase: Phase) -> None:
        """Begin ``phase``, unless it is under way."""
        if phase is not self.phase:
            self.finish()
            self.phase = phase

    def finish(self) -> None:
        """End the present phase."""
        self._device.synchronise()
        found = self._statistics()
        counted = found[_REQUESTS] - self._first[0], found[_RELEASES] - self._first[1]
        requests = counted[0] - self._counted[0]
        peaks, ends = (
            {name: found[f"{name}.all.{what}"] - self.base[name] for name in _COUNTERS}
            for what in ("peak", "current")
        )
        self.spans.append(Span(self.phase, sum(self._counted), requests, peaks, ends))
        self._counted = counted
        self._device.reset_peaks()

    def _statistics(self) -> Counter[str]:
        """Return the allocator's; a process that allocated nothing yet has none at all."""
        return Counter(self._device.statistics())

    def peaks(self, counter: str) -> dict[Phase, int]:
        """Return the peak of every phase that ran, as a trace's timeline has it."""
        peaks: dict[Phase, int] = {}
        for span in self.spans:
            asks = span.requests or span.phase is not Phase.BACKWARD
            phase = span.phase if asks else Phase.BETWEEN  # as Timeline.course
            peaks[phase] = max(peaks.get(phase, 0), span.peaks[counter])
        return peaks

    def ends(self, counter: str, phase: Phase) -> list[int]:
        """Return what was alive at the end of each time in ``phase``."""
        return [span.ends[counter] for span in self.spans if span.phase is phase]

    def end(self, counter: str) -> int:
        """Return what was alive when the last phase ended."""
        return self.spans[-1].ends[counter]

    def boundaries(self) -> list[tuple[int, Phase]]:
        """Return how many requests and releases came before each phase."""
        return [(span.events, span.phase) for span in self.spans]


@contextmanager
def following_phases(meter: PhaseMeter) -> Iterator[Callable[[], None]]:
    """Have ``meter`` follow the phases of what this thread runs; what is yielded begins a step."""
    phases = StepPhases()

    def note(change: Callable[..., None], *given: Phase) -> None:
        change(*given)
        meter.change(phases.phase)

    @contextmanager
    def backward() -> Iterator[None]:
        note(phases.begin, Phase.BACKWARD)
        try:
            yield
        finally:
            note(phases.end)

    @contextmanager
    def module_call() -> Iterator[None]:
        note(phases.module_called)
        yield

    with (
        engine_runs(backward),
        outermost_module_calls(module_call),
        optimizer_steps(partial(note, phases.begin, Phase.OPTIMIZER), partial(note, phases.end)),
    ):
        yield partial(note, phases.module_called)
