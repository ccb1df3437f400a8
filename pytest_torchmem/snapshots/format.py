"""The format of a snapshot file: entries to text and back.

A file holds one block per test, name and device, sorted, one value, group or fact a line, with
sizes readable beside the exact bytes, and nothing that changes without a cause. People may write
``tolerance`` and ``reason`` into an entry, or keys of their own: an update keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.figures import FIGURES, MEASURED, PEAKS
from pytest_torchmem.printable import printable
from pytest_torchmem.profile import facts
from pytest_torchmem.profile.facts import FULL, Facts, Outline, Stretch, Topic
from pytest_torchmem.profile.timeline import ComputedLater, Later, Role
from pytest_torchmem.snapshots.alive import MOMENTS, Alive, Group, What
from pytest_torchmem.snapshots.files import (
    FileContents,
    dump_file,
    parse_file,
    size,
    sized,
    table_of,
    texts_of,
)
from pytest_torchmem.snapshots.tolerance import parse_rules
from pytest_torchmem.units import MOST, format_size

_KEYS = {"at", "groups", "rest"}
_FORMER_ROLES: dict[Any, str] = {"gradient in passing": Role.GRADIENT_TEMPORARY.value}
"""What snapshots of before call some roles."""
_TENSOR = re.compile(r"(\w+)\[((?:[0-9]{1,19}(?:, ?|(?=\])))*)\]")
_COLUMNS = 9
"""Role, module, numbers, operator or name, tensor, line, bytes of one, counts by moment, and the
largest total for people."""


def alive_to_plain(alive: Alive) -> dict[str, Any]:
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
    if match is None:
        raise SnapshotError(f"{where} has {text!r}, which is no type and shape")
    return match[1], tuple(int(part) for part in match[2].split(",") if part)


def read_facts(plain: Any, where: str, *, older: bool = False) -> Facts:
    """Return the facts of an entry, by topic and name; in ``older`` files they are texts."""
    try:
        if older:
            from pytest_torchmem.snapshots.older import upgraded_facts

            plain = upgraded_facts(plain)
        return facts.read_facts(plain)
    except (AttributeError, LookupError, ValueError) as error:
        raise SnapshotError(f"{where}: {error}") from None


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


SCHEMA = 4
"""2: what was alive at each peak, in groups, and what the step was run with; 3: the course of the
step's memory; 4: facts are lists and objects."""
IDENTITY = ("test", "name", "device", "gpu", "torch_series")
_WORLD = ("world_size", "rank")
_TEXTS = ("torch", "workload")
_FORMER = tuple(f"at_{peak}" for peak in PEAKS)
"""Keys that schema 1 wrote, which are left out."""
_OTHERS = ("reason", "tolerance", "measured", "alive", "facts", "timeline", "grew")
_MOST_TOLD = 6
"""Causes that an entry keeps: those of a pull request that was updated several times."""


class Told(NamedTuple):
    """What a run said of a growth: the figure, its bytes before and now, why, and where."""

    moment: str
    before: int
    now: int
    why: str
    where: str


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What an entry is about: everything that changes the bytes, and nothing else."""

    test: str
    """The test's id within its module, the whole parameter id included."""
    name: str = ""
    device: str = ""
    gpu: str = ""
    torch_series: str = ""
    """The minor version of torch, such as "2.13", where entries are kept per version."""
    world_size: int = 0
    """How many processes a distributed step runs in; 0 for any other step."""
    rank: int = 0

    @property
    def where(self) -> str:
        """The device as people read it: "cpu", "cuda (h100)", "cpu, rank 3 of 8"."""
        device = f"{self.device} ({self.gpu})" if self.gpu else self.device
        return f"{device}, rank {self.rank} of {self.world_size}" if self.world_size else device

    def __str__(self) -> str:
        parts = [self.test, self.name, self.where]
        if self.torch_series:
            parts.append(f"torch {self.torch_series}")
        return printable(" · ".join(part for part in parts if part))


