"""What an update makes of one file: worked out before anything is written, then written whole."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.snapshots.files import locked, remove, write
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.snapshots.store import Stored

K = TypeVar("K")
V = TypeVar("V")
Place = tuple[str, Key]
"""An entry by its file, relative to the root, and its key."""


@dataclass(frozen=True)  # as Contents
class FilePlan(Generic[K, V]):
    """A file before and after; ``problem`` says why it cannot be written at all."""

    stored: Stored[K, V]
    text: str | None = None
    """The new text; ``None`` where nothing is left to keep."""
    entries: Mapping[K, V] = field(default_factory=dict)
    """The new entries."""
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
    """Plan and, if it ``writes``, write one file while no other run does.

    What stands in the way is the plan's problem.
    """
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
    """Write a file, or leave the one of before where what is there then is not what it should be.

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
