"""What is switched on for a trace, or while a fake GPU stands, and off again in reverse order.

The tensors that a module's step begins with are made hollow. A program that asks for cuda in a
trace on the CPU is told so, on every machine alike.

A trace begins with nothing and ends with nothing. Fixtures, modules and whole test suites do not:
what they put on a fake GPU stays there from one test to the next. So the same is switched on and
off around whatever is to see the GPU, with one ledger that stays. On the host everything is real;
hollow is what is on the GPU, and what comes from there with unknown values. A trace that runs
meanwhile has a ledger of its own. It takes hollow tensors that it meets, and those that it was told
of, as present from the beginning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_torchmem.allocator.device_memory import AllocatorOptions, parse_options
from pytest_torchmem.errors import NoCudaError, UnsupportedTorchError
from pytest_torchmem.fake_cuda.libraries import ON_CPU, ON_GPU, libraries_followed
from pytest_torchmem.interception import attribution, phases, plan
from pytest_torchmem.interception.context import LASTING, Layer, TraceContext
from pytest_torchmem.interception.conversion import (
    NAME_DEVICE,
    Conversion,
    Lent,
    give_survivors_data,
)
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.interception.python_api import data, files
from pytest_torchmem.interception.python_api.program import Changes, FakeTensors, Threads
from pytest_torchmem.interception.split_modules import split_modules
from pytest_torchmem.interception.values.contents import Values
from pytest_torchmem.journal import in_place, journal
from pytest_torchmem.operators.layouts import COMPRESSED, compressed_indices, compressed_like
from pytest_torchmem.step.generators import keeping_forward_draws
from pytest_torchmem.step.step import asked_engine, steps_seen
from pytest_torchmem.targets.gpus import Gpu, find_gpu
from pytest_torchmem.targets.host import REFERENCE
from pytest_torchmem.targets.target import Selected, Target
from pytest_torchmem.torch_private import function_holders, kernels, keys, modes, patches, self_test
from pytest_torchmem.torch_private.settings import all_settings, thread_settings
from pytest_torchmem.torch_private.tensors import (
    has_dispatch,
    is_on_real_gpu,
    nowhere,
    storage_address,
)
from pytest_torchmem.tracing.compiled import Compiled
from pytest_torchmem.tracing.passes import Lowering

if TYPE_CHECKING:
    from pytest_torchmem.fake_cuda.memory import DeviceMemory


class Memory(NamedTuple):
    """How the fake GPU's memory is asked for."""

    options: AllocatorOptions
    limited: bool
    size: int | None = None
    """What the GPU has, where it is not what the catalogue says."""

    def of(self, ledger: DeviceLedger, gpu: Gpu) -> DeviceMemory:
        from pytest_torchmem.fake_cuda.memory import DeviceMemory

        if self.size is not None:
            gpu = replace(gpu, memory=self.size, context=min(gpu.context, self.size))
        return DeviceMemory(ledger, gpu, self.options, self.limited)


@cache
@self_test.on_own_thread
def gradient_held_by_engine_alone() -> phases.References:
    """Learn how many references a gradient has that the engine is about to add to in place. Raises
    ``UnsupportedTorchError`` where the engine's addition is not seen.
    """
    ledger = Ledger()
    interceptor = Interceptor(Target(REFERENCE), ledger, attribution.Attribution(), None)

    def program() -> None:
        twice_used = torch.empty(2, requires_grad=True) * 2.0
        ((twice_used * 2.0) + (twice_used * 2.0)).sum().backward()

    try:
        with interceptor.running():
            program()
    finally:
        interceptor.threads.released()
        give_survivors_data(ledger)
    if interceptor.kernels.sums.seen is None:
        raise UnsupportedTorchError(
            f"pytest-torchmem cannot trace on torch {torch.__version__}: the autograd engine does "
            "not accumulate gradients as in the supported versions (2.11 to 2.15)"
        )
    return interceptor.kernels.sums.seen


@contextmanager
def layers(
    interceptor: Interceptor, context: TraceContext, memories: tuple[DeviceMemory, ...]
) -> Iterator[None]:
    """Switch on interception, dispatch and identity, module and optimizer following; then off. What
    is real on the host keeps what the program does to it; all else is given back.
    """
    gpu, on_thread = interceptor.parts.target.gpu, interceptor.threads.on_thread
    with modes.constructors_asked(), ExitStack() as stack:
        stack.enter_context(keeping_forward_draws(interceptor.parts.values.forward_draws))
        stack.enter_context(LASTING.following(context))
        python = LASTING.layer("functions of Python", _functions)
        addresses, changes = stack.enter_context(python)
        stack.enter_context(changes.noted())
        stack.enter_context(data.subclasses_made(context))
        stack.enter_context(split_modules(context))
        if gpu is not None:
            from pytest_torchmem.fake_cuda.api.torch_cuda import cuda_identity
            from pytest_torchmem.fake_cuda.decompositions import cuda_dispatch

            interceptor.path_of = stack.enter_context(cuda_dispatch(gpu, context))
            stack.enter_context(cuda_identity(context, memories))
        else:
            stack.enter_context(data.storages_booked(context))
            # A machine without CUDA, which programs and optimizers ask about.
            stack.enter_context(LASTING.layer("no cuda", _no_cuda_functions))
        libraries = dict(ON_CPU if gpu is None else ON_GPU)
        libraries[files.SAFETENSORS] = partial(files.safetensors_files, addresses)
        stack.enter_context(libraries_followed(context, libraries))
        name = "data on cpu" if gpu is None else "data on cuda"
        stack.enter_context(LASTING.layer(name, data.data_functions))
        stack.enter_context(interceptor.parts.attribution.following_modules(on_thread))
        stack.enter_context(interceptor.running())
        try:
            yield
        finally:
            interceptor.path_of = lambda name: None  # which refers back to it


