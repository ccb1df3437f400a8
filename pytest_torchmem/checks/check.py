"""One test's checks: the target is traced on every device, the profiles are judged and recorded."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchmem.checks import gpu as measuring
from pytest_torchmem.checks.failure import MemoryCheckFailed
from pytest_torchmem.checks.gpu import Target
from pytest_torchmem.checks.judge import Context, Judge, relative, update_command
from pytest_torchmem.checks.request import MARKER, Budget, headroom, read_budget
from pytest_torchmem.checks.result import Calibrated, Outcome, RealRun, Record
from pytest_torchmem.checks.settings import parse_devices, parse_measure
from pytest_torchmem.errors import UsageError
from pytest_torchmem.plugin.collection import test_id
from pytest_torchmem.reports import text as messages
from pytest_torchmem.snapshots.compare import with_entry
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.snapshots.location import calibration_path
from pytest_torchmem.snapshots.tolerance import Level, parse_rules

if TYPE_CHECKING:
    from pytest_torchmem.fake_cuda.out_of_memory import OutOfMemoryError
    from pytest_torchmem.profile.profile import MemoryProfile


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one check asks for, once marker, arguments and settings are put together."""

    name: str
    devices: tuple[str, ...]
    gpu: str
    gpu_named: bool
    """What is traced has to fit on the GPU."""
    tolerances: tuple[Level, ...]
    uses_snapshot: bool
    named: bool
    """The test itself names its devices; else they are those of the settings."""
    measure: str
    """Whether to run on a real GPU too: one of ``MEASURE_MODES``."""


