"""Tensors without memory that are copied (``copy.deepcopy``), pickled, saved, or read from files.

What is not known leaves a hole in a file, and is read as unknown again. A hole takes no space on
the disk and reads as zeros, for everybody (``write_record_metadata``,
caffe2/serialize/inline_container.cc, as in ``torch.serialization.skip_data``). In a file of
``torch.save`` a record of its own, which ``torch.load`` passes over, tells which records these are.

From files of safetensors, which its library in Rust writes from and reads into memory, tensors are
cut out of the mapped file, for which no memory is touched; the library would copy those that go to
cuda into pinned memory first (bindings/python/src/lib.rs, ``get_tensor_pinned_cuda``).

Programs compare addresses of storages without memory, and libraries read and write there without
torch (safetensors): each is the beginning of pages that the operating system gives when they are
first touched.
"""

import ctypes
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from ctypes import string_at
from functools import partial
from importlib import import_module
from io import BytesIO
from math import prod
from typing import Any, cast
from weakref import WeakKeyDictionary
from zipfile import ZipFile

import torch
import torch.serialization
import torch.utils
from torch import Tensor, nn

from pytest_torchmem.interception.context import LASTING, Functions, Layer, TraceContext, instead_of
from pytest_torchmem.interception.conversion import WRITTEN, Region, identity_of
from pytest_torchmem.interception.plan import Output
from pytest_torchmem.interception.values.contents import zeros
from pytest_torchmem.journal.contents import Weak
from pytest_torchmem.torch_private import modes, patches
from pytest_torchmem.torch_private.tensors import TensorBase, is_wrapper, untouched_pages

_APART = 1 << 40
"""The distance of addresses that cannot be read, where there are no such pages."""


