"""Tensors that outlive their trace: what they read as, and what they are to the next trace.

A program keeps tensors beyond its end: in a cache, in an object of a fixture, in the frames of a
traceback. C++ would read memory that is not there, and the next trace would take what was on a GPU
for a tensor of the host.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_torchmem.interception.layouts.sparse import storage_holder, without_entries
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.values.contents import Contents
from pytest_torchmem.operators.sparse.parts import COMPRESSED
from pytest_torchmem.torch_private.overrides import DisableTorchFunctionSubclass
from pytest_torchmem.torch_private.storages import storage_address

_LRU_CACHE: Any = type(functools.lru_cache(lambda: None))
_DEPTH = 3
"""How deep in tuples, dictionaries and objects a cached tensor is looked for."""


class Survivor(NamedTuple):
    """A storage that outlived its trace."""

    storage: ref[torch.UntypedStorage]
    device: torch.device
    """Where the trace had it."""
    nbytes: int
    """What it took there."""
    known: bool
    """Whether it has the values that the program computed, rather than nan."""


_SURVIVORS: dict[int, Survivor] = {}
"""By the addresses of their storages, for as long as these live."""


def survivor_at(address: int) -> Survivor | None:
    """Return what outlived an earlier trace and has its storage at ``address``."""
    return _SURVIVORS.get(address) if _SURVIVORS else None


def give_survivors_data(ledger: Ledger, contents: Contents | None = None) -> None:
    """Let tensors that outlive their trace read as their values, or as nan (0 for large integer
    ones) where they are not known, rather than as no memory.

    A test that fails inside of a trace leaves its variables in the traceback, whose values pytest
    prints: a kernel that reads a storage without memory ends the process. A real leaf that was
    first met as something else than itself loses the hollow gradient that it was given.

    What a ``functools.lru_cache`` was given in the trace it forgets: the next one fills it anew, as
    this one did.
    """
    survivors = ledger.close()
    if not survivors:
        return
    objects = gc.get_objects()
    _clear_caches(objects, survivors)
    with torch.inference_mode(), DisableTorchFunctionSubclass():
        for value in objects:
            if not issubclass(type(value), Tensor) or is_lazy(value):
                continue
            address = _address(value)
            if address is None:
                continue
            record = survivors.get(address)
            if record is None:
                _without_hollow_gradient(value, survivors)
                continue
            known = contents is not None and contents.known(record) is not None
            with torch.inference_mode(value.is_inference()):
                plain = value.layout is torch.strided and not value.is_nested
                if known and record.memory is None and plain:
                    value.data = contents.value(record, value)  # type: ignore[union-attr]
                elif record.memory is None:
                    value.data = _readable(value)
                else:
                    _without_hollow_gradient(value, survivors)
            _note(value, record, known)


def forget_cached() -> None:
    """Take tensors of a trace that is over out of dictionaries that modules and classes keep.

    For a program that is run again as if for the first time: that of a library's own cache is out
    of the reach of what restores a program's state.
    """
    for tensor in _surviving(gc.get_objects()):  # the list is gone when their holders are asked
        _forget(tensor)


def _surviving(objects: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in objects:
        if not issubclass(type(value), Tensor) or is_lazy(value):
            continue
        if _address(value) in _SURVIVORS:
            found.append(value)
    return found


def _forget(value: Any, depth: int = _DEPTH) -> None:
    for holder in gc.get_referrers(value):
        if type(holder) is tuple and depth:
            _forget(holder, depth - 1)
        elif isinstance(holder, dict) and _is_table_of_module(holder):
            for key in [key for key, item in holder.items() if item is value]:
                del holder[key]


def _is_table_of_module(table: dict[Any, Any]) -> bool:
    """Whether a dictionary is an entry in the namespace of a module or class, and not itself one.

    Those of instances belong to objects, such as the buffers of a module.
    """
    holders = gc.get_referrers(table)
    if any(isinstance(holder, (ModuleType, type)) for holder in holders):
        return False
    return any(isinstance(holder, dict) and _is_namespace(holder) for holder in holders)


def _is_namespace(holder: dict[Any, Any]) -> bool:
    module = sys.modules.get(str(holder.get("__name__")))
    if module is not None and vars(module) is holder:
        return True
    return any(isinstance(owner, type) for owner in gc.get_referrers(holder))


def _clear_caches(objects: Iterable[Any], survivors: Mapping[int, StorageRecord]) -> None:
    for value in objects:
        if (
            type(value) is _LRU_CACHE
            and value.cache_info().currsize
            and _holds(gc.get_referents(value), survivors, _DEPTH)
        ):
            value.cache_clear()


def _holds(values: Iterable[Any], survivors: Mapping[int, StorageRecord], depth: int) -> bool:
    """Whether a tensor that outlives its trace is among ``values``, or in one of them."""
    for value in values:
        if issubclass(type(value), Tensor):
            if _address(value) in survivors:
                return True
        elif depth and (parts := _parts(value)) and _holds(parts, survivors, depth - 1):
            return True
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return tuple(value.values())
    if isinstance(value, (tuple, list, set)):
        return tuple(value)
    if isinstance(value, (type, ModuleType)) or callable(value):
        return ()
    return tuple(getattr(value, "__dict__", {}).values())


def _note(tensor: Tensor, record: StorageRecord, known: bool) -> None:
    """Remember where a tensor was, for the next trace."""
    try:
        storage = storage_holder(tensor).untyped_storage()
    except (RuntimeError, NotImplementedError):
        return
    address = storage._cdata
    entry = record.ledger.entries[record.index - 1]
    gone = ref(storage, lambda _: _SURVIVORS.pop(address, None) and None)
    _SURVIVORS[address] = Survivor(gone, record.ledger.device, entry.nbytes, known)


def _readable(tensor: Tensor) -> Tensor:
    """Return what stands for ``tensor`` after its trace."""
    if tensor.layout in (torch.sparse_coo, *COMPRESSED):
        return without_entries(tensor)
    number = float("nan") if tensor.dtype.is_floating_point or tensor.is_complex() else 0
    data = torch.full((), number, dtype=tensor.dtype)
    if tensor.is_nested:  # it keeps its sizes: to read a part of it raises that it is out of bounds
        return torch.nested.nested_tensor([data])
    return data.expand(tensor.shape)


def _without_hollow_gradient(leaf: Tensor, survivors: Mapping[int, StorageRecord]) -> None:
    if not leaf.is_leaf or _address(leaf) in survivors:
        return  # it is the trace's own
    gradient = leaf.grad
    if gradient is not None and _address(gradient) in survivors:
        leaf.grad = None


def _address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage, ``None`` where it has none."""
    try:
        return storage_address(storage_holder(tensor))
    except (RuntimeError, NotImplementedError):
        return None
