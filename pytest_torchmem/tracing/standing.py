"""A fake GPU that stands between traces, for as long as there are objects on it.

A trace begins with nothing and ends with nothing. Fixtures, modules and whole test suites do not:
what they put on the GPU stays there from one test to the next. So this is the same machinery,
switched on and off around whatever is to see the GPU, with one ledger that stays. On the host
everything is real; hollow is what is on the GPU, and what comes from there with unknown values.

A trace that runs meanwhile has a ledger of its own. It takes hollow tensors that it meets, and
those that it was told of, as present from the beginning.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from weakref import WeakSet

import torch

from pytest_torchmem.allocator.device_memory import parse_options
from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.conversion import Lender, Lent, give_survivors_data
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.values.contents import Values
from pytest_torchmem.journal import journal
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.targets.host import REFERENCE
from pytest_torchmem.targets.target import Selected, Target
from pytest_torchmem.torch_private.patches import having
from pytest_torchmem.torch_private.self_test import check_torch
from pytest_torchmem.torch_private.settings import all_settings, thread_settings
from pytest_torchmem.torch_private.tensors import nowhere
from pytest_torchmem.tracing.compiled import Compiled
from pytest_torchmem.tracing.layers import Memory, gradient_held_by_engine_alone, layers
from pytest_torchmem.tracing.passes import Lowering

_STANDING: "WeakSet[StandingGpu]" = WeakSet()
_OF_FIXTURE = (
    "a fixture put on cuda, where most values are not kept. Make that in the body of the test"
)
_REAL_HOST = "between traces tensors on the CPU are real, and Inductor's kernels would not run"
_VALUES = {"auto": Values.BETWEEN_TRACES, "real": Values.REAL, "none": Values.GUESSED}


class StandingGpu:
    """A fake GPU, by its name in the catalogue; ``limited`` to its memory or not.

    ``values`` are those of a trace; ``"auto"`` computes as far as a budget for each test goes,
    which is larger if the tests are ``of_suite``, run on this GPU and not traced. It is the one of
    ``gpus`` that has the number ``index`` and is current from the beginning.

    It belongs to the thread that first switches it on.
    """

    def __init__(
        self,
        gpu: str,
        *,
        allocator: str = "",
        limited: bool = False,
        values: str = "auto",
        of_suite: bool = False,
        gpus: int = 1,
        index: int = 0,
    ) -> None:
        check_torch()
        self.gpu = gpu
        modelled = find_gpu(gpu)
        target = Target(REFERENCE, modelled, gpus=gpus, index=index, selected=Selected(index))
        self._ledger = Ledger()
        self._devices = tuple(self._ledger.on(device) for device in target.devices)
        memory = Memory(parse_options(allocator), limited)
        self._memories = tuple(memory.of(device, modelled) for device in self._devices)
        self.memory = self._memories[index]
        alone = gradient_held_by_engine_alone()
        mode = Values.OF_SUITE if of_suite and values == "auto" else _VALUES[values]
        self._interceptor = Interceptor(
            target, self._ledger, Attribution(), alone, mode, real_host=True
        )
        self._interceptor.parts.conversion.lender = self._lent_by_others
        self._context = TraceContext(self._interceptor)
        self._kept = ExitStack()
        self._kept.enter_context(journal.settings_kept(all_settings()))
        self._kept.enter_context(journal.settings_kept(thread_settings(), of_thread=True))
        self._journal = journal.Journal()
        self._present: tuple[StorageRecord, ...] = ()
        _STANDING.add(self)

    # -- on and off --------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether this process sees the GPU now; one that was forked does not."""
        return journal.what_stands() is self

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let this thread see the GPU, and no other; where it does so already nothing happens.
        Raises ``UsageError`` in a trace.
        """
        if self.is_on or self not in _STANDING:
            yield
            return
        with journal.standing_paused():
            try:
                with journal.undisturbed():
                    self.resume()
                yield
            finally:
                with journal.undisturbed():
                    if self.is_on:
                        self.pause()

    def resume(self) -> None:

        def switch_on(stack: ExitStack) -> None:
            stack.callback(self._interceptor.threads.released)
            stack.callback(nowhere().forget)
            on_thread = self._interceptor.threads.on_thread
            compiled = Compiled(self._interceptor, None, Lowering(_REAL_HOST))
            stack.enter_context(journal.program_kept(compiled.following(), on_thread))
            stack.enter_context(layers(self._interceptor, self._context, self._memories))

        self._journal = journal.stand(self, switch_on)

    def pause(self) -> None:
        journal.no_longer_stand(self._journal)

    def close(self) -> None:
        """End: what is still on the GPU reads as nan from now on."""
        with journal.undisturbed():
            if self.is_on:
                self.pause()
            _STANDING.discard(self)
            give_survivors_data(self._ledger)
            self._kept.close()

    # -- what is on it -----------------------------------------------------------------------------

    def cut(self) -> None:
        """Forget what is gone, at the end of a test; peaks and what is reserved stay."""
        parts = self._interceptor.parts
        with self._interceptor.working() if self.is_on else ExitStack():
            parts.numbers.settle()
        for memory in self._memories:
            memory.cut()
        self._ledger.cut()
        parts.placement.cut()
        parts.attribution.cut()
        parts.values.cut()
        for streams in parts.streams:
            streams.cut()

    def begin_peak(self) -> None:
        """Let ``allocated_peak`` begin with what is on the GPUs now."""
        for memory in self._memories:
            memory.forget_peaks()

    @property
    def allocated_peak(self) -> int:
        """The most that was allocated on one of the GPUs since ``begin_peak``, in bytes."""
        return max(memory.peaks()["peak"].allocated for memory in self._memories)

    def live(self, since: Sequence[int] = ()) -> list[StorageRecord]:
        """Return what is on the GPUs now, in the order in which it was made on each. Of what was
        there before ``since``, which ``booked`` has said, nothing.
        """
        records = tuple(self._ledger.records.values())
        found: list[StorageRecord] = []
        for place, device in enumerate(self._devices):
            start = since[place] if since else 0
            here = (one for one in records if one.ledger is device and one.index > start)
            found += sorted(here, key=lambda record: record.index)
        return found

    def hollow(self) -> list[StorageRecord]:
        """Return everything that has no memory, on the GPU and on the host."""
        return [record for record in self._ledger.records.values() if record.hollow]

    @property
    def booked(self) -> tuple[int, ...]:
        """How many allocations there were on each of the GPUs so far."""
        return tuple(device.booked for device in self._devices)

    def presenting(self, records: Iterable[StorageRecord]) -> AbstractContextManager[None]:
        """Let traces count what is alive of ``records`` from their beginning, used or not."""
        return having(self, _present=tuple(records))

    def present(self) -> Iterator[tuple[Lent, torch.UntypedStorage]]:
        """Yield what traces count from their beginning."""
        for record in self._present:
            storage = record()
            lent = self.lend(record.address)
            here = self._ledger.records.get(record.address) is record
            if storage is not None and lent is not None and here:
                yield lent, storage

    def lend(self, address: int) -> Lent | None:
        """Return a hollow storage of this ledger by its address, ``None`` where it is not one."""
        record = self._ledger.records.get(address)
        if record is None or not record.hollow or record.lent:
            return None
        contents = self._interceptor.parts.values.contents
        entry = record.ledger.entries[record.index - 1]
        known, assumed = contents.known(record), contents.assumed(record)
        return Lent(record.ledger.device, entry, known, assumed, _OF_FIXTURE)

    def _lent_by_others(self, address: int) -> Lent | None:
        return next(_lent(address, lambda gpu: gpu is not self), None)


def _lent(address: int, which: Callable[[StandingGpu], bool]) -> Iterator[Lent]:
    for gpu in tuple(_STANDING):
        lent = gpu.lend(address) if which(gpu) else None
        if lent is not None:
            yield lent


def lender_of_standing_gpus() -> Lender:
    """Return what gives the hollow storage at an address that a GPU has which stands now. None
    stands up in the course of a trace.
    """
    if not _STANDING:
        return lambda address: None
    return lambda address: next(_lent(address, lambda gpu: True), None)


def present_on_standing_gpus() -> Iterator[tuple[Lent, torch.UntypedStorage]]:
    """Yield what a trace that begins now is to count from its beginning."""
    for gpu in tuple(_STANDING):
        yield from gpu.present()
