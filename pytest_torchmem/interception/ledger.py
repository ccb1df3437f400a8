"""The ledger: every storage on its device, from the operator that made it to its last reference.

Only the order of events is written down while a program runs; peaks and what explains them are read
from it afterwards.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import get_ident
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from pytest_torchmem.allocator.device_memory import PoolId
from pytest_torchmem.operators.workspace import Buffer, Workspace
from pytest_torchmem.profile.timeline import (
    Allocation,
    Kind,
    OperatorCall,
    Origin,
    Phase,
    Timeline,
    Work,
)
from pytest_torchmem.targets.gpus import LibraryAnswer, WorkspaceKey
from pytest_torchmem.torch_private.tensors import storage_address

_Noted = tuple[int, int, Origin, int, str, tuple[int, ...], Work, str]
"""A call of an operator as it is written down: an ``OperatorCall``, without the events of storages
that were there before the trace."""

_UNSAID = (Kind.ACTIVATION, Kind.INPUT, Kind.OTHER)
"""Kinds by where something was made or came from, not by what it is."""


class DeviceLedger:
    """The allocations of one device in order."""

    per_thread: ClassVar[dict[str, Callable[[], Any]]] = {"stream": int}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current = 0
        self.entries: dict[int, Allocation] = {}
        """By their index less one; without those that a cut took away."""
        self.booked = 0
        """How many there were so far; the index of the last one."""
        self.events: list[int] = []
        self.phases: list[tuple[int, Phase]] = []
        self.module_calls: list[tuple[int, int]] = []
        """Where a module was called that no other one calls, and its ``id``."""
        self.earlier: list[int] = []
        """Events of storages that were there before the trace and were met in its course."""
        self.calls: list[_Noted] | None = []
        """The operators that ran, in order; None where nobody will ask."""
        self.stream = 0
        """The stream that is current; 0 is the default one."""
        self.streams: dict[int, int] = {}
        """The streams of entries that were made on another than the default one."""
        self.routes: list[tuple[PoolId, Callable[[int], bool]]] = []
        """Private pools that serve requests now, and on which streams; the last one comes first."""
        self.private: dict[int, PoolId] = {}
        """The private pools of entries that were made in one."""
        self.pinned: set[int] = set()
        """Entries in pinned memory, which is the host's."""
        self.foreign: dict[int, int] = {}
        """The bytes of entries in memory that torch's allocators did not make: numpy's arrays, what
        processes share."""
        self.kept: dict[tuple[str, int, int], int] = {}
        """Workspaces that stay, by library, handle and stream."""
        self.handles: dict[int, int] = {}
        """The handle that each thread holds; that of 0 is the autograd engine's."""
        self.free_handles: list[int] = []
        """Those of threads that have ended."""
        self.asked: list[tuple[int, Buffer]] | None = None
        """While an operator's body runs: the workspaces that stay that it asked for, with how many
        events there were before, there already or not."""
        self.unknown_workspaces: set[str] = set()
        """Operators that ran and whose workspace is not known."""
        self.estimated_workspaces: set[str] = set()
        """Those of them whose workspace is an estimate, and counted."""
        self.calibrated_workspaces: set[str] = set()
        """Operators that ran and whose workspace was measured."""
        self.library_workspaces: set[str] = set()
        """Operators that ran and whose workspace a library told."""
        self.library_answers: dict[LibraryAnswer, dict[str, None]] = {}
        """What libraries were asked and told, with the modules that asked."""
        self.questions: set[WorkspaceKey] = set()
        """What a calibration was or would be asked."""
        self.before_adding: Callable[[Allocation, int], None] | None = None
        """Is asked before anything is added, with its stream; it raises where the device has no
        memory left."""

    def note(self, workspace: Workspace, module: str = "") -> None:
        """Remember of a workspace that a module took what no exact formula gave."""
        if workspace.unknown:
            self.unknown_workspaces.update(workspace.unknown)
            self.estimated_workspaces.update(workspace.estimated)
        if workspace.questions:
            self.questions.update(workspace.questions)
            self.calibrated_workspaces.update(workspace.calibrated)
        if workspace.answers:
            self.library_workspaces.update(workspace.told)
            for answer in workspace.answers:
                self.library_answers.setdefault(answer, {})[module] = None

    def handle_of(self, thread: int) -> int:
        """Return a thread's handle: the one given back last, else a new one, as it first asks; and
        back it goes at its end (aten/src/ATen/cuda/detail/DeviceThreadHandles.h, ``reserve``).
        """
        if thread not in self.handles:
            free = self.free_handles
            self.handles[thread] = free.pop() if free else len(self.handles)
        return self.handles[thread]

    def private_pool(self, stream: int) -> PoolId | None:
        """Return the private pool that serves a request on ``stream`` now (``get_pool``)."""
        serving = (pool for pool, serves in reversed(self.routes) if serves(stream))
        return next(serving, None)

    def add(self, entry: Allocation, earlier: bool = False) -> int:
        """Book an allocation and return its index; ``earlier`` than everything else, or now."""
        if self.before_adding is not None:
            self.before_adding(entry, 0 if earlier else self.stream)
        self.entries[self.booked] = entry
        self.booked = index = self.booked + 1
        if earlier:
            self.earlier.append(index)
        else:
            self.events.append(index)
            if self.stream:
                self.streams[index] = self.stream
            if self.routes and (pool := self.private_pool(self.stream)) is not None:
                self.private[index] = pool
        self.current += entry.nbytes
        return index

    def remove(self, index: int) -> None:
        """Strike an allocation off."""
        self.events.append(-index)
        self.current -= self.entries[index - 1].nbytes

    def origin(self, index: int) -> Origin:
        """Return who made the allocation of a record's ``index``."""
        return self.entries[index - 1].origin

    def name(self, index: int, kind: Kind, label: str, module: str) -> None:
        """Write down what an allocation turned out to be: a module's parameter or buffer."""
        entry = self.entries[index - 1]
        if not entry.label:
            origin = entry.origin._replace(module=module)
            self.entries[index - 1] = entry._replace(kind=kind, label=label, origin=origin)

    def note_state(self, index: int) -> None:
        """Write down that an allocation is an optimizer's state, which was made elsewhere."""
        entry = self.entries[index - 1]
        if not entry.label and entry.kind in _UNSAID:
            self.entries[index - 1] = entry._replace(kind=Kind.OPTIMIZER_STATE)

    def live_allocations(self) -> tuple[Allocation, ...]:
        """Return what is alive, largest first."""
        live = [self.entries[index - 1] for index in self._live()]
        return tuple(sorted(live, key=lambda allocation: -allocation.nbytes))

    def cut(self) -> None:
        """Forget what has been freed; what is live was made first, in the same order."""
        live = self._live()
        self.entries = {index - 1: self.entries[index - 1] for index in live}
        self.streams = {index: self.streams[index] for index in live if index in self.streams}
        self.private = {index: self.private[index] for index in live if index in self.private}
        self.pinned.intersection_update(live)
        self.foreign = {index: self.foreign[index] for index in live if index in self.foreign}
        self.earlier.clear()
        self.calls = None
        self.events[:] = live
        self.module_calls.clear()
        del self.phases[:-1]
        self.phases[:] = [(0, phase) for _, phase in self.phases]

    def _live(self) -> list[int]:
        """Return what was made and not freed, in the order in which it was made."""
        live = dict.fromkeys(self.earlier)
        for event in self.events:
            if event > 0:
                live[event] = None
            else:
                live.pop(-event, None)
        return list(live)

    def timeline(self) -> Timeline:
        """Return what happened so far; storages met late stand before everything else."""
        shift = len(self.earlier)
        phases = tuple(
            (start + shift if position else 0, phase)
            for position, (start, phase) in enumerate(self.phases)
        )
        # Where the module was called that was called most often, if it was repeatedly.
        counts = Counter(module for _, module in self.module_calls)
        module, number = max(counts.items(), key=lambda item: item[1], default=(0, 0))
        steps = tuple(at + shift for at, who in self.module_calls if number > 1 and who == module)
        return Timeline(tuple(self.entries.values()), (*self.earlier, *self.events), phases, steps)

    def finish(self) -> tuple[Timeline, Callable[[], tuple[OperatorCall, ...]]]:
        """Return the timeline of a trace that is over, and what returns the operators that ran,
        with their places among its events. From then on the ledger knows the bytes of each request,
        which a replay asks for.
        """
        calls, self.calls = partial(_operator_calls, self.calls or [], len(self.earlier)), None
        timeline = self.timeline()
        self.entries = cast(dict[int, Allocation], timeline.allocations)  # by the same numbers
        return timeline, calls

    def with_foreign(self, timeline: Timeline) -> Timeline:
        """Return a timeline with the bytes of memory that torch's allocators did not make."""
        made = list(timeline.allocations)
        for index, nbytes in self.foreign.items():
            made[index - 1] = made[index - 1]._replace(nbytes=nbytes)
        return timeline._replace(allocations=tuple(made))


