"""Text of others' making (names, files, versions) on a terminal, and wherever else it is shown."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return ``text`` as one line that moves no cursor and hides nothing.

    Line ends, escapes and all else that is not seen is written out: ``"\n"``, ``"\x1b"``.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def printable_lines(text: str) -> str:
    """Return ``text`` as ``printable`` does, except that its line ends stay."""
    return "\n".join(map(printable, text.split("\n")))