class Addresses(Functions):
    """The addresses given to the storages of one trace, by their devices and numbers."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._unknown: dict[int, int] = {}
        """How many bytes are not known from an address on, by the addresses that were told."""
        self._pages: dict[tuple[torch.device, int], tuple[mmap.mmap, int]] = {}

    @instead_of(Tensor, "data_ptr")
    def of_tensor(self, original: Any, tensor: Tensor) -> int:
        """Return an address that differs where memory would."""
        if self._trace.without_memory(tensor) is None or not tensor.numel() or is_wrapper(tensor):
            return cast(int, original(tensor))
        start = tensor.untyped_storage().data_ptr()
        return start + int(tensor.storage_offset()) * tensor.element_size()

    @instead_of(torch.UntypedStorage, "data_ptr")
    def of_storage(self, original: Any, storage: torch.UntypedStorage) -> int:
        """Return where a storage begins; one of no bytes lies nowhere on any device."""
        if not storage.nbytes():
            return 0
        record = self._trace.record_of(storage)
        if record is None or not record.hollow:
            return cast(int, original(storage))
        self._trace.values.contents.begin_writing(record)
        known = self._trace.values.contents.known(record)
        memory = record.memory if known is None else known
        if memory is not None:
            address = memory.data_ptr()
            self._unknown[address] = storage.nbytes() if known is None else 0
            return address
        nbytes = storage.nbytes()
        key = (record.ledger.device, record.index)
        there = self._pages.get(key)
        if there is not None and len(there[0]) >= nbytes:
            return there[1]
        pages = untouched_pages(nbytes)
        if pages is None:
            return record.index * _APART
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._pages[key] = (pages, address)
        self._unknown[address] = nbytes
        return address

    def are_unknown(self, address: int, nbytes: int) -> bool:
        """Return whether bytes at an address are of a storage that nothing is known of."""
        if self._unknown.get(address, -1) >= nbytes:
            return True
        end = address + nbytes
        return any(
            start <= address and end <= start + size for start, size in self._unknown.items()
        )


_COPIED = "pytest_torchmem: copied storages"
"""Where the memory of a deep copy has them."""


class Copies(Functions):
    """Copies by operators; torch copies a storage's memory."""

    @instead_of(Tensor, "__deepcopy__")
    def of_tensor(self, original: Any, tensor: Tensor, memo: dict[int, Any]) -> Any:
        """Copy a tensor with its gradient and attributes; torch/_tensor.py, ``__deepcopy__``."""
        if self._trace.record(tensor) is None:
            return original(tensor, memo)
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        with torch.no_grad():
            shares = type(tensor) is Tensor and tensor.layout is torch.strided
            shares = shares and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            plain = TensorBase.detach(tensor)
            copy = _with_its_storage(plain, memo) if shares else TensorBase.clone(plain)
            copy.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copy
        if tensor.grad is not None:
            copy.grad = deepcopy(tensor.grad, memo)
        copy.__dict__.update(deepcopy(tensor.__dict__, memo))
        return copy

    @instead_of(nn.Parameter, "__deepcopy__")
    def of_parameter(self, original: Any, parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        """Copy a parameter without its gradient; torch/nn/parameter.py, ``__deepcopy__``."""
        return type(parameter)(parameter.data.clone(), parameter.requires_grad)


def _with_its_storage(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Copy the whole storage of a tensor, once for all tensors on it; torch/storage.py,
    ``TypedStorage.__deepcopy__``. Its copy begins as one element.
    """
    storage = tensor.untyped_storage()
    copies: dict[int, Tensor] = memo.setdefault(_COPIED, {})
    whole = copies.get(storage._cdata)
    if whole is None:
        elements = storage.nbytes() // tensor.element_size()
        whole = TensorBase.clone(tensor.as_strided((elements,), (1,), 0))
        copies[storage._cdata] = whole
    made = tensor.new_empty([])
    return made.set_(
        whole.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


class Pickling(Functions):
    """Pickles known values, and for those not known zeros, of pages that nobody has touched."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self.unknown: set[int] = set()
        """The addresses of storages that were pickled as zeros."""
        self.older = False
        """Whether the archive that is written stands for a file of the older format."""
        self._zeros_of: dict[tuple[torch.device, int], Tensor] = {}
        self._places: dict[int, tuple[torch.UntypedStorage, str]] = {}
        """Storages that were pickled, and the devices they belong to in the trace, by address."""
        self._files: WeakKeyDictionary[BytesIO, Callable[[], object]] = WeakKeyDictionary()
        """Files in memory, and what strikes their bytes off."""

    @instead_of(Tensor, "__reduce_ex__")
    def reduce(self, original: Any, tensor: Tensor, protocol: Any) -> Any:
        """Pickle a real tensor of the same geometry."""
        record = self._trace.without_memory(tensor)
        if record is None or tensor.layout is not torch.strided or is_wrapper(tensor):
            # Of its parts, each as it comes.
            return original(tensor, protocol)
        nbytes = tensor.untyped_storage().nbytes()
        with self._trace.working():
            content = self._trace.values.contents.known(record)
            if content is None:
                # what stands for a storage that is not known, the same one each time
                key = (record.ledger.device, record.index)
                content = self._zeros_of.get(key)
                if content is None or content.numel() != nbytes:
                    pages = untouched_pages(nbytes) if nbytes else None
                    content = (
                        zeros(nbytes)
                        if pages is None
                        else torch.frombuffer(pages, dtype=torch.uint8)
                    )
                    self._zeros_of[key] = content
                    self.unknown.add(content.untyped_storage()._cdata)
            storage = content.untyped_storage()
            # The name of the host is one string, which a pickle writes once (``_cpu_tag``).
            on_host = record.ledger.device.type == "cpu"
            place = "cpu" if on_host else str(record.ledger.device)
            self._places[storage._cdata] = storage, place
            real = Output.of(tensor).on(storage)
            return original(real.requires_grad_(tensor.requires_grad), protocol)

    def keep(self, file: BytesIO) -> None:
        """Book what a program has written into memory of Python's, until it is gone."""
        if file in self._files:
            self._files.pop(file)()  # it is longer now
        self._files[file] = self._trace.hold(file, file.getbuffer().nbytes, "torch.save")

    @instead_of(torch.serialization)
    def location_tag(self, original: Any, storage: Any) -> Any:
        """Return where a pickled storage was, which ``torch.load`` will put it to."""
        place = self._places.get(storage._cdata) if hasattr(storage, "_cdata") else None
        return original(storage) if place is None else place[1]

    @instead_of(patches.legacy_save)
    def save(
        self, original: Any, obj: Any, file: Any, pickle_module: Any, pickle_protocol: Any
    ) -> None:
        """Write an archive instead of the older format, which ``pickle`` asks for: there is no
        place in that to say what is not known. Either is read back by ``torch.load``. A program
        may have put something else, which asks for the older one, in the place of ``torch.save``.
        """
        if self._trace.off():
            original(obj, file, pickle_module, pickle_protocol)
            return
        with patches.having(self, older=True):
            torch.serialization.save(obj, file, pickle_module, pickle_protocol)


_NOTHING = object()


class Swaps(Functions):
    """``swap_tensors`` in a trace."""

    @instead_of(torch.utils, "swap_tensors")
    def swap(self, original: Any, t1: Tensor, t2: Tensor) -> None:
        """Swap two tensors, and what is noted of their contents."""
        if not self._trace.on_thread():
            original(t1, t2)
            return
        own = self._trace.own
        noted = [own.note(one) if own and self._trace.brought(one) else None for one in (t1, t2)]
        tables = self._trace.noted_contents
        notes = [(table.pop(t2, _NOTHING), table.pop(t1, _NOTHING)) for table in tables]
        try:
            with patches.swaps_despite(Weak):
                original(t1, t2)
            for one, note in zip((t2, t1), noted, strict=True):
                if note is not None:
                    note.swapped(one)
        except BaseException:
            notes = [(second, first) for first, second in notes]
            raise
        finally:
            for table, both in zip(tables, notes, strict=True):
                for tensor, content in zip((t1, t2), both, strict=True):
                    if content is not _NOTHING:
                        table[tensor] = content


_Writer: Any = patches.file_writer.original
_Reader: Any = patches.file_reader.original
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


def sparse_files(trace: TraceContext, pickling: Pickling) -> patches.Replacements:
    """Let files of ``torch.save`` have holes where contents are not known."""

    class Writer(_Writer):  # type: ignore[misc]
        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            self._file = None if isinstance(file, str) else _Careful(file)
            self._target = file
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
            if isinstance(self._target, BytesIO) and not trace.off():
                pickling.keep(self._target)

        def _raise(self) -> None:
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

    return [patches.file_writer.by(Writer), patches.file_reader.by(Reader)]


def unknown_regions(path: Any) -> tuple[Region, ...]:
    """Return the parts of a file that a trace wrote without knowing them."""
    written = WRITTEN.get(identity_of(path), ())
    if written or not _is_archive(path):
        return written
    reader = _Reader(os.fspath(path))
    starts = {name: reader.get_record_offset(name) for name in _unknown_in(reader)}
    with ZipFile(path) as archive:  # the reader of torch 2.11 says no sizes
        sizes = {one.filename.partition("/")[2]: one.file_size for one in archive.infolist()}
    return tuple((start, start + sizes[name]) for name, start in starts.items())


def _unknown_in(reader: Any) -> list[str]:
    names = reader.get_record(_UNKNOWN) if reader.has_record(_UNKNOWN) else "[]"
    return cast("list[str]", json.loads(names))


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


_ALIGNMENT = 8
"""Where the first tensor begins; safetensors/src/tensor.rs, ``prepare``."""
_CHUNK = 1 << 24

SAFETENSORS = "safetensors"


@contextmanager
def safetensors_files(addresses: Addresses, trace: TraceContext, _: Any) -> Iterator[None]:
    """Let safetensors write and read files without touching memory that no tensor has."""
    try:
        library: Any = import_module(f"{SAFETENSORS}.torch")
    except ImportError:
        library = None
    if type(getattr(library, "safe_open", None)) is not type or not hasattr(
        library, "serialize_file"
    ):  # another than is known
        yield
        return
    with (
        LASTING.layer(SAFETENSORS, partial(_functions, library, addresses)) as opened,
        modes.made_by(library.safe_open, opened),
    ):
        yield


def _functions(
    library: Any, addresses: Addresses, trace: TraceContext
) -> Layer[Callable[..., Any]]:
    """Return the layer, whose owner makes what ``safe_open`` returns."""
    original: Any = library.serialize_file
    safe_open: Any = library.safe_open

    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        has_unknown = isinstance(tensors, Mapping) and any(
            hasattr(found, "data_ptr") and addresses.are_unknown(found.data_ptr, found.data_len)
            for found in (() if trace.off() else tensors.values())
        )
        if not has_unknown:
            return original(tensors, filename, metadata=metadata)
        return _write(tensors, filename, metadata, addresses)

    def opened(*args: Any, **kwargs: Any) -> Any:
        if not trace.off():
            args, kwargs = _with_number(args, kwargs)
        return modes.make(safe_open, *args, **kwargs)

    return Layer([(library, {"serialize_file": serialize_file})], opened)


def _with_number(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``safe_open(filename, framework, device)`` for mapped tensors.

    A device that is a number is left to torch (``Device::Anonymous``).
    """
    device = args[2] if len(args) > 2 else kwargs.get("device")
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind != "cuda" or not (index.isdecimal() or device == kind):
        return args, kwargs
    number = int(index or 0)
    if len(args) > 2:
        return (*args[:2], number, *args[3:]), kwargs
    return args, {**kwargs, "device": number}


def _write(tensors: Mapping[str, Any], filename: Any, metadata: Any, addresses: Addresses) -> None:
    """Write a file as safetensors does, with holes; README.md of safetensors, Format."""
    itemsizes = {name: one.data_len / max(prod(one.shape), 1) for name, one in tensors.items()}
    names = sorted(tensors, key=lambda name: (-itemsizes[name], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        found = tensors[name]
        start, end = end, end + found.data_len
        shape = list(found.shape)
        header[name] = {"dtype": found.dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    folder = os.path.dirname(os.path.abspath(os.fspath(filename)))
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        try:
            file.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
            unknown: list[Region] = []
            for name in names:
                start = file.tell()
                if not _write_tensor(file, tensors[name], addresses):
                    unknown.append((start, file.tell()))
            file.truncate()
        except BaseException:
            os.unlink(file.name)
            raise
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(file.name, 0o666 & ~mask)
    os.replace(file.name, filename)
    if (identity := identity_of(filename)) is not None:
        WRITTEN[identity] = tuple(unknown)


def _write_tensor(file: Any, found: Any, addresses: Addresses) -> bool:
    """Write a tensor, or leave its place free; return whether anything is known of it."""
    if addresses.are_unknown(found.data_ptr, found.data_len):
        file.seek(found.data_len, os.SEEK_CUR)
        return False
    for start in range(0, found.data_len, _CHUNK):
        file.write(string_at(found.data_ptr + start, min(_CHUNK, found.data_len - start)))
    return True
