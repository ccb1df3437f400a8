"""Text as it is shown: of others' making (names, files, versions), paths, tables of results."""

import os
from collections.abc import Iterable, Sequence


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


def counted(number: int, what: str) -> str:
    """Return how many there are of something: "1 test", "2 entries"."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what[:-1]}ies" if what.endswith("ry") else f"{number} {what}s"


def first_of(several: Iterable[object]) -> str:
    """Return the first of several, and how many others there are: "test_net and 2 more"."""
    first, *others = several
    return f"{first} and {len(others)} more" if others else f"{first}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names in words, of many the first ones: "a, b and c", "a, b, c and 4 more"."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def working_directory() -> str:
    """Return the working directory, or "" where it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def shown(path: str) -> str:
    """Return a path as it reads from the working directory, if there is one."""
    here = working_directory()
    return os.path.relpath(path, here) if here else path


class Tabular:
    """A result that ``print`` and notebooks show as its table."""

    __slots__ = ()

    def table(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        from html import escape  # for notebooks alone

        return f"<pre>{escape(self.table())}</pre>"
