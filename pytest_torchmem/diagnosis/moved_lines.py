"""Which line of a snapshot is which line now: an edit above it moves all that stand below."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from pytest_torchmem.snapshots.alive import Group


def moved_lines(before: Iterable[Group], now: Iterable[Group]) -> dict[str, str]:
    """Return by the lines of a snapshot what they are now, where as much is there as was.

    Of each file the operators of both are laid side by side in the order of their lines, as
    ``diff`` does with the lines themselves, which a snapshot does not keep. Those of the same
    modules come first: the next of two loops over layers is not the one before.
    """
    then, there = [*before], [*now]
    return _moved(then, there, of_numbers=False) | _moved(then, there, of_numbers=True)


def _moved(before: list[Group], now: list[Group], *, of_numbers: bool) -> dict[str, str]:
    old, new = _by_file(before, of_numbers), _by_file(now, of_numbers)
    found: dict[str, str] = {}
    for file in old.keys() & new.keys():
        then, there = sorted(old[file]), sorted(new[file])
        names = [one[1:] for one in then], [one[1:] for one in there]
        for start, other, size in SequenceMatcher(
            None, *names, autojunk=False
        ).get_matching_blocks():
            for a, b in zip(then[start : start + size], there[other : other + size], strict=True):
                found.setdefault(f"{file}:{a[0]}", f"{file}:{b[0]}")
    return found


def _by_file(
    groups: Iterable[Group], of_numbers: bool
) -> dict[str, set[tuple[int, str, str, str]]]:
    found: dict[str, set[tuple[int, str, str, str]]] = {}
    for group in groups:
        one = group.what
        file, _, number = one.line.rpartition(":")
        if number.isdecimal():
            numbers = group.numbers if of_numbers else ""
            own = int(number), one.module, one.source, numbers
            found.setdefault(file, set()).add(own)
    return found
