"""Tables in messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_torchmem.figures import label
from pytest_torchmem.printable import printable
from pytest_torchmem.reports.layout import joined, width, wrapped
from pytest_torchmem.snapshots.compare import Change, Verdict
from pytest_torchmem.units import format_size, format_step

if TYPE_CHECKING:
    from pytest_torchmem.profile.timeline import Allocation

_LARGEST = 5
_SIZES = ("snapshot", "before", "now", "change", "traced", "measured", "difference")
"""The headers of columns that stand on the right."""
_MARKS = {Verdict.GREW: "▲", Verdict.SHRANK: "▼", Verdict.NOT_RUN: "?", Verdict.NEW: "+"}
"""What stands before a figure that grew or shrank beyond its tolerance, or has no other side."""


def comparison_table(changes: Mapping[str, Sequence[Change]], before: str = "snapshot") -> str:
    """Return figures then and now, with those marked that are beyond their tolerance; each name of
    several has a line above its figures. Where there is no room, changes have no percentage.
    """
    rows = [
        (_MARKS.get(one.verdict, ""), label(one.figure), *format_step(one.before, one.now))
        for own in changes.values()
        for one in own
    ]
    headers = ("", "", before, "now", "change")
    header, *lines = table(rows, headers).split("\n")
    if len(header) > width():
        narrow = [(*row[:4], row[4].partition(" (")[0]) for row in rows]
        header, *lines = table(narrow, headers).split("\n")
    found = [header]
    for name, own in changes.items():
        found += [f"  {printable(name)}"] if len(changes) > 1 else []
        found += lines[: len(own)]
        del lines[: len(own)]
    return "\n".join(found)


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
