"""Snapshot files on disk, merge conflicts included, and what an update changes in one."""

import errno
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.snapshots.files import FileContents, locked, read_text, remove, write
from pytest_torchmem.snapshots.format import Entry, Key, Snapshot, dump, load, merged, with_notes
from pytest_torchmem.snapshots.location import is_calibration

K = TypeVar("K")
V = TypeVar("V")
_TEST = re.compile(r'"test"\s*:\s*("(?:[^"\\]|\\.)*")')
_CONFLICT = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?: .*)?\r?$", re.MULTILINE)
"""Conflict markers; no line of a snapshot looks like one."""
_END = r"(?: .*)?\r?$\n?"
_LINES = r"((?:(?!(?:<{7}|\|{7}|={7}|>{7})(?: |\r?$)).*\n)*)"
_IN_CONFLICT = re.compile(
    rf"^<{{7}}{_END}{_LINES}(?:\|{{7}}{_END}{_LINES})?={{7}}{_END}{_LINES}>{{7}}{_END}",
    re.MULTILINE,
)
"""From marker to marker: what one side has, the common ancestor, and the other side."""


@dataclass(frozen=True)  # as Contents
class Stored(Generic[K, V]):
    """What a file holds. In a merge conflict, ``contested`` has the keys whose sides differ."""

    path: Path
    entries: Mapping[K, V] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    exists: bool = False
    text: str = ""
    contested: Mapping[K, tuple[V, V]] = field(default_factory=dict)
    conflicted: bool = False
    contested_extra: tuple[str, ...] = ()
    """Keys at the top of the file that people wrote, whose sides differ."""

    @property
    def keys(self) -> set[K]:
        return {*self.entries, *self.contested}

    @property
    def conflict_message(self) -> str:
        where = " on a machine with the GPU" if is_calibration(self.path) else ""
        return (
            f"{self.path} has an unresolved merge conflict. Do not merge it by hand: run pytest "
            f"--torchmem-update{where} for the tests whose entries differ"
        )


StoredSnapshot = Stored[Key, Entry]


def read(path: Path) -> StoredSnapshot:
    return read_stored(path, load)


def read_stored(path: Path, load: Callable[[str], FileContents[K, V]]) -> Stored[K, V]:
    """Return what the file at ``path`` holds, nothing if there is none.

    Raises ``SnapshotError`` for a file that cannot be read or understood. A merge conflict is no
    error where both sides are whole: what they agree on are the entries.
    """
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        raise SnapshotError(_advice(path, "is not UTF-8 text")) from None
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror or error}") from None
    if text is None:
        return Stored(path)
    conflict = _CONFLICT.search(text) is not None
    try:
        sides = [text]
        if conflict:  # the common ancestor that git's ``diff3`` style adds is dropped
            sides = [_IN_CONFLICT.sub(side, text) for side in (r"\1", r"\3")]
            if any(map(_CONFLICT.search, sides)):
                raise SnapshotError("has mismatched conflict markers")
        ours, *others = map(load, sides)
    except SnapshotError as error:
        problem = f"has an unresolved merge conflict, and one side {error}"
        raise SnapshotError(_advice(path, problem if conflict else str(error))) from None
    if not others:
        return Stored(path, ours.entries, ours.extra, True, text)
    theirs = others[0]
    # An entry that only one side has was added there, or removed on the other: keeping it loses
    # nothing, and one that is really gone will be found obsolete.
    contested = {
        key: (entry, theirs.entries[key])
        for key, entry in ours.entries.items()
        if theirs.entries.get(key, entry) != entry
    }
    agreed = {**theirs.entries, **ours.entries}
    entries = {key: entry for key, entry in agreed.items() if key not in contested}
    extra = {**theirs.extra, **ours.extra}
    both = set(ours.extra) & set(theirs.extra)
    apart = tuple(sorted(key for key in both if ours.extra[key] != theirs.extra[key]))
    return Stored(path, entries, extra, True, text, contested, True, apart)


def tests_named_in(path: Path) -> list[str]:
    """Return the ids of tests in a snapshot file, without understanding anything else of it."""
    try:
        text = read_text(path) or ""
        return sorted({json.loads(found) for found in _TEST.findall(text)})
    except (OSError, ValueError):
        return []


def _advice(path: Path, problem: str) -> str:
    if path.suffix != ".json":  # a file of the program, named by mistake
        return f"{path}: {problem}"
    return (
        f"{path}: {problem}. The file was left as it is: repair it, restore it from version "
        f"control (git checkout -- {path.name}), or delete it and run pytest --torchmem-update"
    )


Place = tuple[str, Key]
"""An entry by its file, relative to the root, and its key."""