def _operator_calls(calls: list[Any], shift: int) -> tuple[OperatorCall, ...]:
    """Return calls after ``shift`` events that were not seen when they were written down."""
    for place, (start, stop, *others) in enumerate(calls):  # in place: there may be millions
        calls[place] = OperatorCall(start + shift, stop + shift, *others)
    return tuple(calls)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class StorageRecord(weakref.ref):  # type: ignore[type-arg]
    """A storage the ledger knows, where it lives, and what is known of its values."""

    __slots__ = (
        *("address", "guessed", "hollow", "index", "ledger", "lent", "memory", "outdated"),
        *("shared", "content", "size", "assumption", "of_ranks", "ends", "as_met"),
    )

    address: int
    guessed: bool
    """Whether its device is a guess: C++ asked for it without saying beside which tensor."""
    index: int
    hollow: bool
    """Whether the storage has no memory; a real one was met, not made, by the trace."""
    ledger: DeviceLedger
    lent: bool
    """Whether it is hollow and belongs to another ledger, which outlives this one."""
    memory: Tensor | None
    """Bytes that the hollow storage shows to whoever reads it."""
    outdated: bool
    """Whether a real storage holds what it did before an operator of the trace wrote to it."""
    shared: Tensor | None
    """Memory that other processes see, where what is known lies in such; not set before that."""
    content: Tensor | None
    """Its values as a flat uint8 tensor in real memory, where they are known."""
    size: int
    """The bytes of that: of tensors nothing is asked when a storage dies, at any moment. Their
    answers are tensors while ``torch.jit`` traces."""
    assumption: Any
    """What the elements of an unknown storage count as, an ``Assumption`` or None."""
    of_ranks: str
    """Where the content goes by what other processes are taken to have: the line that gathered it.
    """
    ends: tuple[tuple[int, int], ...]
    """While nobody has written to it since it was made empty: where its memory begins and ends, in
    pointers and bytes."""
    as_met: bool
    """Whether nobody was given the copy of what a real storage holds."""


