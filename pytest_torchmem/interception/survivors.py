"""Tensors that outlive their trace: their data for the program, and for the next trace.

A program keeps tensors beyond its end: in a cache, in an object of a fixture, in the frames of a
traceback. C++ would read memory that is not there, and the next trace would take what was on a GPU
for a tensor of the host.
"""

import functools
import gc
import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import compress
from types import ModuleType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.sparse import storage_holder, without_entries
from pytest_torchmem.interception.values.contents import Contents
from pytest_torchmem.journal.contents import SharedState, holds_tensor
from pytest_torchmem.operators.sparse import COMPRESSED
from pytest_torchmem.torch_private.modes import DisableTorchFunctionSubclass
from pytest_torchmem.torch_private.tensors import storage_address

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
    if survivors:
        # Modules of ``fully_shard``, and optimizers with a scheduler, are in circles. Nothing was
        # collected in the course of the trace, so its objects are the youngest: to look through
        # these takes less than through all objects for the tensors among them.
        gc.collect(0)
        survivors = {key: one for key, one in survivors.items() if one() is not None}
    if not survivors:
        return
    found = _all_of({_LRU_CACHE, *_kinds_of(Tensor)})
    _clear_caches([one for one in found if type(one) is _LRU_CACHE], survivors)
    # Not in inference mode: a view whose base was written to since asks that for its node anew.
    with torch.no_grad(), DisableTorchFunctionSubclass():
        for value in found:
            if type(value) is _LRU_CACHE or is_lazy(value):
                continue
            address = address_of(value)
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


def let_go_of_tensors(ledger: Ledger, shared: SharedState) -> None:
    """Take tensors that a trace has made out of global variables, classes and modules.

    The next program would find a table that has no memory in the place of none, and its trace would
    not count it. Optimizers and schedules go on from where they were.
    """
    shared.restore_settings()
    made = ledger.made()
    if made:
        with DisableTorchFunctionSubclass():
            shared.let_go(lambda tensor: not is_lazy(tensor) and address_of(tensor) in made)


def forget_cached() -> None:
    """Take tensors of a trace that is over out of dictionaries that modules and classes keep.

    For a program that is run again as if for the first time: that of a library's own cache is out
    of the reach of what restores a program's state.
    """
    if not _SURVIVORS:
        return
    tensors = [one for one in _all_of(_kinds_of(Tensor)) if not is_lazy(one)]
    tensors = [one for one in tensors if address_of(one) in _SURVIVORS]
    if not any(isinstance(one, (dict, tuple)) for one in gc.get_referrers(*tensors)):
        return  # as most are which a pass that ended has left: nodes of autograd hold them
    surviving = set(map(id, tensors))
    del tensors
    # From the tables to what is in them: to ask what refers to a tensor looks at all objects.
    for namespace in _namespaces():
        for table in tuple(namespace.values()):
            if issubclass(type(table), dict):
                # What a library's own class does instead may import all that it can load.
                of_python: Any = OrderedDict if issubclass(type(table), OrderedDict) else dict
                # Not pairs: to make them may start the collector, and that change the table.
                keys, values = list(of_python.keys(table)), list(of_python.values(table))
                for key, value in zip(keys, values, strict=False):
                    if _is_one(value, surviving):
                        of_python.pop(table, key, None)


def _namespaces() -> Iterator[Mapping[str, Any]]:
    """Yield the namespaces of all modules and classes."""
    yield from (vars(one) for one in tuple(sys.modules.values()) if isinstance(one, ModuleType))
    yield from map(vars, _kinds_of(object))


def _is_one(value: Any, surviving: Container[int], depth: int = _DEPTH) -> bool:
    """Whether a value is a tensor of ``surviving``, or a tuple that has one."""
    if type(value) is tuple:
        return depth > 0 and any(_is_one(one, surviving, depth - 1) for one in value)
    return id(value) in surviving


def _all_of(kinds: Container[type]) -> list[Any]:
    """Return all objects of some classes: there may be a million of others."""
    found = gc.get_objects()
    return [*compress(found, map(kinds.__contains__, map(type, found)))]


def _kinds_of(kind: type) -> set[type]:
    """Return a class and all that derive from it."""
    found, waiting = set(), [kind]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += type.__subclasses__(one)
    return found


def _clear_caches(caches: Iterable[Any], survivors: Mapping[int, StorageRecord]) -> None:
    """Clear those that were given tensors which outlive their trace."""
    with DisableTorchFunctionSubclass():
        for cache in caches:
            given = gc.get_referents(cache) if cache.cache_info().currsize else []
            if holds_tensor(given, lambda one: address_of(one) in survivors, _DEPTH + 1):
                cache.cache_clear()


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
    if address_of(leaf) in survivors or not _is_leaf(leaf):
        return  # it is the trace's own
    gradient = leaf.grad
    if gradient is not None and address_of(gradient) in survivors:
        leaf.grad = None


def _is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf; a view that was made without gradients, of what was written to
    with them since, refuses to say (autograd/variable.cpp, ``handle_view_on_rebase``).
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def address_of(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage, ``None`` where it has none."""
    try:
        return storage_address(storage_holder(tensor))
    except (RuntimeError, NotImplementedError):
        return None
