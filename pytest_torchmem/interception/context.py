"""The running trace, as the functions that replace torch's own see it, and how these are kept.

They are made once and used by one trace after another: to make hundreds of functions takes longer
than a small step. They ask a stand-in for the trace that is running; between traces it stands for
one that is over. What outlives a trace, an autograd node or the capture of a graph, holds the
trace's own context instead: ``TraceContext.itself``.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from threading import get_ident
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.decompose import RunMode
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.sparse import storage_holder
from pytest_torchmem.interception.values import contents, known
from pytest_torchmem.operators import layouts, spec, workspace
from pytest_torchmem.profile.timeline import Kind, Phase
from pytest_torchmem.step.trees import Args, Kwargs, argument_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import REFERENCE
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private import tensors as private
from pytest_torchmem.torch_private.function_holders import program_functions_aside
from pytest_torchmem.torch_private.keys import FAKE, OpOverload, is_excluded
from pytest_torchmem.torch_private.patches import LookedAt, Patch, Replaceable, Replacements

_CPU = torch.device("cpu")


class TraceContext:
    """What replaced functions ask of the trace that is running, and do in it."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._parts = parts = interceptor.parts
        self._threads = threads = interceptor.threads
        self.on_thread = threads.on_thread
        """Whether the caller is on a thread of the trace."""
        self.turn = threads.turn
        self.working = interceptor.working
        self.stands = interceptor.real_host
        """Whether this is a GPU that stands between traces, rather than a trace."""
        self.target = parts.target
        self.device = parts.target.normalise
        """Returns a device as the trace writes it; raises for a GPU that is not there."""
        self.placing_on = interceptor.placing_on
        self.note_fused = parts.attribution.note_fused
        self.note_emptied: Callable[[], None] = lambda: parts.attribution.facts.emptied()
        self.mapped = parts.conversion.mapped
        self.handed = parts.conversion.handed
        self.streams = parts.streams
        self.values = parts.values
        self.resized = parts.ledger.resized
        """What storages hold that have been resized, by their addresses."""
        self.own = parts.conversion.own
        """What is noted of the program's own tensors, modules and optimizers, if it is."""
        self._itself = weakref.ref(self)
        self.noted_contents: list[Any] = []
        """Dictionaries of what is noted of tensors' contents, which they are the weak keys of."""
        self._pinned: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        """Real storages that count as pinned, by address."""
        self.note_module: Callable[[nn.Module], None] = lambda module: None
        """Is called with a module whose parameters are about to be replaced."""

    def off(self) -> bool:
        """Return whether the caller is the profiler itself, or on a thread that is in no trace."""
        thread, threads = get_ident(), self._threads
        if thread not in threads.locks and not self.on_thread():
            return True
        return self._interceptor.inside == thread

    @property
    def itself(self) -> "TraceContext":
        """The trace itself, for objects that may outlive it and hold a stand-in."""
        itself = self._itself()
        assert itself is not None
        return itself

    def joined_by_new(self) -> Callable[[], AbstractContextManager[None]]:
        """Return the context in which a thread that is started now runs in the trace."""
        threads, attribution = self._interceptor.threads, self._parts.attribution
        lock, begin = threads.lock_for_new(), attribution.calls_of_new_thread()

        @contextmanager
        def joined() -> Iterator[None]:
            with threads.joined(lock):
                begin()
                yield

        return joined

    def in_fake_tensor_mode(self) -> bool:
        """Return whether the program is in a ``FakeTensorMode``, where torch's own devices are."""
        return is_excluded(FAKE) and not self.inside

    @property
    def describes(self) -> bool:
        """Whether the profiler asks a module about itself, on this thread."""
        return self._parts.attribution.facts.describes == get_ident()

    @property
    def mode(self) -> RunMode:
        """How operators are run at the moment."""
        return self._interceptor.mode

    def record(self, tensor: Tensor) -> StorageRecord | None:
        """Return the ledger's record of a tensor's storage, or None where it has none."""
        if self.off():
            return None
        parts = self._parts
        try:
            record = parts.ledger.records.get(private.storage_address(tensor))
            if record is None and parts.conversion.lent(tensor) is not None:
                with self.working():
                    return parts.conversion.borrow(tensor)
            if record is None and type(tensor) is not Tensor and private.is_wrapper(tensor):
                return self._record_of_part(tensor)
            return record
        except (RuntimeError, NotImplementedError):  # a tensor without storage
            sparse = tensor.layout is torch.sparse_coo or tensor.layout in layouts.COMPRESSED
            inner = storage_holder(tensor) if sparse else private.unwrapped(tensor)
            if inner is None and private.is_wrapper(tensor):
                return self._record_of_part(tensor)
            return None if inner is None else self.record(inner)

    def _record_of_part(self, wrapper: Tensor) -> StorageRecord | None:
        """Return the record of the first tensor that a ``DTensor``, or another wrapper, is of."""
        first = next(iter(private.wrapped_tensors(wrapper)), None)
        return None if first is None else self.record(first)

    def record_at_compiler(self, tensor: Tensor) -> StorageRecord | None:
        """Return the record of a tensor that the program's compiler looks at, on any device."""
        if not self.mode.compiles or not self.on_thread():
            return None
        return self._parts.ledger.records.get(private.storage_address(tensor))

    def record_of(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        return None if self.off() else self._parts.ledger.records.get(storage._cdata)

    def without_memory(self, tensor: Tensor) -> StorageRecord | None:
        """Return the record of a tensor whose storage has no memory, or what was there before the
        trace wrote to it; else None.
        """
        record = self.record(tensor)
        return record if record is not None and (record.hollow or record.outdated) else None

    def is_on_gpu(self, tensor: Tensor) -> bool:
        if self.mode.makes_graphs:  # of fake tensors, which have no record
            return self.target.gpu is not None and tensor.device.type == "cuda"
        record = self.record(tensor)
        return record is not None and record.ledger.device.type == "cuda"

    def begin_beside(self, tensor: Tensor) -> None:
        """Let what a composite operator makes first of all be where its tensor is."""
        record = self.record(tensor)
        placement = self._parts.placement
        # A real one may be there that the trace has not met yet.
        placement.last = self._parts.ledger.on(_CPU) if record is None else record.ledger

    def device_beside(self, args: Args, kwargs: Kwargs) -> torch.device:
        """Return where that is made which C++ asks the CPU for in a call of an operator."""
        if self.is_placing:
            return self.mode.placed_on or _CPU
        for tensor in argument_tensors((args, kwargs)):
            record = self.record(tensor)
            return _CPU if record is None else record.ledger.device
        return self._parts.placement.beside_no_tensor(kwargs).device

    def lifted(self, tensor: Tensor) -> Tensor:
        """Return a tensor that C++ made of Python numbers as it is in the trace."""
        if self.record(tensor) is not None:
            return tensor
        device = self.mode.placed_on if self.is_placing else None
        conversion, frame = self._parts.conversion, sys._getframe(1)
        with self.working():
            return conversion.lift(tensor, device or _CPU, frame)

    def brought(self, tensor: Tensor) -> bool:
        """Return whether a tensor is not the trace's own, but what the program came with."""
        return self.record(tensor) is None or self.made_before_step(tensor)

    def made_before_step(self, tensor: Tensor) -> bool:
        record = self.record(tensor)
        return record is not None and record.ledger.origin(record.index).phase is Phase.BASELINE

    def meet_storage(self, storage: torch.UntypedStorage, device: torch.device = _CPU) -> None:
        """Book a real storage that C++ made just now, or let a booked one be on ``device``."""
        ledger = self._parts.ledger
        record = self.record_of(storage)
        if record is None:
            with self.working():
                self.meet(private.bytes_of(storage), device)
        elif record.ledger.device != device:
            ledger.move(record, ledger.on(device))

    def borrow_storage(self, storage: torch.UntypedStorage) -> None:
        """Book a real storage as one that the program brought with it."""
        with self.working():
            made = private.bytes_of(storage)
            self._parts.conversion.borrow(made)

    def strike_unless_used(self, held: Tensor, tensors: int = 2) -> None:
        """Strike a real tensor off that no others hold than so many: the profiler's own, and one
        that is going.
        """
        storage = held.untyped_storage()
        record = self._parts.ledger.records.get(storage._cdata)
        uses = private.storage_use_count(storage._cdata)
        if uses > tensors + 1:  # ``storage``
            return
        if record is not None:
            self._parts.ledger.strike(record)
        else:
            self._parts.conversion.forget(storage._cdata)

    def holding(self, kind: Kind) -> AbstractContextManager[None]:
        """Let what is allocated meanwhile be of a kind."""
        return self._parts.ledger.changing(lambda entry: entry._replace(kind=kind))

    def unknown_bytes(self, nbytes: int) -> Tensor:
        """Return bytes of the host that are not known and take no memory."""
        with self.working():
            memory = contents.memory_for(torch.uint8, nbytes)
            made = private.bytes_of(private.hollow_storage(nbytes, memory))
            self.meet(made, memory=memory, hollow=True)
        return made

    def pin(self, tensor: Tensor) -> None:
        """Take note that a tensor of the host is in pinned memory."""
        record = self.record(tensor)
        if record is not None:
            record.ledger.pinned.add(record.index)
        else:  # the host is real
            self._pinned[private.storage_address(tensor)] = tensor.untyped_storage()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the host is in pinned memory."""
        record = self.record(tensor)
        if record is not None and record.index in record.ledger.pinned:
            return True
        return bool(self._pinned) and private.storage_address(tensor) in self._pinned

    def user_line(self) -> str:
        """Return the line of the traced program that is running, as errors begin."""
        return self._parts.attribution.user_line() or "the traced program"

    def computed_aside(self, compute: Callable[[], Any], operations: int) -> Any:
        """Return what a function of the program's tensors gives on their values, or None.

        Nothing of it is booked, and it makes real tensors on the host. None where a value is not
        known, or where so many operations are not to be had.
        """
        values = self._parts.values
        if not values.affords(operations):
            return None
        aside = self.mode._replace(aside=True)
        with self.turn(), torch.no_grad(), self._interceptor.in_mode(aside):
            try:
                return compute()
            except known.NotKnown:
                return None

    def enter_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Begin a backward, and return what runs it; one of a ``FakeTensorMode`` is no phase."""
        if not is_excluded(FAKE):
            with self.turn():
                with self._interceptor.working():  # what it copies is no work of the program's
                    self._parts.numbers.settle()
                self._parts.phases.enter_backward()
                if self._parts.target.gpu is not None:
                    return self._parts.order.around(run)
        return run

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        with self.turn():
            if self.own is not None:
                self.own.note_other(optimizer)
            with self._interceptor.working():
                self._parts.numbers.settle()
            self._parts.phases.enter_optimizer()

    def leave_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        with self.turn():
            self._parts.phases.leave_optimizer()
        self._parts.attribution.note_optimizer(optimizer)

    def meet(self, tensor: Tensor, device: torch.device = _CPU, **hollow: Any) -> None:
        """Book a tensor that was made just now on ``device`` without an operator."""
        if self.stands and device == _CPU and not hollow:
            return
        with self.working():
            self._parts.conversion.meet(tensor, device, sys._getframe(1), **hollow)

    def hold(self, owner: object, nbytes: int, by: str) -> Callable[[], object]:
        """Book bytes of the host that no storage has, until their owner is gone or what is returned
        is called.
        """
        with self.turn():
            return self._parts.conversion.hold(owner, nbytes, by, sys._getframe(1))

    def expect_made(self, storage: torch.UntypedStorage) -> None:
        """Book a storage of the host that was made just now without an operator."""
        if not self.stands and storage.nbytes():
            with self.turn():
                self._parts.conversion.expect_made(storage, sys._getframe(1))

    def resize(self, record: StorageRecord, nbytes: int) -> None:
        """Book that a storage was resized, without an operator."""
        parts = self._parts
        with self.turn():
            origin = parts.attribution.origin(parts.phases.find(), "resize_", sys._getframe(1))
            parts.ledger.resize(record, nbytes, origin)
            with self.working():
                parts.values.begin_anew(record, nbytes)

    def keep(self, buffer: workspace.Buffer, overload: OpOverload) -> None:
        """Book a library's workspace that stays and that ``overload`` makes on its first use."""
        with self.turn():
            self._interceptor.kernels.keep(buffer, spec.spec_of(overload), sys._getframe(1))

    def select(self, index: int) -> int:
        """Make a GPU current; return the index of the one before."""
        selected = self.target.selected
        before, selected.index = selected.index, index
        return before

    @property
    def inside(self) -> bool:
        """Whether the profiler itself is at work."""
        return self._interceptor.inside == get_ident()

    @property
    def is_placing(self) -> bool:
        """Whether ``placing_on`` is in force."""
        return self.mode.placed_on is not None and self._threads.last == get_ident()

    @property
    def gpu(self) -> Gpu:
        """The GPU that fake cuda models."""
        gpu = self.target.gpu
        assert gpu is not None
        return gpu


_Owner = TypeVar("_Owner")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_PLACES = "instead_of"


def instead_of(owner: Any, *names: Any) -> Callable[[_Method], _Method]:
    """Let a method of ``Functions`` stand for each ``Replaceable``, or attributes of ``owner``."""

    def mark(method: _Method) -> _Method:
        places: list[Any] = vars(method).setdefault(_PLACES, [])
        if isinstance(owner, Replaceable):
            places += (owner, *names)
        else:
            places += [Replaceable.of(owner, name) for name in names or (method.__name__,)]
        return method

    return mark


class Functions:
    """Methods in the place of functions of torch or Python, in one trace after another. They are
    called with the function that they stand for, and with what that is called with.
    """

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace

    def begin(self) -> None:
        """Forget what was noted in the trace before."""
        for noted in vars(self).values():
            if hasattr(noted, "clear"):
                noted.clear()

    def replacements(self) -> Replacements:
        """Return the methods that are marked, in their places."""
        return [
            place.by(calling(getattr(self, name), place.original))
            for name, method in vars(type(self)).items()
            for place in getattr(method, _PLACES, ())
        ]


def calling(method: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Return what calls ``method`` with the function that it stands for first."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    return function


@dataclass(eq=False, repr=False)
class Layer(Generic[_Owner]):
    """Replacements that are put in place together."""

    replacements: Replacements
    owner: _Owner
    """What the layers above call of this one."""
    begin: Sequence[Callable[[], object]] = ()
    """Called before and after each trace: what was noted of the last one is forgotten."""
    looked_at: Sequence[LookedAt] = ()
    """What else the replacements depend on."""

    def start(self) -> None:
        """Forget what was noted."""
        for begin in self.begin:
            begin()


class _Made(NamedTuple):
    layer: Layer[Any]
    patch: Patch
    by: Callable[..., Layer[Any]]
    """The function that made it: another one where its module was imported anew."""


class _Lasting:
    """The layers that were made in this process; one trace at a time has them."""

    def __init__(self) -> None:
        self._trace: TraceContext = object.__new__(TraceContext)
        self._made: dict[str, _Made] = {}
        """By name, in the order in which they were made: each may call those before."""

    @contextmanager
    def following(self, trace: TraceContext) -> Iterator[None]:
        """Let all layers be those of a trace."""
        self._trace.__dict__ = trace.__dict__
        try:
            yield
        finally:
            if trace._threads.were_one:
                self._trace.__dict__ = _of_no_trace().__dict__
            else:  # a thread that goes on may be in one of the functions, which finish as they are
                self._trace, self._made = object.__new__(TraceContext), {}

    @contextmanager
    def layer(self, name: str, make: Callable[[TraceContext], Layer[_Owner]]) -> Iterator[_Owner]:
        """Have a layer in place, made with ``make(trace)`` if what it replaces is new."""
        layer, patch, _ = self._find(name, make)
        layer.start()
        try:
            patch.put_in_place()
            try:
                yield layer.owner
            finally:
                patch.put_back()
        finally:
            layer.start()

    def _find(self, name: str, make: Callable[[TraceContext], Layer[Any]]) -> _Made:
        found, by = self._made.get(name), getattr(make, "func", make)
        if found is None or found.by is not by or not found.patch.fits():
            if found is not None:
                names = [*self._made]
                for above in names[names.index(name) :]:
                    del self._made[above]
            layer = make(self._trace)
            with program_functions_aside(layer.replacements) as aside:
                if aside:  # what stands there would call the program's function, which calls it
                    layer = make(self._trace)
            patch = Patch(layer.replacements, layer.looked_at)
            found = self._made[name] = _Made(layer, patch, by)
        return found


LASTING = _Lasting()


@cache
def _of_no_trace() -> TraceContext:
    """Return the context of a trace that is over, and in which nothing ever was."""
    interceptor = Interceptor(Target(REFERENCE), Ledger(), Attribution(), None)
    interceptor.threads.end()
    interceptor.threads.released()
    return TraceContext(interceptor)
