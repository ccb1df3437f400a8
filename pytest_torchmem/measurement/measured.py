"""One measurement: the step on a real device and on copies of its tensors' data, its allocations
counted.

The caching allocator of a GPU counts when it is called, on the host, so its figures do not depend
on how far the GPU has got; the device is waited for at every change of phase all the same, since a
block that another stream used is given back late (c10/cuda/CUDACachingAllocator.cpp,
``process_events``).
"""

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.errors import DeviceMemoryError, UsageError, refuse_misspelt
from pytest_torchmem.journal.contents import WHOLE, ProgramState, Reached
from pytest_torchmem.journal.in_place import Given, InPlace
from pytest_torchmem.journal.journal import generators_kept, program_kept, undisturbed
from pytest_torchmem.measurement import device as devices
from pytest_torchmem.measurement.device import Device
from pytest_torchmem.measurement.timeline import (
    MODULE,
    STEP,
    Label,
    build_timeline,
    labels_after,
    labels_before,
    recording,
    timeline_of,
)
from pytest_torchmem.operators.layouts import COMPRESSED, compressed_indices
from pytest_torchmem.profile.profile import PEAK_FIELDS, MemoryProfile, figures_of
from pytest_torchmem.profile.timeline import Phase, Timeline
from pytest_torchmem.step.step import (
    Step,
    StepPhases,
    engine_runs,
    optimizer_steps,
    outermost_module_calls,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.target import DeviceName, HostName
from pytest_torchmem.torch_private.devices import mark
from pytest_torchmem.torch_private.tensors import has_dispatch
from pytest_torchmem.units import format_size

REQUESTED, ALLOCATED, RESERVED = "requested_bytes", "allocated_bytes", "reserved_bytes"
_COUNTERS = (REQUESTED, ALLOCATED, RESERVED)
_REQUESTS, _RELEASES = "allocation.all.allocated", "allocation.all.freed"


@dataclass(frozen=True, slots=True)
class Span:
    """A time in one phase; bytes are those above what was there before the measurement."""

    phase: Phase
    events: int
    """Requests and releases before it, since the measurement began."""
    peaks: Mapping[str, int]
    ends: Mapping[str, int]


class PhaseMeter:
    """Reads and resets the allocator's peaks wherever the phase changes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronise()
        device.reset_peaks()
        found = self._statistics()
        self.base = {name: found[f"{name}.all.current"] for name in _COUNTERS}
        self.phase = Phase.BASELINE
        self.spans: list[Span] = []
        self._first = found[_REQUESTS] + found[_RELEASES]
        self._counted = 0

    def change(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.finish()
            self.phase = phase

    def finish(self) -> None:
        self._device.synchronise()
        found = self._statistics()
        peaks, ends = (
            {name: found[f"{name}.all.{what}"] - self.base[name] for name in _COUNTERS}
            for what in ("peak", "current")
        )
        self.spans.append(Span(self.phase, self._counted, peaks, ends))
        self._counted = found[_REQUESTS] + found[_RELEASES] - self._first
        self._device.reset_peaks()

    def _statistics(self) -> Counter[str]:
        """Return the allocator's; a process that allocated nothing yet has none at all."""
        return Counter(self._device.statistics())

    def peaks(self, counter: str) -> dict[Phase, int]:
        """Return the peak of every phase that ran, as a trace's timeline has it."""
        peaks: dict[Phase, int] = {}
        for span in self.spans:
            peaks[span.phase] = max(peaks.get(span.phase, 0), span.peaks[counter])
        return peaks

    def ends(self, phase: Phase) -> list[int]:
        return [span.ends[REQUESTED] for span in self.spans if span.phase is phase]


@contextmanager
def following_phases(meter: PhaseMeter) -> Iterator[Callable[[], None]]:
    """Have ``meter`` follow the phases of what this thread runs; what is yielded begins a step."""
    phases = StepPhases()

    def note(change: Callable[..., None], *given: Phase) -> None:
        change(*given)
        meter.change(phases.phase)

    @contextmanager
    def backward() -> Iterator[None]:
        note(phases.begin, Phase.BACKWARD)
        try:
            yield
        finally:
            note(phases.end)

    @contextmanager
    def module_call() -> Iterator[None]:
        note(phases.module_called)
        yield

    with (
        engine_runs(backward),
        outermost_module_calls(module_call),
        optimizer_steps(lambda _: note(phases.begin, Phase.OPTIMIZER), lambda _: note(phases.end)),
    ):
        yield partial(note, phases.module_called)


T = TypeVar("T")
Run = Callable[..., object]
"""Runs the step, and returns what outlives it."""


@dataclass(frozen=True, slots=True)
class MeasuredProfile(MemoryProfile):
    """What a real GPU's allocator counted.

    The figures are the bytes that were requested, as a trace gives them; ``allocated`` and
    ``reserved`` are the peaks by phase (``"forward_peak"``, …, ``"peak"``) of the allocator's
    blocks and of its segments: ``torch.cuda.max_memory_allocated`` and ``max_memory_reserved``.
    """

    allocated: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    reserved: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


def measure(
    target: Any,
    *args: Any,
    device: DeviceName = "cpu",
    gpu: str | None = None,
    host: HostName = "here",
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
    **kwargs: Any,
) -> MemoryProfile:
    """Run the step of ``trace`` for real, and return the bytes that it requested.

    The step runs on copies of the model's tensors and of the arguments. What a callable finds
    elsewhere, such as in a closure, counts only as far as the step allocates it, whereas a trace
    counts it from the beginning: to compare the two, pass the model as an argument
    (``measure(step, model, x)``). Random states are restored. The garbage collector is off during
    the step, so memory that only a reference cycle keeps alive is not freed. What ``torch.compile``
    takes on the host while it compiles is left out. ``gpu`` and ``host`` have no effect.

    On ``"cuda"``, the current CUDA device, the profile is a ``MeasuredProfile``, which also has the
    peaks of the bytes that the caching allocator allocated and reserved. Memory that was in use
    before is subtracted. The step of a module runs once before, on another copy, to warm up.

    Raises ``UsageError`` if there is no such device, and ``DeviceMemoryError`` if the step needs
    more memory than the GPU has.
    """
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device={device!r}: expected 'cpu' or 'cuda'")
    step = Step(loss_fn, backward, optimizer, steps)
    step.check(target)
    refuse_misspelt(measure, target, kwargs)
    gc.collect()
    if device == "cuda":
        with generators_kept(), program_kept():
            return _on_cuda(target, args, kwargs, step)
    there = on_copies(torch.device("cpu"), target, args, kwargs, step)
    with generators_kept(), program_kept(), recording() as recorded, there as run:
        before = labels_before(target, args, kwargs)
        with mark(STEP):
            outliving = run(_begins)
        after = labels_after(target, outliving)
    timeline = build_timeline(recorded, before, after)
    # what never reaches the recorded thread's c10 allocator
    spots = ["not measured: what other threads take and release between two events of this one"]
    if torch.backends.mkl.is_available():
        spots.append("not measured: MKL's own buffers, which it takes outside torch's allocator")
    return MemoryProfile(
        device="cpu",
        gpu=None,
        host="here",
        torch_version=torch.__version__,
        warnings=tuple(spots),
        timeline=timeline,
        **figures_of(timeline),
    )


def _begins() -> None:
    """Mark that another step begins, as the call of a module does."""
    with mark(MODULE):
        pass


def _on_cuda(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], step: Step
) -> MeasuredProfile:
    """Run a step on the GPU of this machine, and free everything, also where that fails."""
    device = devices.cuda_device()
    reason = device.why_not()
    if reason:
        raise UsageError(f"device='cuda': {reason}, so nothing can be measured; trace() needs none")
    gpu = device.gpu()
    there = partial(on_copies, device.torch_device, target, args, kwargs, step, moved=True)

    def run_there() -> MeasuredProfile:
        device.empty_cache()
        device.synchronise()
        with ExitStack() as stack:
            device.start_history()
            try:
                meter = PhaseMeter(device)
                run = stack.enter_context(there())
                before = labels_before(target, args, kwargs)
                meter.change(Phase.FORWARD)
                with following_phases(meter) as begins:
                    outliving = run(begins)
                meter.finish()
                after = labels_after(target, outliving)
            finally:
                history = device.stop_history()
            del outliving
        return _profile(gpu, meter, history, before, after)

    return run_warm(device, gpu, target, there, run_there)


