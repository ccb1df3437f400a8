"""Snapshot files as they are on disk, merge conflicts included."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.snapshots.files import FileContents, read_text
from pytest_torchmem.snapshots.format import Entry, Key, load
from pytest_torchmem.snapshots.location import is_calibration

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
_TEST = re.compile(r'"test"\s*:\s*("(?:[^"\\]|\\.)*")')
_CONFLICT = re.compile(r"^(<{7}|\|{7}|={7}|>{7})(?: .*)?\r?$", re.MULTILINE)
"""Conflict markers; no line of a snapshot looks like one."""


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
        """The keys of all entries, contested ones included."""
        return {*self.entries, *self.contested}

    @property
    def conflict_message(self) -> str:
        """What to tell people about a merge conflict."""
        where = " on a machine with the GPU" if is_calibration(self.path) else ""
        return (
            f"{self.path} has an unresolved merge conflict. Do not merge it by hand: run pytest "
            f"--torchmem-update{where} for the tests whose entries differ"
        )


StoredSnapshot = Stored[Key, Entry]


def read(path: Path) -> StoredSnapshot:
    """Return what the snapshot file at ``path`` holds; see ``read_stored``."""
    return read_stored(path, load)


def read_stored(path: Path, load: Callable[[str], FileContents[K, V]]) -> Stored[K, V]:
    """Return what the file at ``path`` holds, nothing if there is none.

    Raises ``SnapshotError`` for a file that cannot be read or understood. A merge conflict is no
    error where both sides are whole: what they agree on are the entries.
    """
    text = _read_text(path)
    if text is None:
        return Stored(path)
    ours, *others = _load_sides(path, text, load)
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


def _read_text(path: Path) -> str | None:
    """Return the text of the file at ``path``, ``None`` if there is none.

    Raises ``SnapshotError`` where it cannot be read.
    """
    try:
        return read_text(path)
    except UnicodeDecodeError:
        raise SnapshotError(_advice(path, "is not UTF-8 text")) from None
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror or error}") from None


def _load_sides(path: Path, text: str, load: Callable[[str], T]) -> tuple[T, ...]:
    """Return what ``text`` holds, or what both sides of a merge conflict hold."""
    conflict = _CONFLICT.search(text) is not None
    try:
        return tuple(map(load, _sides(text) if conflict else (text,)))
    except SnapshotError as error:
        problem = f"has an unresolved merge conflict, and one side {error}"
        raise SnapshotError(_advice(path, problem if conflict else str(error))) from None


def _sides(text: str) -> tuple[str, str]:
    """Return a file with conflict markers as it was on either side.

    The common ancestor that git's ``diff3`` style adds is dropped. Raises ``SnapshotError`` where
    markers are torn.
    """
    ours: list[str] = []
    theirs: list[str] = []
    state = "both"
    follows = {"<": ("both", "ours"), "|": ("ours", "base"), ">": ("theirs", "both")}
    for line in re.findall(r".*\n|.+", text):  # nothing else ends one: an id may have U+2028
        match = _CONFLICT.match(line)
        if match is None:
            if state in ("both", "ours"):
                ours.append(line)
            if state in ("both", "theirs"):
                theirs.append(line)
            continue
        sign = match.group(1)[0]
        expected, after = follows.get(sign, (state, "theirs"))
        if state != expected or (sign == "=" and state not in ("ours", "base")):
            raise SnapshotError("has mismatched conflict markers")
        state = after
    if state != "both":
        raise SnapshotError("has mismatched conflict markers")
    return "".join(ours), "".join(theirs)


def _advice(path: Path, problem: str) -> str:
    if path.suffix != ".json":  # a file of the program, named by mistake
        return f"{path}: {problem}"
    return (
        f"{path}: {problem}. The file was left as it is: repair it, restore it from version "
        f"control (git checkout -- {path.name}), or delete it and run pytest --torchmem-update"
    )
