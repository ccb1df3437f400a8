"""How messages are laid out: their width, their tables, and colours where a terminal shows some."""

import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

from pytest_torchmem.figures import label
from pytest_torchmem.printable import printable
from pytest_torchmem.profile.timeline import Allocation
from pytest_torchmem.snapshots.compare import Change, Verdict
from pytest_torchmem.units import format_size, format_step

MARGIN: ContextVar[int] = ContextVar("margin", default=8)
"""Columns that pytest puts before a message: "E", and the indentation of the line that raised."""
_NARROWEST = 60
PLAIN = 10_000
"""Columns of what nothing wraps."""
_COLUMNS: ContextVar[int | None] = ContextVar("columns", default=None)


def width() -> int:
    """Return the columns that a message has: those of ``COLUMNS`` or of the terminal, else 80."""
    return max(columns() - MARGIN.get(), _NARROWEST)


def columns() -> int:
    """Return how wide lines may be: ``COLUMNS``, the terminal, or else 80."""
    return _COLUMNS.get() or shutil.get_terminal_size((80, 24)).columns


@contextmanager
def lines_of(number: int) -> Iterator[None]:
    """Make texts within it as wide as ``number`` columns: for a page that no terminal shows."""
    wide, margin = _COLUMNS.set(number), MARGIN.set(0)
    try:
        yield
    finally:
        _COLUMNS.reset(wide)
        MARGIN.reset(margin)


_NAME = " " * len("MemoryCheckFailed: ")
_KEPT = "\0"
"""Stands for a space at which no line ends, while lines are made."""
_TOGETHER = re.compile(
    r"(?<!\w)(\d+ × )?\w*\[[\d, ]+\]"  # 12 × float32[4, 16, 128]
    r"|(?<![\d.])(\d+ × )?[+-]?[\d.]+ ([KMGTPE]i)?B\b( \([+-][\d.]+ %\))?"  # +10.13 MiB (+25.3 %)
    r"|(?<!\w)\w+ \([\w-]+\)"  # cuda (a100-80gb)
    r"|# \w+"  # a note behind code
)
"""What is read as one: shapes, sizes and devices. Each is looked for where a word begins: at every
letter of a long name, what follows would be read again and again."""
_CUT = "\1"
"""Stands for where a line may end in a word, while lines are made."""


def wrapped(text: str, indent: str = "  ", *, first: bool = False, start: str = "") -> str:
    """Return ``text`` on as many lines as it needs; those after the first are indented, and the
    first begins with ``start``.

    The ``first`` of a message stands behind the name of the exception.
    """
    longest = max(width() - len(indent), 1)
    too_long = rf"[^\s]{{{longest + 1},}}"
    lines = textwrap.wrap(
        re.sub(
            too_long,
            lambda found: found.group().replace(".", f".{_CUT} "),
            _TOGETHER.sub(lambda found: found.group().replace(" ", _KEPT), text),
        ),
        width(),
        initial_indent=_NAME if first else start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = "\n".join(lines).replace(f"{_CUT} ", "").replace(_CUT, "").replace(_KEPT, " ")
    return text.lstrip() if first else text


def joined(*parts: str, separator: str = ", ") -> str:
    """Return the parts that are there as one text."""
    return separator.join(part for part in parts if part)


_LARGEST = 5
_SIZES = frozenset(
    {"snapshot", "before", "now", "change", "traced", "measured", "difference"}
    | {"forward", "backward", "base", "head"}
)
"""The headers of columns that stand on the right."""
_MARKS = {Verdict.GREW: "▲", Verdict.SHRANK: "▼", Verdict.NOT_RUN: "?", Verdict.NEW: "+"}
"""What stands before a figure that grew or shrank beyond its tolerance, or has no other side."""


def comparison_table(changes: Mapping[str, Sequence[Change]]) -> str:
    """Return figures then and now, with marks beyond a tolerance, below each of several names."""
    every = [one for own in changes.values() for one in own]
    steps = [(one, *format_step(one.before, one.now)) for one in every]
    rows = [
        (_MARKS.get(one.verdict, ""), label(one.figure), before, "→", now, change)
        for one, before, now, change in steps
    ]
    headers = ("", "", "before", "", "now", "change")  # as the arrow says
    _, *lines = table(rows, headers).split("\n")
    if max(map(len, lines)) > width():
        narrow = [(*row[:5], row[5].partition(" (")[0]) for row in rows]
        _, *lines = table(narrow, headers).split("\n")
    found = list[str]()
    for name, own in changes.items():
        found += [f"  {printable(name)}"] if len(changes) > 1 else []
        found += lines[: len(own)]
        del lines[: len(own)]
    return "\n".join(found)


def allocation_table(allocations: Sequence[Allocation]) -> str:
    """Return the largest of ``allocations``, those alike together, and the sum of the rest."""
    from pytest_torchmem.profile.tables import alike, allocation_rows

    groups = alike(allocations)
    rows, rest = allocation_rows(groups[:_LARGEST]), groups[_LARGEST:]
    if rest:
        total = format_size(sum(group.nbytes for group in rest))
        rows.append((total, f"{sum(group.number for group in rest)} more", "", "", ""))
    shown = table(rows, ("", "kind", "what", "operator", "allocated at"))
    if max(map(len, shown.splitlines()), default=0) <= width():
        return shown
    sizes = max(len(row[0]) for row in rows)
    return "\n".join(
        line
        for size, kind, what, *who in rows
        for line in in_two_lines(
            f"  {size:>{sizes}}  ",
            *(joined(*map(printable, parts)) for parts in ((kind, what), who)),
        )
    )


def in_two_lines(start: str, what: str, where: str) -> Iterator[str]:
    """Yield what an allocation is behind ``start``, and below it who made it."""
    indent = " " * len(start)
    for text in filter(None, (what, where)):
        yield from wrapped(text, indent, start=start).split("\n")
        start = indent


def table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table, indented, without columns that are empty in every row."""
    used = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    shown = [[printable(row[i]) for i in used] for row in rows]
    lines = tabulated(shown, [headers[i] for i in used], "plain")
    return "\n".join(f"  {line}".rstrip() for line in lines)


def tabulated(
    rows: Sequence[Sequence[str]], headers: Sequence[str], style: str = "simple"
) -> list[str]:
    """Return the lines of a table, by default with a rule below its headers; sizes stand on the
    right.
    """
    from tabulate import tabulate

    sides = ["right" if header in _SIZES else "left" for header in headers]
    text = tabulate(rows, headers, style, colalign=sides, disable_numparse=True)
    return [line.rstrip() for line in text.splitlines()]


_SIZE = re.compile(
    r"(?<![\w.])(?P<sign>[+-])\d[\d.]* (?:B|KiB|MiB|GiB|TiB)\b(?: \([+-][\d.]+ %\))?"
)
_CODES = {"+": 31, "-": 32}


def coloured(text: str, stream: TextIO) -> str:
    """Return ``text`` with sizes that have a sign in colours, if ``stream`` shows these.

    ``NO_COLOR`` says that it does not (https://no-color.org), ``FORCE_COLOR`` that anything does.
    """
    shows = stream.isatty() and os.environ.get("TERM") != "dumb"
    if os.environ.get("NO_COLOR") or not (shows or os.environ.get("FORCE_COLOR")):
        return text
    return _SIZE.sub(lambda size: f"\033[{_CODES[size['sign']]}m{size[0]}\033[0m", text)
