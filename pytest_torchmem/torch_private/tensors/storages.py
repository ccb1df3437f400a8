"""Storages and the tensors on them, as C++ knows them, also of those that have no memory: these
have the address of pages that are reserved and that nobody fills.

A kernel that nobody intercepted (of an extension, or on a thread that was there before the trace)
reads zeros there, where at address 0 it would end the process. That pages were touched can be seen.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.torch_private.names import private, private_name

_PLACE = "pytest_torchmem_nowhere"
_SIZE = 1 << 44
_NO_RESERVE = 0x4000
"""``MAP_NORESERVE`` of Linux: pages that nobody touches are not counted (mmap(2))."""
_LOOKED_AT = 256
"""Pages at the beginning by which a touch is seen."""
_LOWEST_BITS = int.from_bytes(b"\1" * _LOOKED_AT, "little")


class Nowhere:
    """Reserved pages of this process; without any, an address of 0."""

    def __init__(self) -> None:
        self.address = 0
        self._pages: Any = None
        self._mincore: Any = None
        self._seen = (ctypes.c_ubyte * _LOOKED_AT)()
        if sys.platform != "linux":
            return
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._pages = mmap.mmap(-1, _SIZE, flags=flags)
        except (OSError, ValueError, OverflowError):  # strict overcommit, a limit of addresses
            return
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        for advice in ("MADV_DONTDUMP", "MADV_NOHUGEPAGE"):
            if hasattr(mmap, advice):
                try:
                    self._pages.madvise(getattr(mmap, advice))
                except OSError:  # of a kernel without it
                    continue
        self._watch()

    def _watch(self) -> None:
        """Find out whether touched pages can be told from others; not every system does."""
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._mincore = mincore
        before = self.touched()
        ctypes.string_at(self.address, 1)
        if before or not self.touched():
            self._mincore = None
        self.forget()

    def touched(self) -> bool:
        """Return whether anybody has read or written where there is no memory."""
        if self._mincore is None:
            return False
        size = _LOOKED_AT * mmap.PAGESIZE
        if self._mincore(self.address, size, self._seen):
            return False
        return bool(int.from_bytes(self._seen, "little") & _LOWEST_BITS)

    def forget(self) -> None:
        """Give touched pages back; they are zeros again."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)


def nowhere() -> Nowhere:
    """Return those of this process, whichever copy of this package reserved them."""
    found: Nowhere | None = vars(torch).get(_PLACE)
    if found is None:
        found = vars(torch)[_PLACE] = Nowhere()
    return found


_CPU = torch.device("cpu")

#: The address of a tensor's ``StorageImpl``: its identity for as long as the storage lives.
storage_address: Callable[[Tensor], int] = private("torch._C._storage_address")
storage_use_count: Callable[[int], int] = private("torch._C._storage_Use_Count")
#: An object's address in C++, of a storage or a generator, which is read in place.
CDATA = private_name("torch.UntypedStorage._cdata"), private_name("torch.Generator._cdata")
_construct_storage: Callable[..., Any] = private("torch._C._construct_storage_from_data_pointer")
# The methods in C++: what is done for each tensor here needs nobody who stands before them.
_set_storage: Callable[..., Tensor] = private("torch._C.TensorBase.set_")
_data_ptr: Callable[[Tensor], int] = private("torch._C.TensorBase.data_ptr")


_LEGACY_TYPES: dict[torch.dtype, Callable[[], Tensor]] = {
    torch.float32: torch.FloatTensor,
    torch.float64: torch.DoubleTensor,
    torch.float16: torch.HalfTensor,
    torch.bfloat16: torch.BFloat16Tensor,
    torch.int64: torch.LongTensor,
    torch.int32: torch.IntTensor,
    torch.uint8: torch.ByteTensor,
    torch.bool: torch.BoolTensor,
}
"""What makes an empty tensor in half the time of ``torch.empty``, whose arguments are parsed."""


def hollow_storage(nbytes: int, memory: Tensor | None = None) -> torch.UntypedStorage:
    """Return a CPU storage that says it holds ``nbytes`` and holds no memory.

    With ``memory`` it shows that tensor's bytes, which live as long: C++ and threads that outlive
    the trace read them.
    """
    address = _nowhere() if memory is None else _data_ptr(memory)
    storage: torch.UntypedStorage = _construct_storage(address, _CPU, nbytes)
    if memory is not None:
        storage.shown = memory  # type: ignore[attr-defined]
    return storage


@cache
def _nowhere() -> int:
    return nowhere().address


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage lies anywhere; what a trace replaces must not be in force."""
    try:
        return storage.data_ptr() not in (0, _nowhere())
    except RuntimeError:  # of bytes at address 0 (torch/csrc/StorageMethods.cpp, data_ptr)
        return False


def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> Tensor:
    """Return a tensor of that geometry on ``storage``; the Fake key must be excluded."""
    legacy = _LEGACY_TYPES.get(dtype)
    made = torch.empty(0, dtype=dtype) if legacy is None else legacy()
    return _set_storage(made, storage, offset, shape, stride)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return the whole of a storage as a tensor of bytes."""
    return _set_storage(_LEGACY_TYPES[torch.uint8](), storage)
