"""Paths of modules with their numbers taken together: ``layers.3.mlp`` is one of ``layers.*.mlp``.

A deep model has as few rows as a shallow one, and another depth is one change.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

Numbers = tuple[int, ...]
"""The numbers that stand for the stars of a pattern, from left to right."""
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_MOST_PARTS = 6
ALL = "*"
"""What stands for a star's numbers where these are all that there are."""


@lru_cache(maxsize=65536)
def fold(path: str) -> tuple[str, Numbers]:
    """Return the pattern of a module's path, and the numbers in it."""
    numbers = tuple(map(int, _NUMBER.findall(path)))
    return (_NUMBER.sub("*", path), numbers) if numbers else (path, ())


def unfold(pattern: str, numbers: str) -> str:
    """Return ``pattern`` with what ``write_numbers`` wrote for its stars in their places."""
    parts = numbers.split("/") if numbers else []
    if len(parts) != pattern.count("*"):
        return pattern
    for part in parts:
        shown = part if part.isdecimal() else "\0" if part == ALL else f"{{{part}}}"
        pattern = pattern.replace("*", shown, 1)
    return pattern.replace("\0", ALL)


def prefixes(path: str) -> list[str]:
    """Return the paths of the modules that a module is in, the outermost first, and its own."""
    parts = path.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def common_parent(modules: Iterable[str]) -> str:
    """Return the path of the innermost module that all of these are in."""
    first, *others = (one.split(".") for one in modules)
    for other in others:
        same = [a == b for a, b in zip(first, other, strict=False)]
        first = first[: same.index(False)] if False in same else first[: len(same)]
    return ".".join(first)


def write_numbers(found: Iterable[Numbers]) -> str:
    """Return which numbers there are for each star: ``"0-11"``, ``"3"``, ``"0-3/0-7"``."""
    members = [one for one in found if one]
    if not members:
        return ""
    return "/".join(_ranges(sorted(set(column))) for column in zip(*members, strict=True))


def read_numbers(text: str) -> list[set[int]]:
    """Return what ``write_numbers`` wrote: the numbers of each star."""
    found: list[set[int]] = []
    for part in text.split("/") if text else ():
        if part == ALL:
            found.append(set())
            continue
        numbers: set[int] = set()
        for piece in part.split():
            first, _, last = piece.partition("-")
            if first.isdecimal() and (last or first).isdecimal():
                numbers.update(range(int(first), min(int(last or first), int(first) + 100_000) + 1))
        found.append(numbers)
    return found


def only_in(now: str, before: str) -> str:
    """Return the numbers of ``now`` that ``before`` lacks, ``now`` if all of them or none are.

    Of several stars it is the outermost that tells: its modules are there with all that is in them.
    """
    stars, known = read_numbers(now), read_numbers(before)
    if len(stars) != len(known):
        return now
    new = [star - old for star, old in zip(stars, known, strict=True)]
    changed = [index for index, numbers in enumerate(new) if numbers]
    if not changed or new[changed[0]] == stars[changed[0]]:
        return now
    stars[changed[0]] = new[changed[0]]
    return "/".join(_ranges(sorted(star)) for star in stars)


def join_numbers(texts: Iterable[str]) -> str:
    columns = zip(*(read_numbers(text) for text in texts), strict=False)
    return "/".join(_ranges(sorted(set().union(*column))) for column in columns)


def are_among(numbers: str, others: str) -> bool:
    """Tell whether all of some numbers are among others, star by star; of no stars all are."""
    stars, known = read_numbers(numbers), read_numbers(others)
    return len(stars) == len(known) and all(
        not other or (bool(star) and star <= other)
        for star, other in zip(stars, known, strict=True)
    )


def have_common(numbers: str, others: str) -> bool:
    """Tell whether numbers have some in common with others, star by star."""
    pairs = zip(read_numbers(numbers), read_numbers(others), strict=False)
    return all(not own or not other or bool(own & other) for own, other in pairs)


class EveryNumber:
    """All numbers that modules of each pattern have, to tell one block from all of them."""

    def __init__(self) -> None:
        self._found: dict[str, set[int]] = {}

    def add(self, pattern: str, numbers: str) -> None:
        for before, star in zip(_before_stars(pattern), read_numbers(numbers), strict=False):
            self._found.setdefault(before, set()).update(star)

    def marked(self, pattern: str, numbers: str) -> str:
        """Return ``numbers`` with ``ALL`` for each star whose numbers are all that there are."""
        parts = numbers.split("/") if numbers else []
        stars = zip(_before_stars(pattern), parts, strict=False)
        return "/".join(
            ALL
            if len(all_ := self._found.get(before, ())) > 1 and read_numbers(part) == [all_]
            else part
            for before, part in stars
        )


def _before_stars(pattern: str) -> list[str]:
    """Return what stands before each star of a pattern."""
    return [pattern[:at] for at, sign in enumerate(pattern) if sign == "*"]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > _MOST_PARTS:
        return f"{numbers[0]}-{numbers[-1]}"
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
