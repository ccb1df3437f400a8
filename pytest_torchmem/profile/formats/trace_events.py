"""A timeline in the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pytest_torchmem.profile.timeline import Kind, Timeline

_PROCESS = 1
_PHASES, _PEAK = 1, 2
_TOGETHER = 10_000
"""Counters that are one text: a text for each would take as much memory again."""


def trace_events(name: str, timeline: Timeline) -> str:
    """Return counters of the bytes alive by kind, a slice for each phase, and a mark at the peak.

    There is no time in a trace: an event of the timeline is a microsecond. The counters, of which a
    long program has millions, are written as text at once.
    """
    first = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": name}},
        _thread(_PHASES, "phases"),
        *_slices(timeline),
    ]
    parts = [*map(json.dumps, first), *_counters(timeline), *map(json.dumps, _peak(timeline))]
    end = json.dumps({"displayTimeUnit": "ns", "otherData": {"unit": "bytes"}})
    return f'{{"traceEvents": [{", ".join(parts)}], {end[1:]}'


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


def _counters(timeline: Timeline) -> Iterator[str]:
    """Yield all kinds with every event: viewers stack the values of one counter."""
    counter = {"ph": "C", "pid": _PROCESS, "name": "bytes alive"}
    start = json.dumps(counter)[:-1]
    live = dict.fromkeys(Kind, 0)
    names = {kind: f"{json.dumps(kind.value)}: " for kind in Kind}
    texts = {kind: f"{name}0" for kind, name in names.items()}
    allocations, values, made = timeline.allocations, texts.values(), list[str]()
    for position, event in enumerate(timeline.events, start=1):
        found = allocations[event - 1 if event > 0 else -event - 1]
        kind = found.kind
        live[kind] = now = live[kind] + (found.nbytes if event > 0 else -found.nbytes)
        texts[kind] = f"{names[kind]}{now}"
        made.append(f'{start}, "ts": {position}, "args": {{{", ".join(values)}}}}}')
        if len(made) == _TOGETHER:
            yield ", ".join(made)
            made.clear()
    if made:
        yield ", ".join(made)


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
