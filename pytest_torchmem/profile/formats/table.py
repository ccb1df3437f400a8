"""Every allocation as a row of comma-separated values."""

from __future__ import annotations

import csv
import io
from array import array

from pytest_torchmem.profile.timeline import Allocation, Timeline

COLUMNS = (
    "index",
    "nbytes",
    "kind",
    "phase",
    "module",
    "operator",
    "line",
    "dtype",
    "shape",
    "label",
    "confidence",
    "made",
    "freed",
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
