"""A profile against its snapshot, its budget and a real GPU. What is found is data, not text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.checks.calibrations import CalibrationResult, Calibrations
from pytest_torchmem.checks.gpu import Measurement, RealRun
from pytest_torchmem.checks.request import Limit, Request
from pytest_torchmem.checks.result import (
    ACCEPTED,
    AboveCap,
    Changed,
    CheckResult,
    EstimateOff,
    Finding,
    GrowsFaster,
    Leaks,
    Missing,
    Outcome,
    OverBudget,
    Overrun,
    PeakContents,
    SnapshotResult,
    TraceResult,
    contents,
    default_limits,
    headroom,
    limits_of,
    overruns,
)
from pytest_torchmem.checks.settings import Settings
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.snapshots.alive import Alive, alive_of
from pytest_torchmem.snapshots.changes import moves, renames
from pytest_torchmem.snapshots.compare import Comparison, beyond, compare, entry_of, with_entry
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.location import orphans_in, snapshot_path
from pytest_torchmem.snapshots.store import StoredSnapshot, read

if TYPE_CHECKING:
    from pytest_torchmem.checks.gpu import Confirmations
    from pytest_torchmem.diagnosis.causes import Watched
    from pytest_torchmem.diagnosis.diagnose import Diagnosis, StepGrowth
    from pytest_torchmem.graphs.scaling import Scaling
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.snapshots.tolerance import Level


@dataclass(frozen=True, slots=True)
class Context:
    """What all the checks of one process share."""

    settings: Settings
    files: dict[Path, StoredSnapshot]
    calibrations: Calibrations
    told: dict[tuple[str, str], str] = field(default_factory=dict)
    """The test that told a cause and its place in full; others refer to it."""
    confirmations: Confirmations | None = None
    """What was measured beside this run, with the stand-in."""

    def stored(self, path: Path) -> StoredSnapshot:
        """Return a snapshot file as it was when this process first asked for it."""
        if path not in self.files:
            self.files[path] = read(path)
        return self.files[path]


def stored_for(request: Request, context: Context) -> StoredSnapshot | None:
    """Return the test module's snapshot file, before anything is traced in vain.

    ``None`` for a check without snapshot.
    """
    if not request.uses_snapshot:
        return None
    stored = context.stored(snapshot_path(request.test.module))
    if stored.conflicted and "changed" not in request.test.accepts:
        raise UsageError(stored.conflict_message)
    return stored


@dataclass(frozen=True)
class Judge:
    """Judges one check on one device by its budget, its snapshot and its measurement."""

    request: Request
    context: Context
    key: Key
    profile: MemoryProfile
    stored: StoredSnapshot | None
    run: RealRun | None
    """The same step on a real GPU."""
    calibration: CalibrationResult | None
    scaling: Scaling | None
    """The same step at other sizes, where it is bound how it may grow."""
    watch: Callable[[MemoryProfile, Diagnosis], Watched | None]
    """Traces the step once more, for what a profile does not hold."""
    holder: Callable[[MemoryProfile, StepGrowth], str]
    """Traces the step once more, for what refers to what a step left alive."""

    @cached_property
    def alive(self) -> Alive:
        """What was alive at the peaks of the trace."""
        return alive_of(self.profile)

    def judge(self) -> CheckResult:
        """Return the result."""
        profile, gpu, calibration = self.profile, self.key.gpu, self.calibration
        fits = gpu and self.request.gpu_named
        stored_by = self.context.calibrations.told_by(self.request.test.module, gpu) if gpu else ""
        room = headroom(gpu, profile.figures()) if fits else None
        trace = TraceResult.of(profile, room, stored_by)
        if not profile.peak and not (profile.device == "cpu" and profile.host_peak):
            findings = [Finding(outcome=Outcome.NOT_CHECKED)]
            return CheckResult(self.key, tuple(findings), trace, calibration=calibration)
        snapshot = self._snapshot(trace)
        measurement = self._measurement(snapshot)
        limits = limits_of(self.request.budget, gpu)
        where = self.request.test.relative(self.request.test.module), self.key.device
        rules = self.context.settings.budget
        limits += (*default_limits(rules, *where, profile.figures(), limits),)
        findings = [*self._against_limits(limits), *self._against_bounds()]
        findings += self._against_steps()
        findings += self._against_snapshot(snapshot) if snapshot is not None else []
        if measurement is not None and self.run is not None:
            findings += self._against_measurement(self.run, measurement, findings)
        if self.context.settings.strict and profile.warnings and not _failing(findings):
            findings.append(Finding(outcome=Outcome.UNKNOWN_WORKSPACE))
        return CheckResult(
            key=snapshot.entry.key if snapshot is not None else self.key,
            findings=tuple(findings),
            trace=trace,
            snapshot=snapshot,
            limits={limit.figure: limit.nbytes for limit in limits},
            measurement=measurement,
            calibration=calibration,
        )

    def _snapshot(self, trace: TraceResult) -> SnapshotResult | None:
        if self.stored is None:
            return None
        profile, key = self.profile, self.key
        if profile.host not in (None, "reference"):
            raise UsageError(
                f"host={profile.host!r} models this machine, and a snapshot must pass on others. "
                "Leave host= out, or set a limit with the marker memory_budget"
            )
        if self.context.settings.split_by_torch:
            key = replace(key, torch_series=".".join(trace.torch.split(".")[:2]))
        measured = self.run.entry if self.run is not None else {}
        now = entry_of(key, profile, lambda: self.alive, measured)
        before = self.stored.entries.get(now.key)
        file = self.request.test.relative(self.stored.path)
        if before is None:
            return SnapshotResult(file, now)
        comparison = compare(before, now, self._levels(before))
        comparison = self.request.test.on_comparison(before, now, comparison)
        why = self._diagnose(before, now, comparison)
        return SnapshotResult(file, now, comparison, before, why)

    def _diagnose(self, before: Entry, now: Entry, comparison: Comparison) -> Diagnosis | None:
        """Return what grew and why, ``None`` where nothing did."""
        moment = comparison.grown_moment
        if not moment:
            return None
        from pytest_torchmem.diagnosis.diagnose import diagnose

        found = diagnose(before, now, moment, self.alive, self.profile)
        seen = self.watch(self.profile, found)
        if seen is None:
            return found
        return diagnose(before, now, moment, self.alive, self.profile, seen)

    def _against_snapshot(self, snapshot: SnapshotResult) -> list[Finding]:
        before, now, comparison = snapshot.before, snapshot.entry, snapshot.comparison
        assert self.stored is not None
        if before is None or comparison is None:
            if now.key in self.stored.contested:
                return [Finding(outcome=Outcome.UPDATED, fails=False)]
            if "new" in self.request.test.accepts:
                return [Finding(outcome=Outcome.NEW, fails=False)]
            return [self._missing(self.stored, snapshot)]
        if self._accepts(before, now):
            above = self._above_cap(snapshot)
            return [above or Finding(outcome=Outcome.UPDATED, fails=False)]
        if comparison.grew:
            why = snapshot.diagnosis
            return [Changed(outcome=Outcome.GREW, comparison=comparison, diagnosis=why)]
        if comparison.unjudged:
            return [Changed(outcome=Outcome.GREW, comparison=comparison)]
        if comparison.shrank:
            strict = self.context.settings.strict
            return [Changed(outcome=Outcome.SHRANK, fails=strict, comparison=comparison)]
        return []

    def _accepts(self, before: Entry, now: Entry) -> bool:
        """Whether an update writes ``now`` in the place of ``before``."""
        accepts = self.request.test.accepts
        if not accepts or before.same_measurement(now):  # which computes what explains it
            return False
        another_gpu = before.same_trace(now) and not set(before.measured) & set(now.measured)
        return "changed" in accepts or (another_gpu and "new" in accepts)

    def _above_cap(self, snapshot: SnapshotResult) -> AboveCap | None:
        """Return what grew by more than an update may accept, traced or else measured."""
        cap = self.context.settings.update_max
        if cap is None or snapshot.comparison is None:
            return None
        above = beyond(snapshot.comparison, cap)
        if not above and self.run is not None:
            measured = self.run.measurement.compared(snapshot.entry, snapshot.before, ())
            above = beyond(measured, cap) if measured is not None else ()
        return AboveCap(changes=above, cap=str(cap)) if above else None

    def _missing(self, stored: StoredSnapshot, snapshot: SnapshotResult) -> Missing:
        entry, entries = snapshot.entry, stored.entries
        gone = [entries[key] for key in entries if self.request.test.is_gone(key.test)]
        found = renames(gone, [entry])
        orphans = []
        for path in orphans_in(self.request.test.module.parent):
            try:
                others = self.context.stored(path).entries.values()
            except SnapshotError:
                continue
            orphans += [(self.request.test.relative(path), other) for other in others]
        moved_from = next(iter(moves(orphans, [("", entry)], certain=False)), ("",))[0]
        renamed = found[0][0] if found else None
        return Missing(file=snapshot.file, renamed=renamed, moved_from=moved_from)

    def _against_limits(self, limits: tuple[Limit, ...]) -> list[Finding]:
        over = overruns(limits, self.profile.figures())
        if over:
            return [_over_budget(over, self._contents(over))]
        measured = self.run.measurement if self.run is not None else None
        # A limit is for the bytes of one GPU; another one's say nothing about it.
        if measured is not None and measured.figures and measured.gpu == self.key.gpu:
            over = overruns(limits, measured.figures)
        return [_over_budget(over, measured_on=self.key.gpu)] if over else []

    def _contents(self, over: list[Overrun]) -> PeakContents | None:
        first = next((one for one in over if one.value is not None), None)
        if first is None:
            return None
        return contents(self.profile, first.limit.figure, first.limit.nbytes)

    def _against_steps(self) -> list[Finding]:
        """Return by how much memory grows from step to step, where that may not be."""
        allowed = self.request.growth
        if allowed is None:
            return []
        from pytest_torchmem.diagnosis.diagnose import FEWEST, step_growth

        found = own = step_growth(self.profile.timeline)
        if self.profile.host_peak is not None:
            found = max(own, step_growth(self.profile.host_timeline), key=lambda one: one.most)
        if own.steps < FEWEST:
            return [Leaks(outcome=Outcome.NOT_CHECKED, growth=own, allowed=str(allowed))]
        if found.most <= allowed.allowance(self.profile.baseline):
            return []
        holder = self.holder(self.profile, found) if found is own else ""
        return [Leaks(growth=found, allowed=str(allowed), holder=holder)]

    def _against_bounds(self) -> list[Finding]:
        found: list[Finding] = []
        for bound in self.request.bounds if self.scaling is not None else ():
            assert self.scaling is not None
            power = self.scaling.degree(bound.size)
            if power > bound.power:
                polynomial = str(self.scaling.polynomial())
                fastest = self.scaling.fastest(bound.size)
                grows = GrowsFaster(
                    bound=bound, power=power, polynomial=polynomial, fastest=fastest
                )
                found.append(grows)
        return found

    def _measurement(self, snapshot: SnapshotResult | None) -> Measurement | None:
        if self.run is None or snapshot is None:
            return self.run.measurement if self.run is not None else None
        measurement, before = self.run.measurement, snapshot.before
        comparison = measurement.compared(snapshot.entry, before, self._levels(before))
        return replace(measurement, comparison=comparison)

    def _against_measurement(
        self, run: RealRun, measurement: Measurement, findings: list[Finding]
    ) -> list[Finding]:
        """Return what the real GPU says against the trace and the snapshot."""
        found: list[Finding] = []
        most, comparison = self.context.settings.measure_tolerance, measurement.comparison
        wrong = measurement.off(most)
        if wrong:
            found.append(EstimateOff(run=run, peaks=wrong, most=str(most)))
        accepted = any(not finding.fails for finding in findings if finding.outcome in ACCEPTED)
        accepted = accepted and not _failing([*findings, *found])
        if comparison is not None and comparison.grew and not accepted:
            gpu = measurement.gpu
            grew = Changed(outcome=Outcome.MEASURED_GREW, comparison=comparison, measured_on=gpu)
            found.append(grew)
        return found

    def _levels(self, before: Entry | None) -> list[Level]:
        return with_entry(self.request.tolerances, before, 2)


def _over_budget(
    over: list[Overrun], contents: PeakContents | None = None, measured_on: str = ""
) -> OverBudget:
    ran = any(overrun.value is not None for overrun in over)
    return OverBudget(
        outcome=Outcome.OVER_BUDGET if ran else Outcome.NOT_CHECKED,
        overruns=over,
        contents=contents,
        measured_on=measured_on,
    )


def _failing(findings: list[Finding]) -> bool:
    return any(finding.fails for finding in findings)
