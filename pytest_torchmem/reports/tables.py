"""Tables in messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_torchmem.figures import label
from pytest_torchmem.printable import printable
from pytest_torchmem.reports.layout import joined, width, wrapped
from pytest_torchmem.snapshots.compare import Comparison, Verdict
from pytest_torchmem.units import format_size, format_step

if TYPE_CHECKING:
    from pytest_torchmem.profile.timeline import Allocation

_LARGEST = 5
_SIZES = ("snapshot", "before", "now", "change", "allowed", "traced", "measured", "difference")
"""The headers of columns that stand on the right."""
_MARKS = {Verdict.GREW: "▲", Verdict.SHRANK: "▼", Verdict.NOT_RUN: "?", Verdict.NEW: "+"}
"""What stands before a figure that grew or shrank beyond its tolerance, or has no other side."""


def comparison_table(comparison: Comparison, *, tolerant: bool = True) -> str:
    """Return the figures of a comparison, with those marked that are beyond their tolerance.

    Where there is no tolerance, and no snapshot, it is not ``tolerant``.
    """
    rows = [
        (
            _MARKS.get(change.verdict, ""),
            label(change.figure),
            *format_step(change.before, change.now),
            f"±{format_size(change.allowed)}" if change.rule and tolerant else "",
        )
        for change in comparison.told
    ]
    headers = ("", "", "snapshot" if tolerant else "before", "now", "change", "allowed")
    shown = table(rows, headers)
    if max(map(len, shown.splitlines()), default=0) <= width():
        return shown
    for of_percent in (False, True):
        lines = [*_with_allowance_below(rows, headers, of_percent=of_percent)]
        if max(map(len, lines)) <= width():
            break
    return "\n".join(lines)


def _with_allowance_below(
    rows: Sequence[Sequence[str]], headers: Sequence[str], *, of_percent: bool
) -> Iterator[str]:
    """Yield the lines of a narrow table: what is allowed stands below a change that is beyond it,
    and below every change its percentage, if that has no room either.
    """
    changes = [row[4].partition(" (") if of_percent else (row[4], "", "") for row in rows]
    narrow = [(*row[:4], change[0]) for row, change in zip(rows, changes, strict=True)]
    header, *lines = table(narrow, headers[:5]).splitlines()
    yield header
    for line, row, (_, bracket, percent) in zip(lines, rows, changes, strict=True):
        yield line
        if row[0] or bracket:
            allowed = f"allowed {row[5]}" if row[0] and row[5] else ""
            if text := joined(percent.rstrip(")"), allowed):
                yield f"{text:>{len(header)}}"


def allocation_table(allocations: Sequence[Allocation]) -> str:
    """Return the first of ``allocations``, which are in order, and the sum of the rest."""
    from pytest_torchmem.profile.tables import allocation_rows

    rows = allocation_rows(allocations[:_LARGEST])
    rest = allocations[_LARGEST:]
    if rest:
        total = format_size(sum(a.nbytes for a in rest))
        rows.append((total, f"{len(rest)} more", "", "", ""))
    shown = table(rows, ("", "kind", "what", "operator", "allocated at"))
    if max(map(len, shown.splitlines()), default=0) <= width():
        return shown
    sizes = max(len(row[0]) for row in rows)
    return "\n".join(line for row in rows for line in _in_two_lines(row, sizes))


def _in_two_lines(row: Sequence[str], sizes: int) -> Iterator[str]:
    """Yield what an allocation is, and who made it."""
    size, kind, what, *who = map(printable, row)
    start = f"  {size:>{sizes}}  "
    for text in (joined(kind, what), joined(*who)):
        if text:
            yield wrapped(f"{start}{text}", " " * len(start))
            start = " " * len(start)


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