class Ledger:
    """All devices of one trace."""

    def __init__(self) -> None:
        self.devices: dict[torch.device, DeviceLedger] = {}
        self.records: dict[int, StorageRecord] = {}
        self.phase = Phase.FORWARD
        self.known_bytes = 0
        """What all contents take that are known."""
        self.resized: dict[int, int] = {}
        """What storages hold now that have been resized, by their addresses."""
        self.outgrown: list[tuple[weakref.ref[Tensor], Tensor]] = []
        """Tensors of the program that got a larger storage, and copies of what they were."""

    def on(self, device: torch.device) -> DeviceLedger:
        """Return the ledger of ``device``, opened at first use."""
        ledger = self.devices.get(device)
        if ledger is None:
            ledger = self.devices[device] = DeviceLedger(device)
            ledger.phases.append((0, self.phase))
        return ledger

    def begin(self, phase: Phase) -> None:
        """Let everything so far belong to ``phase``."""
        self.phase = phase
        for ledger in self.devices.values():
            ledger.phases[:] = [(0, phase)]

    def enter(self, phase: Phase) -> None:
        """Begin ``phase`` on every device."""
        self.phase = phase
        for ledger in self.devices.values():
            ledger.phases.append((len(ledger.events), phase))

    def note_call(self, module: int) -> None:
        """Take note that a module begins, by its ``id``, which no other module calls."""
        for ledger in self.devices.values():
            ledger.module_calls.append((len(ledger.events), module))

    def attach(
        self,
        storage: torch.UntypedStorage,
        index: int,
        ledger: DeviceLedger,
        hollow: bool = False,
        memory: Tensor | None = None,
    ) -> StorageRecord:
        """Let what was written down at ``index`` be struck off when ``storage`` dies."""
        record = StorageRecord(storage, self.strike)
        address = storage._cdata
        record.address, record.index, record.ledger = address, index, ledger
        record.hollow, record.memory = hollow, memory
        record.lent = record.outdated = record.guessed = record.as_met = False
        record.content = record.assumption = None
        record.size, record.of_ranks, record.ends = 0, "", ()
        if address in self.records:
            self.forget(self.records[address])
            self.resized.pop(address, None)
        self.records[address] = record
        return record

    def forget(self, record: Any) -> None:
        """Know nothing of a storage's values any more."""
        self.known_bytes -= record.size
        record.content = record.assumption = None
        record.size, record.of_ranks, record.ends, record.as_met = 0, "", (), False

    def move(self, record: StorageRecord, ledger: DeviceLedger) -> None:
        """Book a storage on another device than it was thought to be made on."""
        entry = record.ledger.entries[record.index - 1]
        index = ledger.add(entry._replace(nbytes=entry.nbytes or cast(Any, record()).nbytes()))
        record.ledger.remove(record.index)
        record.index, record.ledger, record.guessed = index, ledger, False

    @contextmanager
    def changing(self, change: Callable[[Allocation], Allocation]) -> Iterator[None]:
        """Write what is allocated meanwhile down as ``change`` returns it."""
        before = {device: ledger.booked for device, ledger in self.devices.items()}
        try:
            yield
        finally:
            for device, ledger in self.devices.items():
                for index in range(before.get(device, 0), ledger.booked):
                    ledger.entries[index] = change(ledger.entries[index])

    def note_kinds(self, held: Iterable[tuple[Tensor, Kind]]) -> None:
        """Write down what the storages of tensors turn out to be."""
        for tensor, kind in held:
            record = self.records.get(storage_address(tensor))
            if record is not None:
                entries, index = record.ledger.entries, record.index - 1
                entries[index] = entries[index]._replace(kind=kind)

    def resize(self, record: StorageRecord, nbytes: int, origin: Origin) -> None:
        """Write down that a storage gets memory of another size, or gives all of it back. As
        ``resize_bytes_cpu`` and ``resize_bytes_cuda`` do (aten/src/ATen/native/Resize.cpp, cuda/
        Resize.cpp): the old memory is given back when the new is there.
        """
        address, ledger = record.address, record.ledger
        entry = ledger.entries[record.index - 1]
        held = self.resized.get(address, entry.nbytes)
        if nbytes == held:
            return
        self.forget(record)
        self.resized[address] = nbytes
        before = record.index
        if nbytes:
            record.guessed = False
            record.index = ledger.add(entry._replace(nbytes=nbytes, origin=origin))
        if held:
            ledger.remove(before)

    def keep(self, buffer: Buffer, in_engine: bool, ledger: DeviceLedger, origin: Origin) -> None:
        """Write down a library's workspace that stays, where its handle has none for the stream."""
        if ledger.asked is not None:
            ledger.asked.append((len(ledger.events), buffer))
        name, nbytes, confidence = buffer.name, buffer.nbytes, buffer.confidence
        handle = -1 if buffer.process else ledger.handle_of(0 if in_engine else get_ident())
        key = (name, handle, 0 if buffer.process else ledger.stream)
        if key not in ledger.kept:
            label = f"{name} on another stream" if key[2] else name
            entry = Allocation(nbytes, Kind.WORKSPACE, origin, (), "", label, confidence)
            ledger.kept[key] = ledger.add(entry)

    def give_handles_back(self) -> None:
        """Let the next thread have the handles of the present one, which ends."""
        for ledger in self.devices.values():
            if (handle := ledger.handles.pop(get_ident(), None)) is not None:
                ledger.free_handles.append(handle)

    def made(self) -> dict[int, StorageRecord]:
        """Return the storages that were made and are still alive, by their addresses."""
        return {
            record.address: record
            for record in tuple(self.records.values())
            if record.hollow and not record.lent and record() is not None
        }

    def close(self) -> dict[int, StorageRecord]:
        """Stop writing down; return what was ``made``. Some program's variable, or a traceback's
        frame, may hold it.
        """
        survivors = self.made()
        self.records.clear()
        return survivors

    def give_back_outgrown(self) -> None:
        """Restore the program's own storages that the step has grown."""
        while self.outgrown:
            reference, before = self.outgrown.pop()
            tensor = reference()
            if tensor is not None:
                storage, shape, stride = before.untyped_storage(), before.shape, before.stride()
                with torch.no_grad():
                    tensor.set_(storage, before.storage_offset(), shape, stride)

    def cut(self) -> None:
        """Forget what has been freed: a ledger that is kept for hours must not grow."""
        self.outgrown.clear()
        for ledger in self.devices.values():
            ledger.cut()

    def strike(self, record: StorageRecord) -> None:
        """Strike a storage off that is gone, or is to be met anew."""
        # What was written down of the step holds the record itself.
        record.memory = record.content = None
        self.known_bytes -= record.size
        record.size, address = 0, record.address
        is_known = self.records.pop(address, None) is record
        if is_known and (not self.resized or self.resized.pop(address, -1) != 0):
            record.ledger.remove(record.index)
