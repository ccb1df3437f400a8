"""A check on cuda, run for real too: is the trace right, and did the GPU's figures grow?

Nothing here asks CUDA anything before a check has decided to measure: ``--torchmem-measure=never``
does not even import what would.

With ``--torchmem-measure=stand-in`` processes in which torch's own CUDA code runs make the same
checks and leave what they measured in files, from which the run that was asked for takes them.

Calibration files are read for traces, filled by a GPU in an update, and written.
"""

from __future__ import annotations

import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pytest_torchmem.checks.request import CheckTarget, Settings
from pytest_torchmem.errors import DeviceMemoryError, UsageError
from pytest_torchmem.figures import MEASURED, PEAKS
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase
from pytest_torchmem.snapshots.alive import contents_of
from pytest_torchmem.snapshots.calibration import (
    CalibrationPlan,
    StoredCalibration,
    merged,
    nested,
    plan_calibration,
    read_calibration_file,
)
from pytest_torchmem.snapshots.compare import Comparison, compare
from pytest_torchmem.snapshots.format import Entry, Key, Measured
from pytest_torchmem.snapshots.location import calibration_path
from pytest_torchmem.snapshots.store import change_file
from pytest_torchmem.targets import gpus
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.measurement.device import Device
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.snapshots.tolerance import Level, Tolerance


class Parting(NamedTuple):
    """The first request or release of memory at which a trace and a measurement differ.

    Bytes are negative for a release, and 0 on the side that has no more of them.
    """

    traced: int
    measured: int
    operator: str
    """What the trace was at; "" where it had come to its end."""
    line: str

    def __str__(self) -> str:
        at = " ".join(word for word in (self.operator, self.line) if word)
        sides = (self.traced, "traced"), (self.measured, "measured")
        return ", ".join(f"{_action(nbytes)} {side}" for nbytes, side in sides) + (at and f": {at}")


def _action(nbytes: int) -> str:
    if not nbytes:
        return "nothing more"
    return f"{'a request' if nbytes > 0 else 'a release'} of {abs(nbytes):,} B"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step run for real, beside a trace for that GPU."""

    gpu: str
    """The GPU's name in the catalogue, or of its own where the catalogue does not have it."""
    torch: str = ""
    figures: dict[str, int] = field(default_factory=dict)
    estimate: dict[str, int] = field(default_factory=dict)
    """What a trace for that GPU gives."""
    not_measured: str = ""
    """Why the step was not run there, such as that it does not fit."""
    on_stand_in: bool = False
    """Torch's own CUDA code counted, without a GPU."""
    parting: Parting | None = None
    """Where the two began to differ, if their figures do."""
    untold: tuple[str, ...] = ()
    """What the stand-in could not tell: "values", and functions by which libraries tell sizes."""
    comparison: Comparison | None = None
    """How the figures stand to the snapshot; ``None`` where that GPU is not in it."""

    @property
    def apart(self) -> list[str]:
        """The peaks that both sides have, with the largest difference between them first."""
        both = [name for name in PEAKS if name in self.figures and name in self.estimate]
        return sorted(both, key=lambda name: -abs(self.estimate[name] - self.figures[name]))

    @property
    def place(self) -> str:
        return f"{self.gpu} (stand-in)" if self.on_stand_in else self.gpu

    @property
    def confirmed(self) -> bool:
        """Whether both agree to the byte, and no library that is absent would take more."""
        both = self.figures.keys() & self.estimate.keys()
        alike = bool(both) and all(self.figures[name] == self.estimate[name] for name in both)
        return alike and not set(self.untold) - {"values"}

    def off(self, most: Tolerance) -> list[str]:
        """Return the peaks of which trace and measurement differ by more than ``most``.

        What the stand-in could not tell may be why, so that nothing can be said there.
        """
        if self.untold:
            return []
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
        if before is None or then is None or not self.figures or self.on_stand_in:
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

    @property
    def entry(self) -> dict[str, Measured]:
        found = self.measurement
        if not found.figures or found.on_stand_in:
            return {}
        return {found.gpu: Measured(found.torch, measured_figures(found.figures))}


def measured_figures(figures: dict[str, int]) -> dict[str, int]:
    return {name: figures[name] for name in MEASURED if name in figures}


