"""A check on cuda, run on the real GPU of this machine too: is the trace right, and did it grow?

Nothing here asks CUDA anything before a check has decided to measure: ``--torchmem-measure=never``
does not even import what would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_torchmem.checks.request import Target
from pytest_torchmem.errors import DeviceMemoryError, UsageError
from pytest_torchmem.figures import MEASURED, PEAKS
from pytest_torchmem.snapshots.alive import contents_of
from pytest_torchmem.snapshots.compare import Comparison, compare
from pytest_torchmem.snapshots.format import Entry, Measured
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.measurement.device import Device
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.profile.timeline import Allocation
    from pytest_torchmem.snapshots.tolerance import Level, Tolerance
    from pytest_torchmem.targets.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step run on the real GPU of this machine, beside a trace for that GPU."""

    gpu: str
    """The GPU's name in the catalogue, or of its own where the catalogue does not have it."""
    torch: str = ""
    figures: dict[str, int] = field(default_factory=dict)
    """What was measured."""
    estimate: dict[str, int] = field(default_factory=dict)
    """What a trace for that GPU gives."""
    not_measured: str = ""
    """Why the step was not run there, such as that it does not fit."""
    comparison: Comparison | None = None
    """How the figures stand to the snapshot; ``None`` where that GPU is not in it."""

    @property
    def apart(self) -> list[str]:
        """The peaks that both sides have, with the largest difference between them first."""
        both = [name for name in PEAKS if name in self.figures and name in self.estimate]
        return sorted(both, key=lambda name: -abs(self.estimate[name] - self.figures[name]))

    def off(self, most: Tolerance) -> list[str]:
        """Return the peaks of which trace and measurement differ by more than ``most``."""
        return [
            name
            for name in self.apart
            if abs(self.estimate[name] - self.figures[name]) > most.allowance(self.figures[name])
        ]

    def compared(
        self, now: Entry, before: Entry | None, levels: Sequence[Level]
    ) -> Comparison | None:
        """Return how the figures stand to what a snapshot's entry ``before`` has of that GPU."""
        then = before.measured.get(self.gpu) if before is not None else None
        if before is None or then is None or not self.figures:
            return None
        return compare(
            Entry(now.key, then.torch, before.workload, then.figures),
            Entry(now.key, self.torch, now.workload, measured_figures(self.figures)),
            levels,
        )


@dataclass(frozen=True, slots=True)
class RealRun:
    """What came of running a check on the real GPU."""

    measurement: Measurement
    only_measured: tuple[tuple[int, int], ...] = ()
    """Sizes in bytes, and how many of each are alive at the GPU's peak and not at the trace's."""
    only_traced: tuple[Allocation, ...] = ()
    """What is alive at the trace's peak and has no counterpart of its size at the GPU's."""
    unknown_workspaces: tuple[str, ...] = ()
    """Operators whose workspace the estimate leaves out."""

    @property
    def entry(self) -> dict[str, Measured]:
        """What a snapshot's entry holds of it: nothing where nothing was measured."""
        found = self.measurement
        if not found.figures:
            return {}
        return {found.gpu: Measured(found.torch, measured_figures(found.figures))}


def measured_figures(figures: dict[str, int]) -> dict[str, int]:
    """Return those of ``figures`` that a snapshot holds of a real GPU."""
    return {name: figures[name] for name in MEASURED if name in figures}


def run_for_real(
    target: Target, required: bool, traced: MemoryProfile, traced_for: str
) -> RealRun | None:
    """Measure ``target`` on this machine's GPU and trace it for the same; ``None`` without one.

    ``traced`` is the trace that there is, for the GPU ``traced_for``: it will do where the real
    GPU is the same. Raises ``UsageError`` where there is no GPU although one is ``required``.
    """
    __tracebackhide__ = True
    from pytest_torchmem.measurement import device as devices

    device = devices.cuda_device()
    reason = device.why_not()
    if reason:
        if required:
            raise UsageError(
                f"not measured: {reason}, and --torchmem-measure=require needs a GPU. Run this "
                "on a machine with a GPU, or without the option"
            )
        return None
    gpu = device.gpu()
    estimate = fitting_trace(target, device, gpu, traced if gpu.name == traced_for else None)
    if isinstance(estimate, str):
        return _not_measured(gpu, estimate)
    return _measured(target, gpu, estimate, required)


