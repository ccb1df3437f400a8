"""Which line of a snapshot is which line now: an edit above it moves all that stand below."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

from pytest_torchmem.snapshots.alive import What


def moved_lines(before: Iterable[What], now: Iterable[What]) -> dict[str, str]:
    """Return by the lines of a snapshot what they are now, where as much is there as was.

    Of each file the operators of both are laid side by side in the order of their lines, as
    ``diff`` does with the lines themselves, which a snapshot does not keep.
    """
    old, new = _by_file(before), _by_file(now)
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


def _by_file(whats: Iterable[What]) -> dict[str, set[tuple[int, str, str]]]:
    found: dict[str, set[tuple[int, str, str]]] = {}
    for one in whats:
        file, _, number = one.line.rpartition(":")
        if number.isdecimal():
            found.setdefault(file, set()).add((int(number), one.module, one.source))
    return found