def run_warm(
    device: Device,
    gpu: Gpu,
    target: Any,
    there: Callable[[], AbstractContextManager[Run]],
    run: Callable[[], T],
) -> T:
    """Return what ``run`` returns, after a step of a module ``there``, on copies of its own.

    Libraries have chosen their kernels by then, and taken the buffers that stay. A callable has no
    such step, which would change what it works on. The device is the current one meanwhile, and
    afterwards nothing is left there. Raises ``DeviceMemoryError``.
    """
    with device.current():
        state = device.generator_state()
        try:
            if isinstance(target, nn.Module):
                with there() as first:
                    first()
                gc.collect()
            return run()
        except device.out_of_memory as error:
            failure = _out_of_memory(device, gpu, error)
            traceback.clear_frames(error.__traceback__)
        finally:
            gc.collect()
            device.empty_cache()
            device.set_generator_state(state)
    raise DeviceMemoryError(failure)


def _profile(
    gpu: Gpu,
    meter: PhaseMeter,
    history: Sequence[Mapping[str, Any]],
    before: Mapping[int, Label],
    after: Mapping[int, Label],
) -> MeasuredProfile:
    requested = meter.peaks(REQUESTED)
    timeline, warnings = Timeline(), []
    if history:
        starts = [(span.events, span.phase) for span in meter.spans]
        timeline = timeline_of(history, starts, before, after)
        recorded = {phase: peak for phase, (peak, _) in timeline.peaks().items()}
        if {phase: recorded.get(phase, 0) for phase in requested} != requested:
            warnings.append(
                "the recorded requests do not add up to the allocator's statistics: the figures "
                "are the allocator's, and the timeline may be incomplete"
            )
    if meter.base[REQUESTED]:
        warnings.append(
            f"{format_size(meter.base[REQUESTED])} were in use on the GPU before and are not "
            "counted; segments that the step shares with them are missing from reserved_peak"
        )
    return MeasuredProfile(
        device="cuda",
        gpu=gpu.name,
        host="here",
        baseline=max(meter.ends(Phase.BASELINE), default=0),
        forward_peak=requested.get(Phase.FORWARD),
        backward_peak=requested.get(Phase.BACKWARD),
        optimizer_peak=requested.get(Phase.OPTIMIZER),
        peak=max(requested.values()),
        retained=max(meter.ends(Phase.FORWARD), default=None),
        end=meter.spans[-1].ends[REQUESTED],
        allocated_peak=max(meter.peaks(ALLOCATED).values()),
        reserved_peak=max(meter.peaks(RESERVED).values()),
        torch_version=torch.__version__,
        warnings=tuple(warnings),
        timeline=timeline,
        allocated=_by_name(meter, ALLOCATED),
        reserved=_by_name(meter, RESERVED),
    )


