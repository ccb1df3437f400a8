"""Files of ``torch.save``: what is not known leaves a hole in them, and is read as unknown again.

A hole takes no space on the disk and reads as zeros, for everybody (``write_record_metadata``,
caffe2/serialize/inline_container.cc, as in ``torch.serialization.skip_data``). A record of its own,
which ``torch.load`` passes over, tells which records these are.
"""

import json
import os
from typing import Any
from zipfile import ZipFile

import torch

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.conversion import WRITTEN, Region
from pytest_torchmem.interception.python_api.copies import Pickling
from pytest_torchmem.torch_private.patches import Replacements, file_reader, file_writer

_Writer: Any = file_writer.original
_Reader: Any = file_reader.original
_ARCHIVE = b"PK\x03\x04"
"""How files of ``torch.save`` begin."""
_UNKNOWN = ".data/pytest_torchmem_unknown"
"""The name of the record that lists those whose content is not known."""
_OLDER = ".data/pytest_torchmem_older"
"""The name of a record in an archive that stands for a file of the older format."""
_FIRST = (".data/serialization_id", "version")
"""What C++ reads where it opens an archive (``PyTorchStreamReader::init``, the same)."""


class _Careful:
    """A program's file, as C++ writes to it: what it raises is kept until C++ is done.

    The writer ends the process where its file fails: its destructor writes the end of the archive,
    and throws once more (``~PyTorchStreamWriter``, caffe2/serialize/inline_container.cc). Of the
    file it calls ``write`` and ``seek`` (torch/csrc/jit/python/init.cpp, ``BufferWriter``).
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: BaseException | None = None

    def write(self, data: Any) -> None:
        """Write, unless that has failed before."""
        self._do("write", data)

    def seek(self, offset: int, whence: int) -> None:
        """Leave a hole."""
        self._do("seek", offset, whence)

    def _do(self, name: str, *args: Any) -> None:
        if self.error is None:
            try:
                getattr(self._file, name)(*args)
            except BaseException as error:
                self.error = error


def sparse_files(trace: TraceContext, pickling: Pickling) -> Replacements:
    """Let files of ``torch.save`` have holes where contents are not known."""

    class Writer(_Writer):  # type: ignore[misc]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            self._file = None if isinstance(file, str) else _Careful(file)
            super().__init__(self._file or file, *args, **kwargs)
            self._with_holes = isinstance(file, str) or _can_seek(file)
            self._unknown: list[str] = []
            self._older = pickling.older

        def write_record(self, name: str, data: Any, size: int) -> None:
            """Write a record, or leave its place free."""
            if trace.off() or getattr(data, "_cdata", None) not in pickling.unknown:
                super().write_record(name, data, size)
            else:
                self._unknown.append(name)
                if self._with_holes and size:
                    self.write_record_metadata(name, size)
                else:
                    super().write_record(name, data, size)
            self._raise()

        def write_end_of_file(self) -> None:
            """Say last what is not known."""
            if self._unknown:
                names = json.dumps(self._unknown).encode()
                super().write_record(_UNKNOWN, names, len(names))
            if self._older:
                super().write_record(_OLDER, b"1", 1)
            super().write_end_of_file()
            self._raise()

        def _raise(self) -> None:
            """Raise what the file has raised, once."""
            if self._file is not None and (error := self._file.error) is not None:
                self._file = None
                raise error

    class Reader(_Reader):  # type: ignore[misc]
        def __init__(self, file: Any) -> None:
            super().__init__(file)
            self._books = False
            self._unknown = () if trace.off() else _unknown_in(self)
            self._books = not (trace.off() or self.has_record(_OLDER))
            if self._books:
                for name in filter(self.has_record, _FIRST):
                    self.get_record(name)

        def get_record(self, name: str) -> Any:
            """Read a record as bytes, of a buffer from the CPU's allocator, which is gone then
            (``PyTorchStreamReader::getRecord``, caffe2/serialize/inline_container.cc).
            """
            found = super().get_record(name)
            if self._books and not trace.off():
                with trace.working():
                    trace.meet(torch.empty(len(found), dtype=torch.uint8))
            return found

        def get_storage_from_record(self, name: str, numel: int, dtype: Any) -> Any:
            """Read a record into memory of the allocator, or return bytes that are not known."""
            if trace.off():
                return super().get_storage_from_record(name, numel, dtype)
            if name in self._unknown:
                size = dtype.itemsize if isinstance(dtype, torch.dtype) else 1
                return trace.unknown_bytes(numel * size)
            found = super().get_storage_from_record(name, numel, dtype)
            trace.meet_storage(found.untyped_storage())
            return found

    return [file_writer.by(Writer), file_reader.by(Reader)]


def unknown_regions(path: Any) -> tuple[Region, ...]:
    """Return the parts of a file that a trace wrote without knowing them."""
    written = WRITTEN.unknown(path)
    if written or not _is_archive(path):
        return written
    reader = _Reader(os.fspath(path))
    starts = {name: reader.get_record_offset(name) for name in _unknown_in(reader)}
    with ZipFile(path) as archive:  # the reader of torch 2.11 says no sizes
        sizes = {one.filename.partition("/")[2]: one.file_size for one in archive.infolist()}
    return tuple((start, start + sizes[name]) for name, start in starts.items())


def _unknown_in(reader: Any) -> list[str]:
    """Return the names of the records that are not known."""
    found: list[str] = []
    if reader.has_record(_UNKNOWN):
        found = json.loads(reader.get_record(_UNKNOWN))
    return found


def _is_archive(path: Any) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_ARCHIVE)) == _ARCHIVE
    except OSError:
        return False


def _can_seek(file: Any) -> bool:
    try:
        return bool(file.seekable())
    except Exception:  # whatever a program's own file does
        return False