@dataclass(frozen=True)  # as Contents
class FilePlan(Generic[K, V]):
    """A file before and after; ``problem`` says why it cannot be written at all."""

    stored: Stored[K, V]
    text: str | None = None
    """The new text; ``None`` where nothing is left to keep."""
    entries: Mapping[K, V] = field(default_factory=dict)
    added: tuple[K, ...] = ()
    changed: tuple[K, ...] = ()
    removed: tuple[K, ...] = ()
    renamed: tuple[tuple[K, K], ...] = ()
    moved: tuple[tuple[K, Place], ...] = ()
    """Entries that live on in another file."""
    dropped: Mapping[str, Any] = field(default_factory=dict)
    """What people wrote at the top of a file that goes, where no other file has it."""
    problem: str = ""

    @property
    def changes_file(self) -> bool:
        """Whether there is anything to write. Other line endings alone are no reason to."""
        if self.problem or self.text is None:
            return not self.problem and self.stored.exists
        return self.text != self.stored.text.replace("\r\n", "\n")


def change_file(
    path: Path,
    read: Callable[[Path], Stored[K, V]],
    plan: Callable[[Stored[K, V]], FilePlan[K, V]],
    *,
    writes: bool,
) -> FilePlan[K, V]:
    """Plan and, if it ``writes``, write a file while no other run does; problems are the plan's."""
    try:
        if not writes:
            return plan(read(path))
        with locked(path):
            planned = plan(read(path))
            if planned.changes_file:
                if planned.text is None:
                    remove(path)
                else:
                    _write_readable(path, planned.text, planned.stored, read)
    except SnapshotError as error:
        return FilePlan(Stored(path), problem=str(error))
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        return FilePlan(Stored(path), problem=problem)
    return planned


def _write_readable(
    path: Path, text: str, before: Stored[K, V], read: Callable[[Path], Stored[K, V]]
) -> None:
    """Write a file and read it back; restore the previous one if the two differ.

    A test may have replaced what files are made with (``json.dumps``, ``os.replace``) for good.
    """
    write(path, text)
    why = ""
    try:
        if read(path).text != text:
            why = "it does not hold what was written"
    except SnapshotError as error:
        why = str(error)
    if why:
        if before.exists:
            write(path, before.text)
        else:
            remove(path)
        raise OSError(errno.EIO, f"what was there stays, since {why}", str(path))


def refused(stored: Stored[K, V], why: str, keys: Sequence[object], advice: str) -> FilePlan[K, V]:
    """Return the plan of a file whose merge conflict an update cannot resolve for ``keys``."""
    names = ", ".join(map(str, keys[:5])) + (f" and {len(keys) - 5} more" if keys[5:] else "")
    return FilePlan(stored, problem=f"{stored.path} was left as it is: {why}: {names}. {advice}")


SnapshotPlan = FilePlan[Key, Entry]


