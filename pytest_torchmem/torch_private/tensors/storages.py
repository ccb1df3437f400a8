"""Storages and the tensors on them, as C++ knows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.torch_private.names import private, private_name
from pytest_torchmem.torch_private.tensors.nowhere import nowhere

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

    With ``memory`` it shows that tensor's bytes without owning them.
    """
    address = _nowhere() if memory is None else _data_ptr(memory)
    storage: torch.UntypedStorage = _construct_storage(address, _CPU, nbytes)
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
