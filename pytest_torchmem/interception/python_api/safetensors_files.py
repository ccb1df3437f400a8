"""Files of safetensors, which its library in Rust writes from and reads into memory.

Written, what is not known leaves a hole that takes no space on the disk. Read, tensors are cut out
of the mapped file, for which no memory is touched; the library would copy those that go to cuda
into pinned memory first (bindings/python/src/lib.rs, ``get_tensor_pinned_cuda``).
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import string_at
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.conversion import WRITTEN, Region
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.interception.python_api.addresses import Addresses
from pytest_torchmem.torch_private.modes import made_by, make

_ALIGNMENT = 8
"""Where the first tensor begins; safetensors/src/tensor.rs, ``prepare``."""
_CHUNK = 1 << 24


@contextmanager
def safetensors_files(trace: TraceContext, addresses: Addresses) -> Iterator[None]:
    """Let safetensors write and read files without touching memory that no tensor has."""
    library = _library()
    if library is None:
        yield
        return
    with (
        LASTING.layer("safetensors", partial(_functions, library, addresses)) as opened,
        made_by(library.safe_open, opened),
    ):
        yield


def _functions(
    library: Any, addresses: Addresses, trace: TraceContext
) -> Layer[Callable[..., Any]]:
    """Return the layer, whose owner makes what ``safe_open`` returns."""
    original: Any = library.serialize_file
    safe_open: Any = library.safe_open

    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> Any:
        if trace.off() or not _has_unknown(tensors, addresses):
            return original(tensors, filename, metadata=metadata)
        return _write(tensors, filename, metadata, addresses)

    def opened(*args: Any, **kwargs: Any) -> Any:
        if not trace.off():
            args, kwargs = _with_number(args, kwargs)
        return make(safe_open, *args, **kwargs)

    return Layer([(library, {"serialize_file": serialize_file})], opened)


def _library() -> Any:
    """Return ``safetensors.torch``, or None where it is not there or another than is known."""
    if "safetensors" not in sys.modules and not _is_installed():
        return None
    try:
        found = import_module("safetensors.torch")
    except ImportError:
        return None
    known = type(getattr(found, "safe_open", None)) is type and hasattr(found, "serialize_file")
    return found if known else None


@cache
def _is_installed() -> bool:
    return find_spec("safetensors") is not None


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


def _has_unknown(tensors: Any, addresses: Addresses) -> bool:
    return isinstance(tensors, Mapping) and any(
        hasattr(found, "data_ptr") and addresses.are_unknown(found.data_ptr, found.data_len)
        for found in tensors.values()
    )


def _write(tensors: Mapping[str, Any], filename: Any, metadata: Any, addresses: Addresses) -> None:
    """Write a file as safetensors does, with holes; README.md of safetensors, Format."""
    names = sorted(tensors, key=lambda name: (-_itemsize(tensors[name]), name))
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
    os.chmod(file.name, 0o666 & ~_umask())
    os.replace(file.name, filename)
    WRITTEN.note(filename, unknown)


def _write_tensor(file: Any, found: Any, addresses: Addresses) -> bool:
    """Write a tensor, or leave its place free; return whether anything is known of it."""
    if addresses.are_unknown(found.data_ptr, found.data_len):
        file.seek(found.data_len, os.SEEK_CUR)
        return False
    for start in range(0, found.data_len, _CHUNK):
        file.write(string_at(found.data_ptr + start, min(_CHUNK, found.data_len - start)))
    return True


def _itemsize(found: Any) -> float:
    elements = 1
    for size in found.shape:
        elements *= size
    return found.data_len / elements if elements else 0


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