def _by_name(meter: PhaseMeter, counter: str) -> Mapping[str, int]:
    peaks = meter.peaks(counter)
    found = {name: peaks[phase] for name, phase in PEAK_FIELDS.items() if phase in peaks}
    return MappingProxyType({**found, "peak": max(peaks.values())})


def _out_of_memory(device: Device, gpu: Gpu, error: BaseException) -> str:
    statistics = device.statistics()
    free, total = device.memory()
    held = statistics.get(f"{RESERVED}.all.current", 0)
    others = max(total - free - held, 0)
    reason = str(error).partition(". ")[0].strip() or type(error).__name__
    return (
        f"the step needs more memory than {gpu.product} has ({format_size(total)}, of which "
        f"{format_size(others)} are other processes'): {reason}"
    )


@contextmanager
def on_copies(
    device: torch.device | None,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    step: Step,
    *,
    moved: bool = False,
) -> Iterator[Run]:
    """Let the tensors of a module and of the arguments lie on ``device``, each on its own if that
    is None; and give the module, the arguments and what is in them back as they were.

    Tensors keep their geometry and gradients. Those that share a storage share its copy, where they
    stay on their device; what is ``moved`` to another has its own elements there and no more, as
    ``Tensor.to`` makes it. What was on ``meta`` is filled with small random numbers, on ``device``
    itself.
    """
    module = target if isinstance(target, nn.Module) else None
    reached = Reached(module, args, kwargs, step.loss_fn if module is not None else None)
    in_place = InPlace(reached, module, args, kwargs, step.loss_fn)
    state = ProgramState(reached, in_place.references(), keeps=True)

    try:
        with undisturbed():
            in_place.lay(_Copies(device, moved, stay=module is not None))
            if moved and module is not None:
                _flatten(module)
        yield partial(step.run, target, args, kwargs)
    finally:
        with undisturbed():
            in_place.restore()
            state.give_back(whole=WHOLE)