def fitting_trace(
    target: Target, device: Device, gpu: Gpu, traced: MemoryProfile | None = None
) -> MemoryProfile | str:
    """Return a trace for the real GPU, which is ``traced`` if there is one, or why it must not run.

    It must fit on the GPU at all, and into what is free there just now.
    """
    __tracebackhide__ = True
    estimate = traced or _traced_on(target, gpu)
    return estimate if isinstance(estimate, str) else _no_room(device, gpu, estimate) or estimate


def _traced_on(target: Target, gpu: Gpu) -> MemoryProfile | str:
    __tracebackhide__ = True
    from pytest_torchmem.fake_cuda.out_of_memory import OutOfMemoryError
    from pytest_torchmem.targets.gpus import gpu_names, registered_gpus

    with nullcontext() if gpu.name in gpu_names() else registered_gpus(gpu):
        try:
            return target.trace("cuda", gpu.name, None)
        except OutOfMemoryError as error:
            return (
                f"does not fit on {gpu.product} ({format_size(gpu.memory)}): "
                f"{error.origin.operator or 'an allocation'} needs {format_size(error.nbytes)} more"
            )


def _no_room(device: Device, gpu: Gpu, estimate: MemoryProfile) -> str:
    """Return why there is no room for the step on the GPU just now, "" where there is."""
    needed = estimate.reserved_peak or estimate.peak
    free, total = device.memory()
    statistics = device.statistics()
    # What this process has reserved and not in use is there for it too.
    reserved = statistics.get("reserved_bytes.all.current", 0)
    own = reserved - statistics.get("allocated_bytes.all.current", 0)
    if needed <= free + own:
        return ""
    others = max(total - free - reserved, 0)
    return (
        f"needs {format_size(needed)} of {gpu.product}, where {format_size(free + own)} of "
        f"{format_size(total)} are free (other processes use {format_size(others)})"
    )


def _measured(target: Target, gpu: Gpu, estimate: MemoryProfile, required: bool) -> RealRun:
    __tracebackhide__ = True
    try:
        profile = target.measure()
    except (DeviceMemoryError, UsageError) as error:
        if required and isinstance(error, UsageError):
            raise
        return _not_measured(gpu, str(error))
    torch = profile.torch_version.partition("+")[0]
    measurement = Measurement(gpu.name, torch, dict(profile.figures()), dict(estimate.figures()))
    return RealRun(measurement, *_apart(profile, estimate), estimate.unknown_workspaces)


def _not_measured(gpu: Gpu, reason: str) -> RealRun:
    return RealRun(Measurement(gpu.name, not_measured=reason))


def _apart(
    profile: MemoryProfile, estimate: MemoryProfile
) -> tuple[tuple[tuple[int, int], ...], tuple[Allocation, ...]]:
    """Return what is alive at the highest peak on one side only, by its size, largest first."""
    measured, traced = contents_of(profile), contents_of(estimate)
    figures = profile.figures()
    both = [name for name in PEAKS if name in measured and name in traced]
    highest = max(both, key=lambda name: figures.get(name, 0), default=None)
    if highest is None:
        return (), ()
    more = _without(measured[highest], traced[highest])
    counts = Counter(allocation.nbytes for allocation in more)
    by_bytes = sorted(counts.items(), key=lambda item: -item[0] * item[1])
    return tuple(by_bytes), _without(traced[highest], measured[highest])


def _without(
    allocations: Iterable[Allocation], others: Iterable[Allocation]
) -> tuple[Allocation, ...]:
    """Return the allocations for which ``others`` have none of the same size."""
    left = Counter(other.nbytes for other in others)
    found = []
    for allocation in allocations:
        if left[allocation.nbytes]:
            left[allocation.nbytes] -= 1
        else:
            found.append(allocation)
    return tuple(sorted(found, key=lambda allocation: -allocation.nbytes))
