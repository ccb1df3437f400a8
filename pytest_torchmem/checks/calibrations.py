"""Calibration files in a run: read for traces, filled by a GPU in an update, and written.

CUDA is used, and torch imported, only in an update that may measure: not with
``--torchmem-measure=never``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.checks.gpu import fitting_trace
from pytest_torchmem.checks.request import CheckTarget, Settings
from pytest_torchmem.errors import DeviceMemoryError, UsageError
from pytest_torchmem.snapshots.calibration import (
    CalibrationPlan,
    StoredCalibration,
    merged,
    nested,
    plan_calibration,
    read_calibration_file,
)
from pytest_torchmem.snapshots.location import calibration_path
from pytest_torchmem.snapshots.store import change_file
from pytest_torchmem.targets import gpus

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


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