@dataclass(frozen=True, slots=True)
class Measured:
    """The peaks of the same step on a real GPU, and the torch that ran it."""

    torch: str
    figures: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Entry(ComputedLater):
    """One test, name and device: its figures, facts that explain them, and comments of people.

    What explains the figures of a trace is computed when it is read: a check that passes needs
    none of it.
    """

    key: Key
    torch: str
    workload: str
    """A digest of the inputs' geometry and the parameters' bytes; empty where nothing is known."""
    figures: Mapping[str, int]
    alive: Alive | None = None
    """What was alive at the peaks; ``None`` where it was not recorded."""
    facts: Facts = field(default_factory=dict)
    timeline: Outline = ()
    tolerance: Any = None
    reason: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of their own that people wrote, kept as they are."""
    measured: Mapping[str, Measured] = field(default_factory=dict)
    """What real GPUs counted, by their names in the catalogue."""
    grew: tuple[Told, ...] = ()
    """What runs said of each growth since it last shrank: they knew more than snapshots do."""
    _later: dict[str, Later] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._put_off("alive", "facts", "timeline")

    @property
    def is_annotated(self) -> bool:
        """Whether people wrote something into this entry."""
        return self.tolerance is not None or self.reason is not None or bool(self.extra)

    def unexplained(self) -> Entry:
        return replace(self, alive=None, facts={}, timeline=())

    def same_trace(self, other: Entry) -> bool:
        return self.figures == other.figures and self.workload == other.workload

    def same_measurement(self, other: Entry) -> bool:
        """Tell whether figures and workload are the same, and what ``other`` knows of real GPUs.

        Another torch version, or another attribution of the same bytes, is no reason to rewrite an
        entry: a file that changes without a cause is not read any more. Nor is that ``other`` was
        measured on fewer GPUs. That it does not say what was alive, and when, or what code there
        was, is one.
        """
        recorded = self.alive is not None or other.alive is None
        recorded = recorded and (bool(self.timeline) or not other.timeline)
        recorded = recorded and (bool(self.facts) or not other.facts)
        recorded = recorded and (Topic.CODE in self.facts or Topic.CODE not in other.facts)
        return (
            recorded
            and self.same_trace(other)
            and all(
                gpu in self.measured and self.measured[gpu].figures == found.figures
                for gpu, found in other.measured.items()
            )
        )

    def to_plain(self) -> dict[str, Any]:
        identity = {name: getattr(self.key, name) for name in IDENTITY}
        plain: dict[str, Any] = {name: value for name, value in identity.items() if value}
        if self.key.world_size:
            plain |= {name: getattr(self.key, name) for name in _WORLD}
        plain["torch"] = self.torch
        plain |= {"workload": self.workload} if self.workload else {}
        notes = {"tolerance": self.tolerance, "reason": self.reason}
        plain |= {name: value for name, value in notes.items() if value is not None}
        plain.update({key: self.extra[key] for key in sorted(self.extra)})
        plain.update(sized(_in_order(self.figures)))
        if self.grew:
            plain["grew"] = [
                [one.moment, *sized({"before": one.before, "now": one.now}).values(), *one[3:]]
                for one in self.grew
            ]
        if self.facts:
            plain["facts"] = {topic: dict(known) for topic, known in self.facts.items()}
        if self.timeline:
            plain["timeline"] = [[*one[:2], *one.shares] for one in self.timeline]
        if self.alive is not None:
            plain["alive"] = alive_to_plain(self.alive)
        if self.measured:
            plain["measured"] = {
                gpu: {"torch": found.torch, **sized(_in_order(found.figures))}
                for gpu, found in sorted(self.measured.items())
            }
        return plain


Snapshot = FileContents[Key, Entry]


def dump(snapshot: Snapshot) -> str:
    """Return the text of a file; equal contents give equal text."""
    blocks = [snapshot.entries[key].to_plain() for key in sorted(snapshot.entries)]
    extra = {key: snapshot.extra[key] for key in sorted(snapshot.extra)}
    return dump_file({"schema": SCHEMA, **extra}, "entries", blocks)


def load(text: str) -> Snapshot:
    """Return what a file's ``text`` holds; raises ``SnapshotError`` that says what is wrong."""
    data = parse_file(text, "snapshot", SCHEMA, "entries")
    entries: dict[Key, Entry] = {}
    for number, plain in enumerate(data["entries"], start=1):
        entry = _entry(plain, f"entry {number}", data["schema"])
        if entry.key in entries:
            raise SnapshotError(f"has two entries for {entry.key}. Remove one of them")
        entries[entry.key] = entry
    extra = {key: value for key, value in data.items() if key not in ("schema", "entries")}
    return FileContents(entries, extra)