def run_for_real(
    target: CheckTarget, required: bool, traced: MemoryProfile, traced_for: str
) -> RealRun | None:
    """Measure ``target`` on this machine's GPU and trace it for the same; ``None`` without one.

    ``traced`` is the trace that there is, for the GPU ``traced_for``: it will do where the real
    GPU is the same. Raises ``UsageError`` where there is no GPU although one is ``required``.
    """
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
    with device.taken():
        gpu = device.gpu()
        estimate = fitting_trace(target, device, gpu, traced if gpu.name == traced_for else None)
        if isinstance(estimate, str):
            return not_measured(gpu.name, estimate)
        device.take_untold()
        try:
            profile = target.measure()
        except (DeviceMemoryError, UsageError) as error:
            if required and isinstance(error, UsageError):
                raise
            return not_measured(gpu.name, str(error))
        except Exception as error:
            if not device.is_stand_in:
                raise
            first = str(error).partition("\n")[0]
            why = f"without a kernel's values, the step ended in {type(error).__name__}: {first}"
            return not_measured(gpu.name, why, on_stand_in=True)
        torch = profile.torch_version.partition("+")[0]
        measurement = Measurement(
            gpu.name,
            torch,
            dict(profile.figures()),
            dict(estimate.figures()),
            on_stand_in=device.is_stand_in,
            untold=device.take_untold(),
        )
        if not measurement.confirmed:
            measurement = replace(measurement, parting=find_parting(estimate, profile))
        return RealRun(measurement, *_apart(profile, estimate), estimate.unknown_workspaces)


def fitting_trace(
    target: CheckTarget, device: Device, gpu: gpus.Gpu, traced: MemoryProfile | None = None
) -> MemoryProfile | str:
    """Return a trace for the real GPU, which is ``traced`` if there is one, or why it must not run.

    It must fit on the GPU at all, and into what is free there just now.
    """
    from pytest_torchmem.fake_cuda.memory import OutOfMemoryError

    try:
        with gpus.known_gpu(gpu):
            estimate = traced or target.trace("cuda", gpu.name, None)
    except OutOfMemoryError as error:
        return (
            f"does not fit on {gpu.product} ({format_size(gpu.memory)}): "
            f"{error.origin.operator or 'an allocation'} needs {format_size(error.nbytes)} more"
        )
    needed = estimate.reserved_peak or estimate.peak
    free, total = device.memory()
    statistics = device.statistics()
    # What this process has reserved and not in use is there for it too.
    reserved = statistics.get("reserved_bytes.all.current", 0)
    own = reserved - statistics.get("allocated_bytes.all.current", 0)
    if needed <= free + own:
        return estimate
    others = max(total - free - reserved, 0)
    return (
        f"needs {format_size(needed)} of {gpu.product}, where {format_size(free + own)} of "
        f"{format_size(total)} are free (other processes use {format_size(others)})"
    )


def not_measured(gpu: str, reason: str, on_stand_in: bool = False) -> RealRun:
    return RealRun(Measurement(gpu, not_measured=reason, on_stand_in=on_stand_in))


def find_parting(traced: MemoryProfile, measured: MemoryProfile) -> Parting | None:
    """Return where requests and releases differ first, from the forward on; ``None`` if nowhere."""
    nothing = 0, Allocation(0, Kind.OTHER, Origin(Phase.BASELINE))
    both = zip_longest(_requests(traced), _requests(measured), fillvalue=nothing)
    for (ours, allocation), (theirs, _) in both:
        if ours != theirs:
            return Parting(ours, theirs, allocation.origin.operator, allocation.origin.line)
    return None


def _requests(profile: MemoryProfile) -> Iterator[tuple[int, Allocation]]:
    """Yield what was requested and, with negative bytes, released, from the forward on.

    Of releases without a request between them the order is nobody's, and they leave the same free
    memory: autocast keeps its casts in a table of addresses (autocast_mode.cpp,
    ``get_cached_casts``).
    """
    timeline = profile.timeline
    start = next((event for event, phase in timeline.phases if phase is Phase.FORWARD), 0)
    both = ((event < 0, timeline.allocations[abs(event) - 1]) for event in timeline.events[start:])
    real = (one for one in both if one[1].nbytes)  # the allocator does not hear of empty tensors
    for released, events in groupby(real, lambda one: one[0]):
        found = [allocation for _, allocation in events]
        if released:
            found.sort(key=lambda allocation: -allocation.nbytes)
        for allocation in found:
            yield -allocation.nbytes if released else allocation.nbytes, allocation


def _apart(
    profile: MemoryProfile, estimate: MemoryProfile
) -> tuple[tuple[tuple[int, int], ...], tuple[Allocation, ...]]:
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