def _flatten(module: nn.Module) -> None:
    """Let each recurrent layer's weights lie in one buffer, as ``Module.to`` does.
    torch/nn/modules/rnn.py, ``RNNBase._apply``. The stand-in has none of cuDNN's recurrent layers.
    """
    if devices.cuda_device().is_stand_in:
        return
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()


class _Copies:
    """Copies of tensors with their data; without a device what is on ``meta`` stays without."""

    def __init__(self, device: torch.device | None, moved: bool, stay: bool) -> None:
        self._device = device
        self._moved = moved
        self._stay = stay and device is not None and device.type != "cpu"
        """Whether tensors stay where they are that ``Module.to`` does not move."""
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, tensor: Tensor, given: Given) -> Tensor | None:
        """Return the copy of a tensor, without a gradient."""
        if (self._stay and not given.moves) or has_dispatch(tensor):
            return None
        device = self._device or tensor.device
        if is_lazy(tensor):
            kind: Any = type(tensor)
            return kind(False, device=device, dtype=tensor.dtype)  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._copy(tensor.detach())

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.layout in COMPRESSED:
            compressed, plain = map(self._copy, compressed_indices(tensor))
            values, shape = self._copy(tensor.values()), list(tensor.shape)
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, layout=tensor.layout
            )
        dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
        if not dense or tensor.is_neg():
            return tensor.to(self._device or tensor.device, copy=True)
        moves = self._moved and not tensor.is_cuda
        copy = self._moved_copy(tensor) if moves else self._whole_copy(tensor)
        return copy.conj() if tensor.is_conj() else copy

    def _moved_copy(self, tensor: Tensor) -> Tensor:
        """Return what ``Tensor.to`` makes: its own elements, in their order where it is dense."""
        plain = tensor.conj() if tensor.is_conj() else tensor
        copy = torch.empty_like(plain, device=self._device)
        if tensor.is_meta:
            _fill(copy)
        else:
            copy.copy_(plain)
        return copy

    def _whole_copy(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_new = storage._cdata not in self._storages
        if is_new:
            made = torch.UntypedStorage(storage.nbytes(), device=self._device or storage.device)
            if storage.device.type != "meta" and storage.nbytes():
                made.copy_(storage)
            # The original is held as well: its address is the key, and must not be used again.
            self._storages[storage._cdata] = (storage, made)
        _, made = self._storages[storage._cdata]
        copy = torch.empty(0, dtype=tensor.dtype, device=self._device or tensor.device)
        copy.set_(made, tensor.storage_offset(), tensor.shape, tensor.stride())
        if is_new and tensor.is_meta and self._device is not None:
            _fill(copy)
        return copy


def _fill(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.normal_(0.0, 0.02)
    else:
        tensor.zero_()
