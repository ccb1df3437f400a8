"""Exports: allocations as comma-separated values, a timeline for Perfetto and Chrome.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import csv
import io
import json
from array import array
from collections.abc import Iterator
from typing import Any

from pytest_torchmem.profile.sampled import Alike, by_kind, samples
from pytest_torchmem.profile.timeline import Allocation, Kind, Timeline

COLUMNS = (
    *("index", "nbytes", "kind", "phase", "module", "operator", "line"),
    *("dtype", "shape", "label", "confidence", "made", "freed"),
)


def allocations_csv(timeline: Timeline) -> str:
    """Return a header and a row for each allocation, in the order in which they were made.

    ``made`` and ``freed`` are positions among the events, from 1 on; ``freed`` is empty for what is
    alive at the end. A shape is written as ``2x3``.
    """
    freed = array("q", bytes(8 * (len(timeline.allocations) + 1)))
    for position, event in enumerate(timeline.events, start=1):
        if event < 0:
            freed[-event] = position
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(COLUMNS)
    told: dict[Allocation, str] = {}
    for position, event in enumerate(timeline.events, start=1):
        if event < 0:
            continue
        found = timeline.allocations[event - 1]
        columns = told.get(found)
        if columns is None:
            columns = told[found] = _columns(found)
        text.write(f"{event},{columns},{position},{freed[event] or ''}\n")
    return text.getvalue()


def _columns(found: Allocation) -> str:
    """Return what is told of all allocations that are alike, from ``nbytes`` to ``confidence``."""
    origin, text = found.origin, io.StringIO()
    csv.writer(text, lineterminator="").writerow(
        (
            found.nbytes,
            found.kind.value,
            origin.phase.value,
            origin.module,
            origin.operator,
            origin.line,
            found.dtype,
            "x".join(map(str, found.shape)),
            found.label,
            found.confidence.value,
        )
    )
    return text.getvalue()


_PHASES, _PEAK = 1, 2
MOST_COUNTERS = 200_000
"""Viewers take minutes for more: those of a longer timeline tell the most of several events."""


def trace_events(name: str, timeline: Timeline) -> str:
    """Return counters of the bytes alive by kind, a slice for each phase, and a mark at the peak.

    There is no time in a trace: an event of the timeline is a microsecond. Of a timeline with more
    than ``MOST_COUNTERS`` events a counter is the most of several, and every peak is among them.
    """
    slices = (
        _event("X", phase.value, tid=_PHASES, ts=start, dur=stop - start)
        for start, stop, phase in timeline.spans()
    )
    named = _event("M", "process_name", args={"name": name})
    parts = [named, _thread(_PHASES, "phases"), *slices, *_counters(timeline), *_peak(timeline)]
    end = json.dumps({"displayTimeUnit": "ns", "otherData": {"unit": "bytes"}})
    return f'{{"traceEvents": [{", ".join(parts)}], {end[1:]}'


def _event(kind: str, name: str, **others: Any) -> str:
    """Return an event of a kind, as the format calls them: metadata, a slice, a counter, …"""
    return json.dumps({"ph": kind, "pid": 1, "name": name, **others})


def _thread(number: int, name: str) -> str:
    return _event("M", "thread_name", tid=number, args={"name": name})


def _counters(timeline: Timeline) -> Iterator[str]:
    """Yield all kinds together: viewers stack the values of one counter."""
    positions, alike = samples(timeline, MOST_COUNTERS), Alike(timeline)
    names, groups = alike.grouped(by_kind)
    unused = {kind.value: 0 for kind in Kind}
    alive = alike.bytes_in_groups(positions, groups, len(names))
    for position, live in zip(positions, alive, strict=True):
        if position:
            args = unused | dict(zip(names, live, strict=True))
            yield _event("C", "bytes alive", ts=position, args=args)


def _peak(timeline: Timeline) -> Iterator[str]:
    peaks = timeline.peaks()
    if not peaks:
        return
    nbytes, position = max(peaks.values(), key=lambda found: found[0])
    yield _thread(_PEAK, "peak")
    yield _event("i", f"peak: {nbytes:,} bytes", s="p", tid=_PEAK, ts=position)