@dataclass(frozen=True, slots=True)
class Confirmations:
    """A directory with what was measured of each check, and with what became of each test."""

    directory: Path
    gpu: str = ""
    """The GPU that this process measures for, "" where it only reads."""

    def of(
        self, test: str, key: Key, traced: MemoryProfile, measure: Callable[[], RealRun | None]
    ) -> RealRun | None:
        """Return what was measured of a check, or measure it; ``test`` is the test's node id."""
        path = self._path("check", test, key.name, key.gpu)
        if self.gpu and self.gpu != key.gpu:
            self._path("gpu", key.gpu).write_text(key.gpu, encoding="utf-8")
            return None
        if self.gpu:
            found = measure()
            _write(path, pickle.dumps(found))
            return found
        if not path.is_file():
            ending = self._path("why", test, key.gpu)
            why = ending.read_text(encoding="utf-8") if ending.is_file() else ""
            why = why or "the test did not come to this check there"
            return not_measured(key.gpu, why, on_stand_in=True)
        run: RealRun | None = pickle.loads(path.read_bytes())
        if run is None or not run.measurement.figures:
            return run
        estimate = dict(traced.figures())
        return replace(run, measurement=replace(run.measurement, estimate=estimate))

    def gpus(self) -> list[str]:
        """Return the GPUs that checks named, and that no process has measured for yet."""
        found = sorted(path.read_text(encoding="utf-8") for path in self.directory.glob("gpu-*"))
        return [gpu for gpu in found if not self._path("done", gpu).exists()]

    def finish(self, gpu: str) -> None:
        self._path("done", gpu).touch()

    def begin(self, test: str) -> None:
        _write(self._path("test", test, self.gpu), test.encode())

    def has_begun(self, test: str) -> bool:
        """Tell whether a test has begun: if its process is gone, the test ended it."""
        return self._path("test", test, self.gpu).exists()

    def ended(self, test: str) -> bool:
        return self._path("why", test, self.gpu).exists()

    def end(self, test: str, why: str) -> None:
        """Take note of how a test ended: "" if it passed."""
        _write(self._path("why", test, self.gpu), why.encode())

    def lost(self, gpu: str, why: str) -> int:
        """Let tests that began and did not end have ended so; return how many have begun."""
        serving = replace(self, gpu=gpu)
        begun = [path.read_text(encoding="utf-8") for path in self.directory.glob("test-*")]
        begun = [test for test in begun if serving.has_begun(test)]
        for test in begun:
            if not serving.ended(test):
                serving.end(test, why)
        return len(begun)

    def last_sign(self, since: float) -> float:
        """Return when a test last began or ended since then; infinite before the first one."""
        signs = (path.stat().st_mtime for path in self.directory.glob("[tw]*-*"))
        return max((sign for sign in signs if sign >= since), default=math.inf)

    def _path(self, kind: str, *parts: str) -> Path:
        return self.directory / f"{kind}-{sha256(repr(parts).encode()).hexdigest()[:24]}"


def _write(path: Path, content: bytes) -> None:
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.write_bytes(content)
    whole.replace(path)


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The workspaces that a check asks for, with this machine's measurements."""

    figures: gpus.Figures = field(default_factory=dict)
    """What an update writes of it: measured, and told by cuDNN."""
    asked: Mapping[str, Sequence[gpus.WorkspaceKey]] = field(default_factory=dict)
    """The workspaces that no formula gives, by the GPU that was traced for."""
    unanswered: tuple[str, ...] = ()
    """Operators that were asked about, and did not run there with the same arguments."""
    not_calibrated: str = ""
    file: str = ""


@dataclass(slots=True)
class _Directory:
    """The calibration of one directory, and what this process measured for its tests."""

    stored: StoredCalibration
    measured: gpus.FigureTable = field(default_factory=dict)
    settles: bool = False
    """There is a GPU that measures what the sides of a merge conflict differ in."""
    calibration: gpus.Calibration | None = None
    """Both together, made when first asked for after a change."""


