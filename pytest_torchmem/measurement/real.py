"""One measurement: the step on the real CPU, its allocations recorded."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.measurement.copies import Copies, Label, copy_to_cpu
from pytest_torchmem.measurement.events import Recorder
from pytest_torchmem.measurement.timeline import build_timeline
from pytest_torchmem.profiler.profile import Kind, MemoryProfile, summarise
from pytest_torchmem.profiler.step import check_step, run_target, tensors_in


def measure(
    target: Any,
    *args: Any,
    device: str = "cpu",
    gpu: str | None = None,
    host: str = "here",
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
    **kwargs: Any,
) -> MemoryProfile:
    """Run the step that ``trace`` describes for real and return the bytes its allocator was asked.

    Models and tensors are copied to the device first, so the caller's own stay as they are; what a
    callable reaches in other ways, such as a closure, is used as it is. Random states are put back.
    The garbage collector rests during the step: what only a reference cycle keeps alive counts
    until the end. ``gpu`` and ``host`` are those of this machine whatever is given.
    """
    if device != "cpu":
        raise UsageError(_why_not(device))
    check_step(target, loss_fn, backward, optimizer, steps)
    with ExitStack() as stack:
        stack.enter_context(_random_states_kept())
        stack.enter_context(_no_garbage_collection())
        recorder = stack.enter_context(Recorder())
        copies = copy_to_cpu(target, args, kwargs)
        with recorder.step():
            outliving = run_target(
                copies.target, copies.args, copies.kwargs, loss_fn, backward, optimizer, steps
            )
        after = _labels_after(copies, outliving)
    timeline = build_timeline(recorder.recording, copies.labels, after)
    return summarise(
        timeline,
        device="cpu",
        gpu=None,
        host="here",
        torch_version=torch.__version__,
        warnings=_blind_spots(),
    )


def _why_not(device: str) -> str:
    if device != "cuda":
        return f"device={device!r}: expected 'cpu' or 'cuda'"
    if not torch.cuda.is_available():
        return "device='cuda': there is no CUDA device here to measure on; trace() needs none"
    return "device='cuda': only the CPU's allocator can be measured so far; trace() knows cuda"


@contextmanager
def _random_states_kept() -> Iterator[None]:
    state, python_state = torch.get_rng_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(python_state)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _labels_after(copies: Copies, outliving: object) -> dict[int, Label]:
    """Name what the step made and left behind: gradients and the optimizer's state."""
    labels: dict[int, Label] = {}
    if not isinstance(copies.target, torch.nn.Module):
        return labels
    names: dict[int, str] = {}
    for name, parameter in copies.target.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            _label(labels, parameter.grad, Kind.GRADIENT, name)
    if isinstance(outliving, torch.optim.Optimizer):
        for key, state in outliving.state.items():
            for tensor in tensors_in(state):
                _label(labels, tensor, Kind.OPTIMIZER_STATE, names.get(id(key), ""))
    return labels


def _label(labels: dict[int, Label], tensor: torch.Tensor, kind: Kind, name: str) -> None:
    if tensor.layout is torch.strided:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        labels.setdefault(tensor.untyped_storage().data_ptr(), Label(kind, name, shape, dtype))


def _blind_spots() -> tuple[str, ...]:
    """Say what never reaches the recorded thread's c10 allocator."""
    spots = ["not measured: memory that other threads allocate"]
    if torch.backends.mkl.is_available():
        spots.append("not measured: MKL's own buffers, which it takes outside torch's allocator")
    return tuple(spots)
