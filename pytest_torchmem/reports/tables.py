"""Tables in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_torchmem.figures import label
from pytest_torchmem.printable import printable
from pytest_torchmem.snapshots.compare import Comparison, Verdict
from pytest_torchmem.units import format_size, format_step

if TYPE_CHECKING:
    from pytest_torchmem.profile.timeline import Allocation

_LARGEST = 5
_SIZES = ("snapshot", "now", "change", "allowed", "traced", "measured", "difference")
"""The headers of columns that stand on the right."""
_MARKS = {Verdict.GREW: "▲", Verdict.SHRANK: "▼", Verdict.NOT_RUN: "?", Verdict.NEW: "+"}
"""What stands before a figure that grew or shrank beyond its tolerance, or has no other side."""


def comparison_table(comparison: Comparison) -> str:
    """Return every figure of a comparison, with those marked that are beyond their tolerance."""
    rows = [
        (
            _MARKS.get(change.verdict, ""),
            label(change.figure),
            *format_step(change.before, change.now),
            f"±{format_size(change.allowed)}" if change.rule else "",
        )
        for change in comparison.changes
    ]
    return table(rows, ("", "", "snapshot", "now", "change", "allowed"))


def allocation_table(allocations: Sequence[Allocation]) -> str:
    """Return the first of ``allocations``, which are in order, and the sum of the rest."""
    from pytest_torchmem.profile.tables import allocation_rows

    rows = allocation_rows(allocations[:_LARGEST])
    rest = allocations[_LARGEST:]
    if rest:
        total = format_size(sum(a.nbytes for a in rest))
        rows.append((total, f"{len(rest)} more", "", "", ""))
    return table(rows, ("", "kind", "what", "operator", "allocated at"))


def table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table, indented, without columns that are empty in every row."""
    from tabulate import tabulate

    used = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    text = tabulate(
        [[printable(row[i]) for i in used] for row in rows],
        headers=[headers[i] for i in used],
        colalign=["right" if headers[i] in _SIZES else "left" for i in used],
        tablefmt="plain",
        disable_numparse=True,
    )
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
