"""Real tensors that enter a trace, hollow tensors that leave it, and those that outlive it.

Of files that a program maps into memory, contents are read where they are asked for. What a trace
wrote without knowing it reads as zeros, and is not known either.

A program keeps tensors beyond the end of its trace: in a cache, in an object of a fixture, in the
frames of a traceback. C++ would read memory that is not there, and the next trace would take what
was on a GPU for a tensor of the host.
"""

import functools
import gc
import os
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import compress
from types import FrameType, ModuleType
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakValueDictionary, finalize, ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_torchmem.errors import NoCudaError
from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord, dtype_name
from pytest_torchmem.interception.phases import Phases
from pytest_torchmem.interception.placement import make_hollow
from pytest_torchmem.interception.plan import Output
from pytest_torchmem.interception.sparse import storage_holder, without_entries
from pytest_torchmem.interception.values.contents import Assumption, Contents, memory_for, zeros
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.journal.contents import ProgramState, Scope, holds_tensor
from pytest_torchmem.journal.in_place import InPlace, gradient_of
from pytest_torchmem.operators.layouts import COMPRESSED
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private import tensors as private
from pytest_torchmem.torch_private.modes import DisableTorchFunctionSubclass

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
    with DisableTorchFunctionSubclass():
        for cache in [one for one in found if type(one) is _LRU_CACHE]:
            given = gc.get_referents(cache) if cache.cache_info().currsize else []
            if holds_tensor(given, lambda one: address_of(one) in survivors, _DEPTH + 1):
                cache.cache_clear()
    # Not in inference mode: a view whose base was written to since asks that for its node anew.
    with torch.no_grad(), DisableTorchFunctionSubclass():
        for value in found:
            if type(value) is _LRU_CACHE or is_lazy(value):
                continue
            record = survivors.get(address_of(value))
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


def give_back(ledger: Ledger, state: ProgramState, *whole: Collection[Scope]) -> None:
    """Give back what a program shares with others, without tensors that the trace has made: the
    next program would find a table that has no memory in the place of none, and its trace would not
    count it.
    """
    made = ledger.made()
    with DisableTorchFunctionSubclass():
        state.give_back(lambda one: not is_lazy(one) and address_of(one) in made, *whole)


def forget_cached() -> None:
    """Take tensors of a trace that is over out of dictionaries that modules and classes keep. For a
    program that is run again as if for the first time: that of a library's own cache is out of the
    reach of what restores a program's state.
    """
    if not _SURVIVORS:
        return
    tensors = [one for one in _all_of(_kinds_of(Tensor)) if not is_lazy(one)]
    tensors = [one for one in tensors if address_of(one) in _SURVIVORS]
    given = (*tensors,)  # which Python 3.13 has among the referrers
    others = (one for one in gc.get_referrers(*given) if one is not given)
    if not any(isinstance(one, (dict, tuple)) for one in others):
        return  # as most are which a pass that ended has left: nodes of autograd hold them
    surviving = set(map(id, tensors))
    del tensors
    # From the tables to what is in them: to ask what refers to a tensor looks at all objects.
    modules = [vars(one) for one in tuple(sys.modules.values()) if isinstance(one, ModuleType)]
    for namespace in (*modules, *map(vars, _kinds_of(object))):
        for table in tuple(namespace.values()):
            if issubclass(type(table), dict):
                # What a library's own class does instead may import all that it can load.
                of_python: Any = OrderedDict if issubclass(type(table), OrderedDict) else dict
                # Not pairs: to make them may start the collector, and that change the table.
                keys, values = list(of_python.keys(table)), list(of_python.values(table))
                for key, value in zip(keys, values, strict=False):
                    if _is_one(value, surviving):
                        of_python.pop(table, key, None)


def _is_one(value: Any, surviving: Container[int], depth: int = _DEPTH) -> bool:
    if type(value) is tuple:
        return depth > 0 and any(_is_one(one, surviving, depth - 1) for one in value)
    return id(value) in surviving