def _entry(plain: Any, where: str, schema: int) -> Entry:
    test = plain.get("test") if isinstance(plain, dict) else None
    if isinstance(test, str) and test:
        where = f"the entry of {test}"
    texts = texts_of(plain, (*IDENTITY, *_TEXTS), ("test", "device", "torch"), where)
    reason = plain.get("reason")
    if reason is not None:
        texts_of(plain, ("reason",), (), where)
    tolerance = plain.get("tolerance")
    try:
        parse_rules(tolerance, f"the tolerance in {where}")
    except UsageError as error:
        raise SnapshotError(str(error)) from None
    if "peak" not in plain:
        raise SnapshotError(f'{where} has no "peak"')
    known = {*IDENTITY, *_WORLD, *_TEXTS, *FIGURES, *_OTHERS, *_FORMER}
    return Entry(
        key=read_key(plain, texts, where),
        torch=texts["torch"],
        workload=texts["workload"],
        figures=table_of({n: plain[n] for n in FIGURES if n in plain}, where, size),
        alive=read_alive(plain["alive"], f"{where}, alive") if "alive" in plain else None,
        facts=read_facts(
            plain.get("facts", {}) if schema > 2 else {},  # of before, many topics lack
            f"{where}, facts",
            older=schema < SCHEMA,
        ),
        timeline=read_outline(plain.get("timeline", []), f"{where}, timeline"),
        tolerance=tolerance,
        reason=reason,
        extra={key: value for key, value in plain.items() if key not in known},
        measured=table_of(plain.get("measured", {}), f"{where}, measured", _measured, " of GPUs"),
        grew=read_told(plain.get("grew"), f"{where}, grew"),
    )


def read_told(plain: Any, where: str) -> tuple[Told, ...]:
    """Return what was said of growths; older files have an object for the last one alone."""
    found = []
    for one in plain if isinstance(plain, list) else [plain or {}]:
        if isinstance(one, list) and len(one) != len(Told._fields):
            raise SnapshotError(f"{where}: expected lists of {', '.join(Told._fields)}")
        row = dict(zip(Told._fields, one, strict=True)) if isinstance(one, list) else one
        texts = texts_of(row, ("moment", "why", "where"), (), where)
        if texts["why"]:
            before, now = (size(row.get(name), f"{where}: {name}") for name in ("before", "now"))
            found.append(Told(texts["moment"], before, now, texts["why"], texts["where"]))
    return tuple(found)


def read_key(plain: Any, texts: Mapping[str, str], where: str) -> Key:
    size, rank = (plain.get(name, 0) for name in _WORLD)
    numbers = type(size) is int and type(rank) is int and 0 <= size <= MOST
    if not numbers or not 0 <= rank < max(size, 1):
        raise SnapshotError(f'{where}: "world_size" must be a number, and "rank" one below it')
    named: dict[str, Any] = {name: texts[name] for name in IDENTITY}
    return Key(**named, world_size=size, rank=rank)


def _measured(plain: Any, where: str) -> Measured:
    version = plain.get("torch") if isinstance(plain, dict) else None
    if not isinstance(version, str) or not version or set(plain) - {"torch", *MEASURED}:
        names = ", ".join(MEASURED)
        raise SnapshotError(f'{where}: expected an object with "torch" and {names}')
    figures = {name: plain[name] for name in MEASURED if name in plain}
    return Measured(version, table_of(figures, where, size))


def _in_order(figures: Mapping[str, int]) -> dict[str, int]:
    return {name: figures[name] for name in FIGURES if name in figures}


def merged(entry: Entry, before: Entry | None) -> Entry:
    """Return ``entry`` with what people wrote into ``before``, and what GPUs counted of it.

    What GPUs counted is of the step as it was, so it is kept only where the trace is the same. Why
    it grew is kept until a figure shrinks: then nobody knows which growth has gone.
    """
    if before is None:
        return entry
    same = before.same_trace(entry)
    measured = {**(before.measured if same else {}), **entry.measured}
    figures, known = entry.figures, before.grew
    if any(figures.get(one.moment, 0) < one.now - (one.now - one.before) // 10 for one in known):
        known = ()  # one has lost a tenth of what it grew by
    grew = (*dict.fromkeys((*known, *entry.grew)),)[-_MOST_TOLD:]  # a proposal has both
    return replace(with_notes(entry, before), measured=measured, grew=grew)


def notes_of(entry: Entry) -> dict[str, Any]:
    ours = {"tolerance": entry.tolerance, "reason": entry.reason}
    return {key: value for key, value in ours.items() if value is not None} | dict(entry.extra)


def with_notes(entry: Entry, annotated: Entry) -> Entry:
    """Return ``entry`` with what people wrote into ``annotated``."""
    return replace(
        entry, tolerance=annotated.tolerance, reason=annotated.reason, extra=annotated.extra
    )