class Calibrations:
    """What the checks of one process know of the kernels of GPUs, by directory of tests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directories: dict[Path, _Directory] = {}
        self._measured: gpus.FigureTable = {}
        """What this process measured so far, for whatever directory."""

    def of(self, module: Path) -> gpus.Calibration | None:
        """Return what traces of a test module take, ``None`` where nothing was measured."""
        directory = self._directory(module)
        if directory.stored.conflicted and not directory.settles:
            raise UsageError(directory.stored.conflict_message)
        if directory.calibration is None:
            modes, by_series = self._settings.update, self._settings.split_by_torch
            plan = plan_calibration(
                directory.stored, directory.measured, modes, by_series=by_series
            )
            directory.calibration = gpus.Calibration(nested(plan.entries))
        return directory.calibration if len(directory.calibration) else None

    def cudnn(self, module: Path, gpu: str) -> str:
        """Return who tells traces of a test module what cuDNN takes: ``trace``'s ``cudnn``.

        cuDNN itself is asked in an update, and where an update has stored its answers. Otherwise
        figures would depend on what is installed.
        """
        asks = bool(self._settings.update & {"new", "changed"})
        return "auto" if asks or self.told_by(module, gpu) else "stored"

    def told_by(self, module: Path, gpu: str) -> str:
        """Return the version of cuDNN whose answers are stored for a test module, or ``""``."""
        found = gpus.Calibration(nested(self._directory(module).stored.entries))
        return found.told_by(gpus.CUDNN, gpu)

    def measure(self, module: Path, target: CheckTarget) -> CalibrationResult | None:
        """Run ``target`` on this machine's GPU for what no formula gives, and no figure does yet.

        Traces of the module take the figures from then on. Returns ``None`` where there is no GPU.
        """
        from pytest_torchmem.measurement import device as devices

        device = devices.cuda_device()
        if device.why_not():
            return None
        gpu = device.gpu()
        directory = self._directory(module)
        directory.settles = True
        profile = fitting_trace(target, device, gpu)
        if isinstance(profile, str):
            return CalibrationResult(not_calibrated=profile)
        from pytest_torchmem.measurement.calibrate import setup_of

        setup, asked = setup_of(device, gpu), {gpu.name: tuple(profile.questions)}
        known = self._measured.setdefault(setup, {})
        stored = {
            question
            for old, question in directory.stored.entries
            if old.gpu == setup.gpu
            and (old.torch == setup.torch or not self._settings.split_by_torch)
        }
        modes = self._settings.update
        wanted = [q for q in profile.questions if ("changed" if q in stored else "new") in modes]
        open_ones = [question for question in wanted if question not in known]
        try:
            if open_ones and target.calibrate is not None:
                known.update(target.calibrate(device, gpu, open_ones))
        except (DeviceMemoryError, UsageError) as error:
            return CalibrationResult(asked=asked, not_calibrated=str(error))
        found = {question: known[question] for question in wanted if question in known}
        if found:
            directory.measured.setdefault(setup, {}).update(found)
            directory.calibration = None
        unanswered = dict.fromkeys(q.operator for q in open_ones if q not in known)
        return CalibrationResult({setup: found}, asked, tuple(unanswered))

    def _directory(self, module: Path) -> _Directory:
        path = calibration_path(module)
        if path not in self._directories:
            self._directories[path] = _Directory(read_calibration_file(path))
        return self._directories[path]


def told_figures(profile: MemoryProfile) -> gpus.FigureTable:
    """Return what cuDNN itself told in a trace, as an update stores it."""
    figures: gpus.FigureTable = {}
    series = ".".join(profile.torch_version.split(".")[:2])
    for answer in profile.library_answers:
        if answer.nbytes is not None and not answer.stored and profile.gpu is not None:
            setup = gpus.Setup(profile.gpu, series, answer.version, gpus.CUDNN)
            figures.setdefault(setup, {})[answer.question] = gpus.WorkspaceSize(answer.nbytes)
    return figures


def update_calibrations(
    root: Path,
    settings: Settings,
    found: Iterable[CalibrationResult],
    complete: Mapping[str, Collection[str]],
) -> list[CalibrationPlan]:
    """Write what tests that passed measured; return what was done.

    ``complete`` has the files, relative to the root, of directories whose memory tests all ran and
    passed, and these tests. What none of them asks about a GPU that they traced for is gone, and
    where there are none, everything.
    """
    complete = complete if "obsolete" in settings.update else {}
    by_file: dict[str, list[CalibrationResult]] = {file: [] for file in complete}
    for one in found:
        by_file.setdefault(one.file, []).append(one)
    plans: list[CalibrationPlan] = []
    for file, members in sorted(by_file.items()):
        asked: dict[str, set[gpus.WorkspaceKey]] | None = None
        if file in complete:
            asked = {}
            for gpu, questions in (item for one in members for item in one.asked.items()):
                asked.setdefault(gpu, set()).update(questions)
        measured = merged(member.figures for member in members)
        if not any(measured.values()) and asked is None:
            continue

        def plan(
            stored: StoredCalibration,
            measured: gpus.Figures = measured,
            asked: dict[str, set[gpus.WorkspaceKey]] | None = asked,
            nobody: bool = not complete.get(file),
        ) -> CalibrationPlan:
            if asked is not None and nobody:
                asked = {setup.gpu: set() for setup, _ in stored.entries}
            modes, by_series = settings.update, settings.split_by_torch
            return plan_calibration(stored, measured, modes, by_series=by_series, obsolete=asked)

        plans.append(change_file(root / file, read_calibration_file, plan, writes=settings.writes))
    return plans
