"""Files that a program maps into memory, whose contents are read where they are asked for.

What a trace wrote without knowing it reads as zeros, and is not known either.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

_address: Any = torch.UntypedStorage.data_ptr
"""Where a storage is, also while a trace says otherwise."""

Region = tuple[int, int]
"""The first byte of a part of a file, and the first one after it."""

_Identity = tuple[int, int, int, int]


class _Mapped(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    unknown: Sequence[Region]


class WrittenFiles:
    """The files that traces of this process wrote, and the regions of which nothing is known."""

    def __init__(self) -> None:
        self._regions: dict[_Identity, tuple[Region, ...]] = {}

    def note(self, path: str | os.PathLike[str], regions: Sequence[Region]) -> None:
        """Remember the regions of a file that was just written."""
        found = _identity(path)
        if found is not None:
            self._regions[found] = tuple(regions)

    def unknown(self, path: str | os.PathLike[str]) -> tuple[Region, ...]:
        """Return the regions of a file, while it is as it was written."""
        found = _identity(path)
        return () if found is None else self._regions.get(found, ())


WRITTEN = WrittenFiles()


def _identity(path: str | os.PathLike[str]) -> _Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class MappedFiles:
    """The files that are mapped in one trace."""

    def __init__(self) -> None:
        self._files: list[_Mapped] = []

    def add(self, storage: torch.UntypedStorage, unknown: Sequence[Region]) -> None:
        """Take note of a file that was mapped as a whole."""
        self._files.append(_Mapped(weakref.ref(storage), unknown))

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage lies in a mapped file, which lives as long as it does."""
        return self._find(storage) is not None

    def is_known(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the file, where a storage lies in one, says what the storage holds."""
        found = self._find(storage)
        if found is None:
            return True
        start, regions = found
        end = start + storage.nbytes()
        return not any(start < stop and first < end for first, stop in regions)

    def _find(self, storage: torch.UntypedStorage) -> tuple[int, Sequence[Region]] | None:
        if not self._files:
            return None
        self._files = [file for file in self._files if file.storage() is not None]
        try:
            address = _address(storage)
        except RuntimeError:  # it has no memory
            return None
        for reference, regions in self._files:
            file = reference()
            if file is not None and 0 <= address - _address(file) < file.nbytes():
                return address - _address(file), regions
        return None