class Checker:
    """The checks of one attempt at one test."""

    def __init__(self, item: pytest.Item, context: Context) -> None:
        self.item = item
        self.context = context
        self.records: list[Record] = []
        self.in_body = False
        """A trace of the whole body is under way."""
        self._untaken: list[Record] = []
        self._names: set[str] = set()
        self._budget: Budget | None = None

    @property
    def budget(self) -> Budget:
        """What the test's markers say; raises ``UsageError`` where they cannot be read."""
        if self._budget is None:
            self._budget = read_budget(self.item.iter_markers(MARKER))
        return self._budget

    def check(
        self,
        target: Target,
        name: str | None = None,
        device: object = None,
        gpu: str | None = None,
        tolerance: object = None,
        measure: str | None = None,
    ) -> dict[str, MemoryProfile]:
        """Trace ``target`` on every device, judge it, and raise once for all failures."""
        __tracebackhide__ = True
        plan = self._plan(name, device, gpu, tolerance, measure)
        profiles: dict[str, MemoryProfile] = {}
        records: list[Record] = []
        for where in plan.devices:
            record, profile = self._check_on(where, plan, target)
            records.append(record)
            if profile is not None:
                profiles[where] = profile
        # A test may well leave one of the configured devices alone, but not all of them.
        if not plan.named and any(profile.peak for profile in profiles.values()):
            records = [
                replace(record, failed=False) if record.figures.get("peak") == 0 else record
                for record in records
            ]
        for record in records:
            self._keep(record)
        failures = [record for record in records if record.failed]
        if failures:
            raise MemoryCheckFailed(
                messages.together(failures),
                self.first_line if self.in_body else "",
                messages.headlines(failures),
            )
        return profiles

    def take_records(self, excinfo: pytest.ExceptionInfo[BaseException] | None) -> Any:
        """Return what a report carries of this phase, of builtin types, and forget it."""
        records, self._untaken = self._untaken, []
        if not records:
            return None
        by_check = excinfo is not None and isinstance(excinfo.value, MemoryCheckFailed)
        return {
            "records": [record.to_plain() for record in records],
            "failed_by_check": by_check,
        }

    def not_checked(self, why: str) -> None:
        """Record that nothing was checked, and why."""
        self._keep(self._record(Key(self.test), Outcome.NOT_CHECKED, message=why))

    @property
    def test(self) -> str:
        """The test's id within its module."""
        return test_id(self.item)

    @property
    def command(self) -> str:
        """What to run to accept what this test does now."""
        return update_command(self.item)

    def default_device(self) -> str:
        """Return the device of a trace that names none."""
        devices = self.budget.devices or self.context.settings.devices
        return devices[0]

    def gpu(self, name: str | None = None) -> str:
        """Return the catalogue's name of the GPU that ``name``, marker or settings ask for."""
        from pytest_torchmem.targets.gpus import find_gpu

        return find_gpu(name or self.budget.gpu or self.context.settings.gpu).name

    def named_gpu(self, name: str | None = None) -> str | None:
        """Return the GPU that is named, on which a trace has to fit; ``None`` for the default."""
        if name or self.budget.gpu or self.context.settings.gpu_named:
            return self.gpu(name)
        return None

    def trace_options(self, device: str, gpu: str | None) -> dict[str, Any]:
        """Return what a trace on ``device`` is given where the test says nothing else."""
        given: dict[str, Any] = {"device": device, "gpu": gpu}
        if device == "cuda":
            allocator = self.context.settings.allocator
            calibration = self.context.calibrations.of(self.item.path)
            given |= {"allocator": allocator} if allocator else {}
            given |= {"calibration": calibration} if calibration is not None else {}
        return given

    def _plan(
        self,
        name: str | None,
        device: object,
        gpu: str | None,
        tolerance: object,
        measure: str | None,
    ) -> _Plan:
        settings, budget = self.context.settings, self.budget
        if name is not None and (not isinstance(name, str) or not name):
            raise UsageError(f"name={name!r}: the name of a check is a text that is not empty")
        if (name or "") in self._names:
            again = f"with the name {name!r}" if name else "without a name"
            raise UsageError(
                f"{self.item.nodeid} calls torchmem.check twice {again}. Each check of a "
                "test needs a name of its own, by which its snapshot is kept: "
                'check(..., name="large batch")'
            )
        self._names.add(name or "")
        named = True
        if device is not None:
            devices = parse_devices(device, "check(device=)")
        elif budget.devices:
            devices = budget.devices
        elif gpu is not None or budget.gpu is not None:
            devices = ("cuda",)
        else:
            devices, named = settings.devices, False
        own = [budget.tolerance, parse_rules(tolerance, "the argument tolerance of check")]
        # A budget replaces the snapshot, unless a tolerance, which only a snapshot has, is named.
        uses_snapshot = not budget.judges or any(own)
        rest = settings.tolerances(relative(self.item, self.item.path))
        on_gpu, gpu_named = self.gpu(gpu), self.named_gpu(gpu) is not None
        if measure is not None:
            measure = parse_measure(measure, "check(measure=)")
        return _Plan(
            name or "",
            devices,
            on_gpu,
            gpu_named,
            (*own, *rest),
            uses_snapshot,
            named,
            measure or budget.measure or settings.measure,
        )

    def _check_on(
        self, device: str, plan: _Plan, target: Target
    ) -> tuple[Record, MemoryProfile | None]:
        __tracebackhide__ = True
        judge = Judge(self.item, self.context, self.budget)
        gpu = plan.gpu if device == "cuda" else None
        key = Key(self.test, plan.name, device, gpu or "")
        stored = judge.stored() if plan.uses_snapshot else None
        updates = judge.accepts("new") or judge.accepts("changed")
        calibrates = updates and gpu is not None
        calibrated = self._calibrated(key, plan, target) if calibrates else None
        try:
            profile = target.trace(device, gpu if plan.gpu_named else None)
        except BaseException as error:
            fails = _out_of_memory(error)
            if fails is not None:
                text = messages.does_not_fit(self._record(key, Outcome.OVER_BUDGET), fails)
                return self._record(key, Outcome.OVER_BUDGET, failed=True, message=text), None
            self._not_checked_since(error, key)
            raise
        self.item.ihook.pytest_torchmem_profile(item=self.item, name=plan.name, profile=profile)
        judged = self._record(
            key,
            Outcome.PASSED,
            figures=profile.figures(),
            warnings=profile.warnings,
            unknown_workspaces=profile.unknown_workspaces,
            calibrated_workspaces=profile.calibrated_workspaces,
            workspaces=profile.by_confidence(),
            calibration=self._asking(calibrated, gpu, profile),
            torch=public_version(profile.torch_version),
        )
        if gpu is not None and plan.gpu_named:
            judged = replace(judged, headroom=headroom(gpu, profile.figures()))
        if not profile.peak:
            text = messages.nothing_there(judged)
            return replace(judged, outcome=Outcome.NOT_CHECKED, failed=True, message=text), profile
        real = self._run_for_real(judged, plan, target, profile) if gpu is not None else None
        if stored is not None:
            judged = judge.against_snapshot(judged, profile, stored, plan.tolerances, real)
        if self.budget.judges:
            judged = judge.against_budget(judged, profile, gpu, real)
        if real is not None:
            before = stored.entry(judged.key) if stored is not None else None
            levels = with_entry(plan.tolerances, before, 2)
            judged = measuring.judged(
                judged, real, before, levels, self.context.settings.measure_tolerance
            )
        if self.context.settings.strict and profile.warnings and not judged.failed:
            text = messages.unknown_bytes(judged)
            judged = replace(judged, outcome=Outcome.UNKNOWN_BYTES, failed=True, message=text)
        return judged, profile

    def _run_for_real(
        self, record: Record, plan: _Plan, target: Target, profile: MemoryProfile
    ) -> RealRun | None:
        """Run the step on this machine's GPU, where there is one and nobody forbids it."""
        __tracebackhide__ = True
        if plan.measure == "never":
            return None
        try:
            return measuring.run_for_real(target, plan.measure == "require", profile, plan.gpu)
        except BaseException as error:
            self._not_checked_since(error, record.key)
            raise

    def _calibrated(self, key: Key, plan: _Plan, target: Target) -> Calibrated | None:
        """In an update, run the step on this machine's GPU for what kernels take there."""
        __tracebackhide__ = True
        if plan.measure == "never" or target.record is None:
            return None
        try:
            return self.context.calibrations.measure(self.item.path, target)
        except BaseException as error:
            self._not_checked_since(error, key)
            raise

    def _asking(
        self, found: Calibrated | None, gpu: str | None, profile: MemoryProfile
    ) -> Calibrated | None:
        """Return what an update learns of this check: what is asked, and the GPU's answers."""
        if gpu is None or not self.context.settings.update:
            return None
        found = found or Calibrated()
        asked = {gpu: profile.questions, **found.asked}
        file = relative(self.item, calibration_path(self.item.path))
        return replace(found, asked=asked, file=file)

    def _not_checked_since(self, error: BaseException, key: Key) -> None:
        why = f"not checked: {type(error).__name__} was raised"
        self._keep(self._record(key, Outcome.NOT_CHECKED, message=why))

    def _record(self, key: Key, outcome: Outcome, **details: Any) -> Record:
        return Record(self.item.nodeid, "", key, outcome, location=self._location(), **details)

    def _keep(self, record: Record) -> None:
        from pytest_torchmem.reports.junit import properties

        self.records.append(record)
        self._untaken.append(record)
        self.item.user_properties.extend(properties(record))

    @property
    def first_line(self) -> str:
        """Where the test begins, as a traceback would end."""
        line = (self.item.location[1] or 0) + 1
        return f"{relative(self.item, self.item.path)}:{line}: MemoryCheckFailed"

    def _location(self) -> tuple[str, int]:
        """Return the innermost line of the test's own file that is running, else its first."""
        frame, own = sys._getframe(), str(self.item.path)
        while frame is not None and frame.f_code.co_filename != own:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and not self.in_body:
            return relative(self.item, self.item.path), frame.f_lineno
        return relative(self.item, self.item.path), (self.item.location[1] or 0) + 1


def public_version(version: str) -> str:
    """Return a torch version without its build: the same for cpu and cuda wheels."""
    return version.partition("+")[0]


def _out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Return the error of a trace that does not fit on its GPU, ``None`` for any other error."""
    # A trace that raised it has imported it; nothing here may import torch.
    module = sys.modules.get("pytest_torchmem.fake_cuda.out_of_memory")
    found: OutOfMemoryError | None = None
    if module is not None and isinstance(error, module.OutOfMemoryError):
        found = error
    return found
