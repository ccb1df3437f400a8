"""Every allocation as a row of comma-separated values."""

from __future__ import annotations

import csv
import io

from pytest_torchmem.profile.timeline import Timeline

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
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for position, event in enumerate(timeline.events, start=1):
        (made if event > 0 else freed)[abs(event)] = position
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for index in made:
        found = timeline.allocations[index - 1]
        origin = found.origin
        rows.writerow(
            (
                index,
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
                made[index],
                freed.get(index, ""),
            )
        )
    return text.getvalue()
