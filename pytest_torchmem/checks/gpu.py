"""A check on cuda, run on the real GPU of this machine too: is the trace right, and did it grow?

Nothing here asks CUDA anything before a check has decided to measure: ``--torchmem-measure=never``
does not even import what would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_torchmem.checks.result import Measurement, Outcome, RealRun, Record
from pytest_torchmem.errors import UsageError
from pytest_torchmem.reports import measured as messages
from pytest_torchmem.snapshots.compare import Change, Comparison, beyond, compare
from pytest_torchmem.snapshots.explain import peak_contents
from pytest_torchmem.snapshots.format import MEASURED, PEAKS, Entry
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.measurement.cuda import MeasuredProfile
    from pytest_torchmem.measurement.device import Device
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.profile.timeline import Allocation
    from pytest_torchmem.snapshots.tolerance import Level, Tolerance
    from pytest_torchmem.targets.calibration import Figure, Question
    from pytest_torchmem.targets.gpus import Gpu


@dataclass(frozen=True, slots=True)
class Target:
    """What is checked: how it is traced, and how it is run for real."""

    trace: Callable[[str, str | None], MemoryProfile]
    """Takes a device and the GPU that it has to fit on, if any."""
    measure: Callable[[], MeasuredProfile]
    """Runs on the real GPU of this machine."""
    record: Callable[[Device, Gpu, Collection[Question]], dict[Question, Figure]] | None = None
    """Runs there for what kernels take; ``None`` where the test has a calibration of its own."""


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
                f"not measured: {reason}, and --torchmem-measure=require asks for one. Run this on "
                "a machine with a GPU, or without the option"
            )
        return None
    gpu = device.gpu()
    estimate = traced
    if gpu.name != traced_for:
        found = traced_on(target, gpu)
        if isinstance(found, str):
            return _not_measured(gpu, found)
        estimate = found
    reason = does_not_fit(device, gpu, estimate)
    if reason:
        return _not_measured(gpu, reason)
    return _measured(target, gpu, estimate, required)


def judged(
    record: Record, run: RealRun, before: Entry | None, levels: Sequence[Level], most: Tolerance
) -> Record:
    """Return ``record`` with what was measured: held against the estimate and the snapshot.

    ``before`` is the snapshot's entry, ``levels`` are the tolerances of growth, closest first, and
    ``most`` is by how much an estimate may be off.
    """
    measurement = run.measurement
    if not measurement.figures:
        return replace(record, measurement=measurement)
    comparison = _compared(record, measurement, before, levels)
    changes = comparison.changes if comparison is not None else ()
    record = replace(record, measurement=replace(measurement, changes=changes))
    wrong = off(measurement, most)
    if wrong:
        text = messages.estimate_off(record, run, wrong, str(most))
        record = _failed(record, Outcome.ESTIMATE_OFF, text)
        record = replace(record, accepted=False)
    if comparison is not None and comparison.grew and not record.accepted:
        record = _failed(record, Outcome.MEASURED_GREW, messages.grew(record, comparison))
    return record


def off(measurement: Measurement, most: Tolerance) -> list[str]:
    """Return the peaks whose estimate differs from what was measured by more than ``most``."""
    return [
        name
        for name in PEAKS
        if name in measurement.figures
        and name in measurement.estimate
        and abs(measurement.estimate[name] - measurement.figures[name])
        > most.allowance(measurement.figures[name])
    ]


def above_cap(record: Record, before: Entry, run: RealRun, most: Tolerance) -> tuple[Change, ...]:
    """Return the measured peaks that grew by more than an update may accept."""
    comparison = _compared(record, run.measurement, before, ())
    return beyond(comparison, most) if comparison is not None else ()


def _failed(record: Record, outcome: Outcome, text: str) -> Record:
    """Add a failure; one that the record has already says what it came to."""
    message = "\n\n".join(part for part in (record.message, text) if part)
    outcome = record.outcome if record.failed else outcome
    return replace(record, outcome=outcome, failed=True, message=message)


def _compared(
    record: Record, now: Measurement, before: Entry | None, levels: Sequence[Level]
) -> Comparison | None:
    """Return how what was measured stands to what the snapshot has of that GPU, if anything."""
    then = before.measured.get(now.gpu) if before is not None else None
    if before is None or then is None or not now.figures:
        return None
    key = replace(record.key, gpu=now.gpu)
    figures = {name: now.figures[name] for name in MEASURED if name in now.figures}
    return compare(
        Entry(key, then.torch, before.workload, then.figures),
        Entry(key, now.torch, record.entry.workload if record.entry else "", figures),
        levels,
    )


def traced_on(target: Target, gpu: Gpu) -> MemoryProfile | str:
    """Return a trace for the real GPU, or why it cannot run there."""
    __tracebackhide__ = True
    from pytest_torchmem.fake_cuda.out_of_memory import OutOfMemoryError
    from pytest_torchmem.targets.gpus import gpu_names, registered_gpus

    with nullcontext() if gpu.name in gpu_names() else registered_gpus(gpu):
        try:
            return target.trace("cuda", gpu.name)
        except OutOfMemoryError as error:
            return (
                f"does not fit on {gpu.product}, which has {format_size(gpu.memory)}: "
                f"{error.origin.operator or 'something'} would get no {format_size(error.nbytes)}"
            )


def does_not_fit(device: Device, gpu: Gpu, estimate: MemoryProfile) -> str:
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
        f"{format_size(total)} are free (other processes have {format_size(others)})"
    )


def _measured(target: Target, gpu: Gpu, estimate: MemoryProfile, required: bool) -> RealRun:
    __tracebackhide__ = True
    from pytest_torchmem.errors import DeviceMemoryError

    try:
        profile = target.measure()
    except DeviceMemoryError as error:
        return _not_measured(gpu, str(error))
    except UsageError as error:
        if required:
            raise
        return _not_measured(gpu, str(error))
    only_measured, only_traced = _apart(profile, estimate)
    return RealRun(
        Measurement(
            gpu.name,
            profile.torch_version.partition("+")[0],
            dict(profile.figures()),
            dict(estimate.figures()),
        ),
        only_measured,
        only_traced,
        estimate.unknown_workspaces,
    )


def _not_measured(gpu: Gpu, reason: str) -> RealRun:
    return RealRun(Measurement(gpu.name, not_measured=reason))


def _apart(
    profile: MemoryProfile, estimate: MemoryProfile
) -> tuple[tuple[tuple[int, int], ...], tuple[Allocation, ...]]:
    """Return what is alive at the highest peak on one side only, by its size, largest first."""
    contents = peak_contents(profile), peak_contents(estimate)
    figures = profile.figures()
    both = [name for name in PEAKS if all(name in found for found in contents)]
    highest = max(both, key=lambda name: figures.get(name, 0), default=None)
    if highest is None:
        return (), ()
    real, traced = contents[0][highest], contents[1][highest]
    more = _without(real, traced)
    counts: dict[int, int] = {}
    for allocation in more:
        counts[allocation.nbytes] = counts.get(allocation.nbytes, 0) + 1
    return tuple(sorted(counts.items(), key=lambda item: -item[0] * item[1])), _without(
        traced, real
    )


def _without(
    allocations: Iterable[Allocation], others: Iterable[Allocation]
) -> tuple[Allocation, ...]:
    """Return the allocations for which ``others`` have none of the same size."""
    left: dict[int, int] = {}
    for other in others:
        left[other.nbytes] = left.get(other.nbytes, 0) + 1
    found = []
    for allocation in allocations:
        if left.get(allocation.nbytes, 0):
            left[allocation.nbytes] -= 1
        else:
            found.append(allocation)
    return tuple(sorted(found, key=lambda allocation: -allocation.nbytes))