def plan_file(
    stored: StoredSnapshot,
    accepted: Iterable[Entry],
    obsolete: Iterable[Key],
    *,
    gone: Iterable[Key] = (),
    inherited: Mapping[Key, Entry] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> SnapshotPlan:
    """Return what the ``accepted`` entries and the removal of ``obsolete`` keys make of a file.

    What people wrote into an entry is kept, also where its test was renamed: a new entry beside an
    obsolete one of the same workload, name and device takes it over, and a version's first entry
    what was written into the one for all versions. Keys that are ``gone`` may be
    taken over too, and stay where nothing takes them over. ``inherited`` has what new entries take
    over from other files, ``extra`` what people wrote at the top of one.
    """
    accepted, old, inherited = list(accepted), stored.entries, inherited or {}
    refusal = _refusal(stored, {entry.key for entry in accepted})
    if refusal is not None:
        return refusal
    obsolete = sorted(set(obsolete) & set(old))
    gone = sorted(set(gone) & set(old) - set(obsolete))
    entries = {key: entry for key, entry in old.items() if key not in obsolete}
    added, changed = [], []
    for entry in accepted:
        key, taken = entry.key, inherited.get(entry.key)
        before = _settled(stored.contested[key], entry) if key in stored.contested else old.get(key)
        if before is None:
            other = old.get(replace(key, torch_series="")) if key.torch_series else None
            entries[key] = taken_over(entry, taken) if taken is not None else merged(entry, other)
            added.append(key)
        elif key in stored.contested or not before.same_measurement(entry):
            entries[key] = merged(entry, before)
            changed.append(key)
    new = [entries[key] for key in added if key not in inherited]
    renamed = renames([old[key] for key in (*obsolete, *gone)], new)
    for before_key, after_key in renamed:
        entries[after_key] = taken_over(entries[after_key], old[before_key])
        entries.pop(before_key, None)
    extra = {**(extra or {}), **stored.extra}
    text = dump(Snapshot(entries, extra)) if entries or extra else None
    moved_from, moved_to = {pair[0] for pair in renamed}, {pair[1] for pair in renamed}
    return FilePlan(
        stored,
        text,
        entries,
        added=tuple(sorted(key for key in added if key not in moved_to and key not in inherited)),
        changed=tuple(sorted(changed)),
        removed=tuple(key for key in obsolete if key not in moved_from),
        renamed=tuple(renamed),
    )


def plan_moved(
    stored: StoredSnapshot,
    moved: Mapping[Key, Place],
    removed: Iterable[Key] = (),
    *,
    module_is_gone: bool,
    extra_lives_on: bool = False,
) -> SnapshotPlan:
    """Return what is left of a file some of whose entries live on in others.

    Where its module is gone, the file goes with its last entry. ``extra_lives_on`` tells whether
    what people wrote at its top stands in another file.
    """
    removed = sorted(set(removed) - set(moved))
    going = {*moved, *removed}
    left = {key: entry for key, entry in stored.entries.items() if key not in going}
    if set(stored.contested) - going or stored.contested_extra:
        return FilePlan(stored, problem=stored.conflict_message)
    stays = bool(left or (stored.extra and not module_is_gone))
    return FilePlan(
        stored,
        dump(Snapshot(left, stored.extra)) if stays else None,
        left,
        removed=tuple(removed),
        moved=tuple(sorted(moved.items())),
        dropped={} if stays or extra_lives_on else stored.extra,
    )


def taken_over(new: Entry, old: Entry) -> Entry:
    """Return ``new`` with what people wrote into ``old``, which is the same test's of another name.

    Where the measurement is the same all of the old entry is kept, so that a rename shows as one.
    """
    return replace(old, key=new.key) if old.same_measurement(new) else merged(new, old)


def renames(gone: Sequence[Entry], new: Sequence[Entry]) -> list[tuple[Key, Key]]:
    """Return the new entry of each renamed one, where the match is unambiguous."""
    places = [("", entry) for entry in gone], [("", entry) for entry in new]
    found = moves(*places, certain=True)
    return [(old[1], found[old][1]) for old in sorted(found)]


def moves(
    gone: Sequence[tuple[str, Entry]], new: Sequence[tuple[str, Entry]], *, certain: bool
) -> dict[Place, Place]:
    """Return which gone entries of some files live on as which new ones, and where.

    The same test in another file is the same one if the workload is. A test of another name is
    taken for the same one where no other is like it, and where it is ``certain`` that ``gone`` and
    ``new`` are all there are.
    """

    def likeness(entry: Entry) -> tuple[object, ...]:
        return (entry.workload, replace(entry.key, test=""))

    def same_test(entry: Entry) -> tuple[object, ...]:
        return (entry.key.test, *likeness(entry))

    found: dict[Place, Place] = {}
    for alike in (same_test, likeness) if certain else (same_test,):
        taken = set(found.values())
        olds, news = defaultdict[Any, list[Place]](list), defaultdict[Any, list[Place]](list)
        for file, entry in gone:
            if entry.workload and (file, entry.key) not in found:
                olds[alike(entry)].append((file, entry.key))
        for file, entry in new:
            if (file, entry.key) not in taken:
                news[alike(entry)].append((file, entry.key))
        for likes, places in olds.items():
            if len(places) == len(news[likes]) == 1:
                found[places[0]] = news[likes][0]
    return found


def _refusal(stored: StoredSnapshot, accepted: set[Key]) -> SnapshotPlan | None:
    """Return why an update with ``accepted`` entries cannot settle the file's merge conflict."""
    contested = stored.contested
    left = sorted(set(contested) - accepted)
    apart = sorted(key for key, sides in contested.items() if _notes(*sides) is None)
    sides, by_hand = "the sides of its merge conflict differ", "Resolve it by hand"
    run = "Run pytest --torchmem-update on the whole test module, or resolve it by hand"
    refusals: tuple[tuple[str, Sequence[object], str], ...] = (
        (f"{sides}, and the tests did not run, for", left, run),
        (f"{sides} at their top, in", stored.contested_extra, by_hand),
        ("both sides of its merge conflict have notes, which differ, on", apart, by_hand),
    )
    return next((refused(stored, why, keys, how) for why, keys, how in refusals if keys), None)


def _settled(sides: tuple[Entry, Entry], now: Entry) -> Entry | None:
    """Return the side that is as it is now, if there is one, with the notes to keep."""
    notes = _notes(*sides)
    same = next((side for side in sides if side.same_trace(now)), None)
    return with_notes(same, notes) if same is not None and notes is not None else notes


def _notes(ours: Entry, theirs: Entry) -> Entry | None:
    """Return the side whose notes to keep, or ``None`` where both have some and they differ."""
    if not theirs.is_annotated or with_notes(ours, theirs) == ours:
        return ours
    return None if ours.is_annotated else theirs
