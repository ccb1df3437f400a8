"""How wide messages are: what does not fit goes to a line of its own, and is never cut, but a long
path at its dots.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
    if (asked := _COLUMNS.get()) is not None:
        return asked
    return shutil.get_terminal_size((80, 24)).columns


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
