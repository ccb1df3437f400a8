"""Snapshot files on disk: reading them, and replacing them whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.snapshots.format import Entry, Key, load
from pytest_torchmem.snapshots.location import is_calibration
from pytest_torchmem.snapshots.plain import Contents

if TYPE_CHECKING:
    from filelock import FileLock

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")
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


def read_stored(path: Path, load: Callable[[str], Contents[K, V]]) -> Stored[K, V]:
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
    return Stored(path, entries, extra, True, text, contested, conflicted=True)


def _read_text(path: Path) -> str | None:
    """Return the text of the file at ``path``, ``None`` if there is none.

    Raises ``SnapshotError`` where it cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
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
    for line in text.splitlines(keepends=True):
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


def write(path: Path, text: str) -> None:
    """Replace the file at ``path`` by ``text``, at once: a reader sees the old or the new one.

    A file that is a symbolic link stays one, and permissions stay as they are.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, _mode(target))
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_directory(target.parent)


def remove(path: Path) -> None:
    """Remove the file at ``path``, and its directory if that was the last one."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other runs from changing files beside ``path`` while the body reads, merges and writes.

    The directory itself is locked, so that no lock file is left for people to wonder about. Where
    a platform cannot lock directories (Windows), a file among the user's temporary ones is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:
        with _lock_file(path.parent):
            yield
        return
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        # Some network file systems refuse to lock; a write is then still atomic.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _lock_file(directory: Path) -> FileLock:
    """Return the lock that stands for ``directory`` where it cannot be locked itself."""
    from filelock import FileLock

    name = os.path.normcase(os.path.realpath(directory))
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"torchmem-{digest}.lock")


def _advice(path: Path, problem: str) -> str:
    return (
        f"{path}: {problem}. The file was left as it is: repair it, restore it from version "
        f"control (git checkout -- {path.name}), or delete it and run pytest --torchmem-update"
    )


def _mode(target: Path) -> int:
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def _sync_directory(directory: Path) -> None:
    """Make the replacement itself durable, where the platform lets a directory be synchronised."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
