"""What an entry says of its step, as it stands in a snapshot file: one group, or fact, a line."""

from __future__ import annotations

import re
from typing import Any

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.profile.facts import TOPICS, Facts
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.outline import FULL, Outline, Stretch
from pytest_torchmem.snapshots.alive import MOMENTS, Alive, Group, What
from pytest_torchmem.snapshots.plain import size, sized, table_of
from pytest_torchmem.units import format_size

_KEYS = {"at", "groups", "rest"}
_FORMER_ROLES: dict[Any, str] = {"gradient in passing": Role.GRADIENT_TEMPORARY.value}
"""What snapshots of before call some roles."""
_TENSOR = re.compile(r"(\w+)\[([0-9, ]*)\]")
_COLUMNS = 9
"""Role, module, numbers, operator or name, tensor, line, bytes of one, counts by moment, and the
largest total for people."""


def alive_to_plain(alive: Alive) -> dict[str, Any]:
    """Return the groups as they stand in a file, of builtin types."""
    plain: dict[str, Any] = {
        "at": list(alive.moments),
        "groups": [_row(group, alive.moments) for group in alive.groups],
    }
    return plain | ({"rest": sized(alive.rest)} if alive.rest else {})


def _row(group: Group, moments: tuple[str, ...]) -> list[Any]:
    what = group.what
    largest = max((group.nbytes(moment) for moment in moments), default=0)
    return [
        what.role,
        what.module,
        group.numbers,
        what.source,
        what.tensor,
        what.line,
        what.nbytes,
        [group.counts.get(moment, 0) for moment in moments],
        format_size(largest),
    ]


def read_alive(plain: Any, where: str) -> Alive:
    """Return what ``alive_to_plain`` wrote; raises ``SnapshotError`` for anything else."""
    if not isinstance(plain, dict) or set(plain) - _KEYS:
        raise SnapshotError(f'{where}: expected an object with "at", "groups" and "rest"')
    at, groups = plain.get("at"), plain.get("groups")
    if not isinstance(at, list) or not all(
        isinstance(moment, str) and moment in MOMENTS for moment in at
    ):
        raise SnapshotError(f'{where}: "at" must be a list of {", ".join(MOMENTS)}')
    if len(set(at)) != len(at):
        raise SnapshotError(f'{where}: "at" names a moment twice')
    if not isinstance(groups, list):
        raise SnapshotError(f'{where}: "groups" must be a list')
    rest = table_of(plain.get("rest", {}), f"{where}, rest", size)
    if set(rest) - set(at):
        raise SnapshotError(f'{where}: "rest" has a moment that "at" lacks')
    found = tuple(
        _group(row, at, f"{where}: group {number}") for number, row in enumerate(groups, start=1)
    )
    return Alive(found, rest, tuple(at))


def _group(row: Any, at: list[str], where: str) -> Group:
    if not isinstance(row, list) or len(row) not in (_COLUMNS - 1, _COLUMNS):
        raise SnapshotError(f"{where} must be a list of {_COLUMNS} values")
    *texts, nbytes, counts = row[: _COLUMNS - 1]
    if not all(isinstance(text, str) for text in texts):
        raise SnapshotError(f"{where} must begin with {len(texts)} texts")
    if not isinstance(counts, list) or len(counts) != len(at):
        raise SnapshotError(f'{where} must have a count for each moment of "at"')
    numbers = [nbytes, *counts]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise SnapshotError(f"{where} has bytes or counts that are not whole numbers")
    former, module, places, source, tensor, line = texts
    role = str(_FORMER_ROLES.get(former, former))
    dtype, shape = _tensor(tensor, where)
    what = What(role, module, source, dtype, shape, line, nbytes)
    return Group(what, {m: n for m, n in zip(at, counts, strict=True) if n}, places)


def _tensor(text: str, where: str) -> tuple[str, tuple[int, ...]]:
    if not text:
        return "", ()
    match = _TENSOR.fullmatch(text)
    try:
        sizes = match.group(2).replace(" ", "") if match is not None else None
        if match is None or sizes is None:
            raise ValueError(text)
        return match.group(1), tuple(int(part) for part in sizes.split(",") if part)
    except ValueError:
        raise SnapshotError(f"{where} has {text!r}, which is no type and shape") from None


def read_facts(plain: Any, where: str) -> Facts:
    """Return the facts of an entry: texts by topic and name."""
    found = table_of(plain, where, lambda topic, place: table_of(topic, place, _text))
    return {topic: found[topic] for topic in (*TOPICS, *found) if topic in found}


def read_outline(plain: Any, where: str) -> Outline:
    """Return the course of a step's memory: lists of a phase, a number of events and shares."""
    if not isinstance(plain, list) or not all(map(_is_stretch, plain)):
        raise SnapshotError(
            f'{where} must be a list of lists such as ["forward", 120, 15, 400, {FULL}]: a phase, '
            f"its events, and shares of the peak from 0 to {FULL}"
        )
    return tuple(Stretch(phase, events, tuple(shares)) for phase, events, *shares in plain)


def _is_stretch(plain: Any) -> bool:
    if not isinstance(plain, list) or len(plain) < 3 or not isinstance(plain[0], str):
        return False
    _, events, *shares = plain
    numbers = all(type(number) is int and number >= 0 for number in (events, *shares))
    return numbers and max(shares) <= FULL


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise SnapshotError(f"{where} must be a string")
    return value
