"""Pages that the operating system gives when they are first touched.

Addresses that storages without memory say they lie at.

Programs compare them, and libraries read and write there without torch (safetensors): each is the
beginning of pages that the operating system gives when they are first touched.
"""

import ctypes
import mmap
import sys
from typing import Any, cast

import torch
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import Functions, instead_of
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.torch_private.tensors import is_wrapper

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""``MAP_NORESERVE`` of Linux: pages that nobody touches are not counted (mmap(2))."""


def untouched_pages(nbytes: int) -> mmap.mmap | None:
    """Return ``nbytes`` bytes of zeros that take no memory; None where there are no such pages."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, ValueError, OverflowError):
        return None


_APART = 1 << 40
"""The distance of addresses that cannot be read, where there are no such pages."""


class Addresses(Functions):
    """The addresses given to the storages of one trace, by their devices and numbers."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._unknown: dict[int, int] = {}
        """How many bytes are not known from an address on, by the addresses that were told."""
        self._pages: dict[tuple[torch.device, int], tuple[mmap.mmap, int]] = {}

    def begin(self) -> None:
        """Forget the addresses of the trace before."""
        self._unknown.clear()
        self._pages.clear()

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
        return self._reserved(record, storage.nbytes())

    def _reserved(self, record: StorageRecord, nbytes: int) -> int:
        key = (record.ledger.device, record.index)
        known = self._pages.get(key)
        if known is not None and len(known[0]) >= nbytes:
            return known[1]
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