def _all_of(kinds: Container[type]) -> list[Any]:
    """Return all objects of some classes: there may be a million of others."""
    found = gc.get_objects()
    return [*compress(found, map(kinds.__contains__, map(type, found)))]


def _kinds_of(kind: type) -> set[type]:
    found, waiting = set(), [kind]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += type.__subclasses__(one)
    return found


def _note(tensor: Tensor, record: StorageRecord, known: bool) -> None:
    """Remember where a tensor was, for the next trace."""
    storage = storage_holder(tensor).untyped_storage()
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
    if address_of(leaf) in survivors:
        return  # it is the trace's own
    gradient = gradient_of(leaf)
    if gradient is not None and address_of(gradient) in survivors:
        leaf.grad = None


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, 0 where it has none."""
    try:
        return private.storage_address(storage_holder(tensor))
    except (RuntimeError, NotImplementedError):
        return 0


_CPU = torch.device("cpu")

NAME_DEVICE = (
    'name the device that this is for, as in memory_budget(..., device="cuda"), '
    'torchmem.check(..., device="cuda") or torchmem trace --device cuda'
)
"""What to do about a program for cuda that is traced on the CPU."""


class Lent(NamedTuple):
    """A storage that the trace did not make and that has a device there, and what is known of its
    values.
    """

    device: torch.device
    entry: Allocation
    content: Tensor | None
    assumed: Assumption | None
    missing: str
    """What to say where its values are not known and asked for."""


_OF_EARLIER = (
    "an earlier trace left behind, whose values are gone. Make it anew in the body of the test"
)

Lender: TypeAlias = Callable[[int], Lent | None]
"""Finds a storage that the trace did not make and that has a device there, by its address."""


class Conversion:
    """Books real tensors as they are met, and makes hollow tensors of those that a step is given.
    Its methods run while nothing is intercepted.
    """

    def __init__(
        self,
        target: Target,
        ledger: Ledger,
        values: KnownValues,
        attribution: Attribution,
        phases: Phases,
    ) -> None:
        self._target = target
        self._values = values
        self._contents = values.contents
        self._ledger = ledger
        self._attribution = attribution
        self._phases = phases
        self.own: InPlace | None = None
        """What is noted of the program's own tensors, modules and optimizers."""
        self.mapped = MappedFiles()
        self.met: list[StorageRecord] = []
        """Real tensors that were met, by operators that are running where the host is real."""
        self._foreign: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        """What lies on memory that torch's allocators did not make, by its address."""
        self.handed: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        """What threads that are in no trace have put in a queue in its course, by its address."""
        self.from_threads: dict[str, None] = {}
        """The lines at which the program first came with such a tensor."""
        self._expected: dict[int, tuple[int, Any, DeviceLedger | None]] = {}
        """Index, storage and device of what is booked and was not met so far, by its address."""
        self.lender: Lender = lambda address: None
        """Finds what a GPU has that stands between traces."""
        self.names: dict[int, tuple[Kind, str, str]] = {}
        """Kind, label and module of real tensors that are known, by their storages' addresses."""

    def borrow(self, tensor: Tensor) -> StorageRecord:
        """Book a tensor that the program brought with it; nothing is ever written to it."""
        storage = tensor.untyped_storage()
        lent = self.lent(tensor)
        if lent is not None:
            record = self._adopt(lent, tensor)
            self._note_use(tensor)
            return record
        device = self._ledger.on(self._target.normalise(tensor.device))
        nbytes = storage.nbytes() if private.is_of_allocator(storage) else 0
        other = (Kind.PARAMETER if tensor.requires_grad else Kind.INPUT, "", "")
        kind, label, module = self.names.get(private.storage_address(tensor), other)
        origin, shape = Origin(Phase.BASELINE, module), tuple(tensor.shape)
        entry = Allocation(nbytes, kind, origin, shape, dtype_name(tensor.dtype), label)
        hollow = not self.mapped.is_known(storage)
        made_here, *_ = self._expected.pop(private.storage_address(tensor), (0,))
        made_meanwhile = private.storage_address(tensor) in self.handed
        index = made_here or device.add(entry, not made_meanwhile)
        record = self._ledger.attach(storage, index, device, hollow)
        if not made_here:
            if made_meanwhile:
                self.from_threads[self._attribution.user_line()] = None
            self.met.append(record)
            self._note_foreign(record, storage)
        if private.has_memory(storage) and self._values.worth_knowing(tensor.dtype, tensor.numel()):
            self._remember(record, tensor)
        self._note_use(tensor)
        return record

    def _note_foreign(self, record: StorageRecord, storage: torch.UntypedStorage) -> None:
        """Take note of the bytes of memory that torch's allocators did not make, once."""
        if not private.has_memory(storage) or private.is_of_allocator(storage):
            return
        address = storage.data_ptr()
        if self._foreign.get(address) is None:
            self._foreign[address] = own = cast(Any, record())
            if own is not storage:  # nothing else may come to lie at that address meanwhile
                finalize(own, storage.nbytes)
            record.ledger.foreign[record.index] = storage.nbytes()

    def hold(self, owner: object, nbytes: int, by: str, frame: FrameType) -> Callable[[], object]:
        """Book bytes that an object of Python's holds; return what strikes them off."""
        origin = self._attribution.origin(self._phases.find(), by, frame)
        ledger = self._ledger.on(_CPU)
        index = ledger.add(Allocation(0, Kind.OTHER, origin, (nbytes,), "uint8"))
        ledger.foreign[index] = nbytes
        gone = finalize(owner, ledger.remove, index)
        gone.atexit = False
        return gone

    def lent(self, tensor: Tensor) -> Lent | None:
        """Return what is known of a tensor of another ledger, or of a trace that is over."""
        address = private.storage_address(tensor)
        lent, survivor = self.lender(address), _SURVIVORS.get(address)
        if lent is not None or survivor is None:
            return lent
        content = private.bytes_of(tensor.untyped_storage()) if survivor.known else None
        shape, origin = tuple(tensor.shape), Origin(Phase.BASELINE)
        entry = Allocation(survivor.nbytes, Kind.INPUT, origin, shape, dtype_name(tensor.dtype))
        return Lent(survivor.device, entry, content, None, _OF_EARLIER)

    def expect(self, lent: Lent, storage: torch.UntypedStorage) -> None:
        """Book a hollow storage of another ledger as present, whether or not the program uses it.
        It has a record when the program comes with a tensor on it, whose gradient is then known.
        """
        device = self._ledger.on(self._target.normalise(lent.device))
        kind = lent.entry.kind if lent.entry.label else Kind.INPUT
        index = device.add(_as_before(lent.entry, kind), earlier=True)
        self._expect(storage, index, device)

    def expect_made(self, storage: torch.UntypedStorage, frame: FrameType) -> None:
        """Book a real storage of the host that the program has made just now without an operator.
        It has a record when the program comes with a tensor on it, with the values of then.
        """
        origin = self._attribution.origin(self._phases.find(), "", frame)
        nbytes, device = storage.nbytes(), self._ledger.on(_CPU)
        entry = Allocation(nbytes, Kind.OTHER, origin, (nbytes,), dtype_name(torch.uint8))
        self._expect(storage, device.add(entry), device)

    def _expect(self, storage: torch.UntypedStorage, index: int, device: DeviceLedger) -> None:
        address = storage._cdata
        self._expected[address] = index, ref(storage, lambda _: self.forget(address)), device

    def forget(self, address: int) -> None:
        """Book that a storage is gone which was booked and not met."""
        index, _, device = self._expected.pop(address, (0, None, None))
        if device is not None:
            device.remove(index)

    def _adopt(self, lent: Lent, tensor: Tensor) -> StorageRecord:
        """Book a tensor whose storage belongs to another ledger as present from the beginning.

        Its values are copied: what the trace writes is not seen there. Raises ``NoCudaError`` for
        one of the GPU in a trace on the CPU.
        """
        storage, entry = tensor.untyped_storage(), lent.entry
        where = self._target.normalise(lent.device)
        if where.type == "cuda" and self._target.gpu is None:
            line = self._attribution.user_line() or "the traced program"
            raise NoCudaError(
                f"{line}: a tensor is on cuda, and the trace is on cpu: {NAME_DEVICE}"
            )
        device = self._ledger.on(where)
        kind = Kind.PARAMETER if tensor.requires_grad else Kind.INPUT
        named = (entry.kind if entry.label else kind, entry.label, entry.origin.module)
        kind, label, module = self.names.get(private.storage_address(tensor), named)
        index, *_ = self._expected.pop(private.storage_address(tensor), (0,))
        if index:
            device.name(index, kind, label, module)
        else:
            index = device.add(_as_before(entry, kind, label, module), earlier=True)
        record = self._ledger.attach(storage, index, device, hollow=True)
        record.lent = True
        if lent.content is not None:
            self._contents.remember(record, lent.content)
            return record
        self._values.misses = lent.missing
        if lent.assumed is not None:
            self._contents.assume(record, lent.assumed)
        return record

    def _note_use(self, tensor: Tensor) -> None:
        # What a program takes of a weight first may be a view of it, such as its transpose.
        owner = private.view_base(tensor) if private.is_view_of_another(tensor) else tensor
        if owner is not None and self.own is not None:
            self.own.note(owner, keeps=False)

    def write_back(self, tensor: Tensor) -> None:
        """Write the result of an operator into a real tensor; an unknown result makes it hollow.
        Its memory would be read, and is not what the program has written.
        """
        record = self._ledger.records.get(private.storage_address(tensor))
        if record is None or record.hollow:
            return
        known = self._contents.known(record)
        if known is None:
            record.hollow = True
        else:
            private.bytes_of(tensor.untyped_storage()).copy_(known)
            record.outdated = False

    def part(self, kept: int) -> None:
        """Forget real tensors that were met, but for the first ``kept``; they are met anew."""
        for record in self.met[kept:]:
            if not record.hollow and self._ledger.records.get(record.address) is record:
                self._ledger.strike(record)
        del self.met[kept:]

    def meet(
        self,
        tensor: Tensor,
        device: torch.device,
        frame: FrameType,
        memory: Tensor | None = None,
        hollow: bool = False,
        taken: int | None = None,
    ) -> StorageRecord:
        """Book a tensor that was made just now on ``device`` without an operator. It is real, made
        by C++, or ``hollow``, with ``memory`` to show to whoever reads it. ``taken``: the bytes of
        it that the allocator gave, if not all.
        """
        origin = self._attribution.origin(self._phases.find(), "", frame)
        storage = tensor.untyped_storage()
        nbytes, shape = storage.nbytes() if taken is None else taken, tuple(tensor.shape)
        entry = Allocation(nbytes, Kind.OTHER, origin, shape, dtype_name(tensor.dtype))
        on, hollow = self._ledger.on(device), hollow or not self.mapped.is_known(storage)
        index, *_ = self._expected.pop(private.storage_address(tensor), (0,))
        if index:  # of the host, where its values are read before they go to ``device``
            self._ledger.on(_CPU).remove(index)
        record = self._ledger.attach(storage, on.add(entry), on, hollow, memory)
        if not hollow and self._values.worth_knowing(tensor.dtype, tensor.numel()):
            self._remember(record, tensor)
        return record

    def _remember(self, record: StorageRecord, tensor: Tensor) -> None:
        """Keep the values of a real tensor; of a large one in a mapped file nothing is read."""
        storage = tensor.untyped_storage()
        if self.mapped.holds(storage):
            elements = storage.nbytes() // tensor.element_size()
            if record.hollow or not self._values.worth_knowing(tensor.dtype, elements):
                return
        self._contents.remember(record, tensor)
        if not record.hollow:
            record.as_met = True

    def lift(self, tensor: Tensor, device: torch.device, frame: FrameType) -> Tensor:
        """Return a hollow tensor, on ``device``, for what C++ made of Python numbers. Or of an
        array of numpy's: the two share its memory, which is not the allocator's.
        """
        if private.storage_address(tensor) in self._ledger.records or tensor.is_meta:
            return tensor
        if self.mapped.holds(tensor.untyped_storage()):  # C++ shares what it was given
            self.borrow(tensor)
            return tensor
        origin = self._attribution.origin(self._phases.find(), "aten::lift_fresh", frame)
        nbytes, shared = tensor.untyped_storage().nbytes(), not tensor.untyped_storage().resizable()
        output = Output(0, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)
        kept = nbytes > 0 and self._values.worth_knowing(tensor.dtype, tensor.numel())
        memory = private.bytes_of(tensor.untyped_storage()) if kept else None
        if memory is not None and not shared:
            memory = private.TensorBase.clone(memory)
        on, taken = self._ledger.on(device), 0 if shared else nbytes
        hollow = make_hollow(self._ledger, output, nbytes, on, origin, memory=memory, taken=taken)
        record = self._ledger.records[private.storage_address(hollow)]
        self._note_foreign(record, tensor.untyped_storage())
        if kept:
            self._contents.show(record)
        return hollow

    def enter_tensor(
        self, tensor: Tensor, device: torch.device, kind: Kind, label: str, module: str, whole: bool
    ) -> Tensor:
        """Return a hollow tensor for a real one that is there before the step.

        ``module`` is the path of the module that it is a parameter or buffer of, "" for others.
        ``whole``: its storage is as large as the original's, for others to share;
        otherwise one of its own elements, as a copy to another device has.
        """
        if whole:
            nbytes, output = tensor.untyped_storage().nbytes(), Output.of(tensor)
        else:
            geometry = torch.empty_like(tensor, device="meta")
            nbytes, output = geometry.numel() * geometry.element_size(), Output.of(geometry)
        known = None
        if nbytes > 0 and (kind is not Kind.PARAMETER or self._values.mode.computes):
            known = self._values_of(tensor)
        kept = known is not None and self._values.worth_knowing(tensor.dtype, tensor.numel())
        memory = memory_for(output.dtype, nbytes)
        if known is not None and kept:
            with self._values.threads():
                if whole:
                    memory = private.bytes_of(known.untyped_storage().cpu()).clone()
                else:
                    memory = zeros(nbytes)
                    private.read_as(tensor, output.on(memory.untyped_storage())).copy_(known)
        storage = private.hollow_storage(nbytes, memory)
        origin = Origin(Phase.BASELINE, module)
        entry = Allocation(nbytes, kind, origin, output.shape, dtype_name(output.dtype), label)
        on = self._ledger.on(device)
        record = self._ledger.attach(storage, on.add(entry), on, hollow=True, memory=memory)
        if kept:
            self._contents.show(record)
        return private.read_as(tensor, output.on(storage))

    def _values_of(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor with the values of one that the program came with, if they are known."""
        if tensor.is_meta:
            return None
        lent = self.lent(tensor)
        if lent is not None:
            content = lent.content
            self._values.misses = lent.missing if content is None else self._values.misses
            return None if content is None else Output.of(tensor).on(content.untyped_storage())
        on_host = tensor.device.type == "cpu" and private.has_memory(tensor.untyped_storage())
        return tensor if on_host else None


def _as_before(entry: Allocation, kind: Kind, label: str = "", module: str = "") -> Allocation:
    """Return what another ledger has of an allocation as what was there before."""
    module = module or entry.origin.module
    origin = entry.origin._replace(phase=Phase.BASELINE, module=module)
    return entry._replace(kind=kind, label=label or entry.label, origin=origin)


_address: Any = torch.UntypedStorage.data_ptr
"""Where a storage is, also while a trace says otherwise."""

Region = tuple[int, int]
"""The first byte of a part of a file, and the first one after it."""

_Identity = tuple[int, int, int, int]


class _Mapped(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    unknown: Sequence[Region]


WRITTEN: dict[_Identity | None, tuple[Region, ...]] = {}
"""The regions of which nothing is known, of files that traces of this process wrote and that are as
they were written."""


def identity_of(path: str | os.PathLike[str]) -> _Identity | None:
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