def _functions(trace: TraceContext) -> Layer[tuple[files.Addresses, Changes]]:
    """Let tensors without memory be copied, pickled, printed and read on the trace's threads, and
    phases and changes of the program's own modules be seen.
    """
    pickling, addresses = files.Pickling(trace), files.Addresses(trace)
    fake_tensors, changes = FakeTensors(trace), Changes(trace)
    others = (data.ValueMethods, files.Copies, data.RealStorages, Threads, files.Swaps)
    owners = (*(other(trace) for other in others), fake_tensors, pickling, addresses, changes)
    replacements = [entry for owner in owners for entry in owner.replacements()]
    replacements += files.sparse_files(trace, pickling)
    dispatch = kernels.below_interception(keys.HigherOrderOperator.dispatch)
    # TorchScript, which knows functions by their identity, is to know those that were replaced.
    find = patches.find_builtin[0].original
    find(len)  # makes its table, for the life of the process, of torch's own functions

    def find_replaced(function: Any) -> Any:
        return find(function_holders.HOLDERS.original(function))

    replacements += [looked_up.by(find_replaced) for looked_up in patches.find_builtin]
    replacements.append((keys.HigherOrderOperator, {"dispatch": dispatch}))
    asked = asked_engine(lambda run: trace.enter_backward(run), lambda: trace.on_thread())
    optimizers, steps = steps_seen(
        lambda optimizer: trace.enter_optimizer(optimizer),
        lambda optimizer: trace.leave_optimizer(optimizer),
        lambda: trace.on_thread(),
    )
    replacements += [asked, (optimizers, steps)]
    own = (one.begin for one in (pickling, addresses, fake_tensors, changes))
    begin = (*own, *(hooks.clear for hooks in steps.values()))
    contract = sys.modules, patches.CONTRACT, sys.modules.get(patches.CONTRACT, patches.ABSENT)
    return Layer(replacements, (addresses, changes), begin, (contract,))


_CPU = torch.device("cpu")
"""What a build without an accelerator says that its accelerator is (``at::getAccelerator``)."""


def asked_for_cuda(line: str) -> str:
    return f"{line}: the program asks for cuda, and the trace is on cpu: {NAME_DEVICE}"


def _no_cuda_functions(trace: TraceContext) -> Layer[None]:
    def lazy_init() -> None:
        raise NoCudaError(asked_for_cuda(trace.user_line()))

    replaced = [
        patches.lazy_init.unless(trace.off, lazy_init),
        patches.cuda_is_compiled.unless(trace.off, lambda: False),
        patches.accelerator.unless(trace.off, lambda *_: _CPU),
        patches.accelerator_or_none.unless(trace.off, lambda: None),
    ]
    return Layer(replaced, None)


class HollowTensors:
    """Makes tensors without memory, booked on a device with the names that they go by."""

    def __init__(self, conversion: Conversion, device: torch.device, root: object) -> None:
        self._conversion = conversion
        self._on = device
        self._root = type(root).__name__
        self._whole = device.type == "cpu"
        """Whether a tensor takes its whole storage along; what is moved has its own elements."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Those in the place of real ones, by the addresses of these."""

    def __call__(self, tensor: Tensor, given: in_place.Given) -> Tensor | None:
        """Return a tensor's hollow storage, None for one that is met in the step."""
        if not (given.moves or self._whole):
            return None
        if is_lazy(tensor):
            kind: Any = type(tensor)
            return kind(False, device=self._on, dtype=tensor.dtype)  # type: ignore[no-any-return]
        if tensor.layout in COMPRESSED:
            plain = tensor.detach()
            parts = (*compressed_indices(plain), plain.values())
            return compressed_like(tensor, *(self._hollow(part, given) for part in parts))
        if tensor.layout is not torch.strided or tensor.is_quantized or has_dispatch(tensor):
            return None
        try:
            return self._hollow(tensor.detach(), given)
        except (RuntimeError, NotImplementedError):
            if tensor.is_nested:
                return None
            raise

    def _hollow(self, tensor: Tensor, given: in_place.Given) -> Tensor:
        """Return a hollow tensor; those that share a storage share one."""
        address, whole = storage_address(tensor), self._whole or is_on_real_gpu(tensor)
        shared = self._storages.get(address) if whole else None
        if shared is not None:
            return plan.Output.of(tensor).on(shared)
        owner = ""
        if given.path is not None:
            owner = f"{self._root}.{given.path}" if given.path else self._root
        made = self._conversion.enter_tensor(tensor, self._on, given.kind, given.name, owner, whole)
        self._storages[address] = made.untyped_storage()
        return made


_STANDING: WeakSet[StandingGpu] = WeakSet()
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
        self_test.check_torch()
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
            target, self._ledger, attribution.Attribution(), alone, mode, real_host=True
        )
        self._interceptor.parts.conversion.lender = partial(lent_by_standing_gpus, but=self)
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
            self._interceptor.parts.values.end()
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
        return patches.having(self, _present=tuple(records))

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
        known = contents.known(record)
        return Lent(record.ledger.device, entry, known, record.assumption, _OF_FIXTURE)


def lent_by_standing_gpus(address: int, but: StandingGpu | None = None) -> Lent | None:
    """Return the hollow storage at an address that a GPU has which stands now."""
    found = (gpu.lend(address) for gpu in tuple(_STANDING) if gpu is not but)
    return next(filter(None, found), None)


def present_on_standing_gpus() -> Iterator[tuple[Lent, torch.UntypedStorage]]:
    """Yield what a trace that begins now is to count from its beginning."""
    for gpu in tuple(_STANDING):
        yield from gpu.present()
