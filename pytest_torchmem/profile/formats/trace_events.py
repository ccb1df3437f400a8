"""A timeline in the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_torchmem.profile.timeline import Kind, Timeline

_PROCESS = 1
_PHASES, _PEAK = 1, 2


def trace_events(name: str, timeline: Timeline) -> dict[str, Any]:
    """Return counters of the bytes alive by kind, a slice for each phase, and a mark at the peak.

    There is no time in a trace: an event of the timeline is a microsecond.
    """
    events = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": name}},
        _thread(_PHASES, "phases"),
        *_slices(timeline),
        *_counters(timeline),
        *_peak(timeline),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": "bytes"}}


def _thread(number: int, name: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "pid": _PROCESS,
        "tid": number,
        "name": "thread_name",
        "args": {"name": name},
    }


def _slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for start, stop, phase in timeline.spans():
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": _PHASES,
            "name": phase.value,
            "ts": start,
            "dur": stop - start,
        }


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield all kinds with every event: viewers stack the values of one counter."""
    live = {kind.value: 0 for kind in Kind}
    for position, event in enumerate(timeline.events, start=1):
        found = timeline.allocations[abs(event) - 1]
        live[found.kind.value] += found.nbytes if event > 0 else -found.nbytes
        yield {
            "ph": "C",
            "pid": _PROCESS,
            "name": "bytes alive",
            "ts": position,
            "args": dict(live),
        }


def _peak(timeline: Timeline) -> Iterator[dict[str, Any]]:
    peaks = timeline.peaks()
    if not peaks:
        return
    nbytes, position = max(peaks.values(), key=lambda found: found[0])
    yield _thread(_PEAK, "peak")
    yield {
        "ph": "i",
        "s": "p",
        "pid": _PROCESS,
        "tid": _PEAK,
        "name": f"peak: {nbytes:,} bytes",
        "ts": position,
    }
