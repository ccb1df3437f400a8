"""One measurement: the step on a real device, its allocations counted."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.errors import UsageError, refuse_misspelt
from pytest_torchmem.journal.journal import generators_kept, program_kept
from pytest_torchmem.measurement.copies import on_copies
from pytest_torchmem.measurement.events import MODULE, STEP, recording
from pytest_torchmem.measurement.timeline import build_timeline, labels_after, labels_before
from pytest_torchmem.profile.profile import MemoryProfile, figures_of
from pytest_torchmem.step.step import Step
from pytest_torchmem.targets.target import DeviceName, HostName
from pytest_torchmem.torch_private.devices import mark


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
    if device == "cuda":
        from pytest_torchmem.measurement.cuda import measure_cuda

        with _as_in_a_trace():
            return measure_cuda(target, args, kwargs, step)
    there = on_copies(torch.device("cpu"), target, args, kwargs, step)
    with _as_in_a_trace(), recording() as recorded, there as run:
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


@contextmanager
def _as_in_a_trace() -> Iterator[None]:
    """Run a step under what a trace, too, keeps apart from it."""
    gc.collect()
    with generators_kept(), program_kept():
        yield


def _begins() -> None:
    """Mark that another step begins, as the call of a module does."""
    with mark(MODULE):
        pass
