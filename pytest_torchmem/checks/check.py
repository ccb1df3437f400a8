"""One check on one device: the target is traced, run for real where there is a GPU, and judged.

A profile is judged by its snapshot, its budget and a real GPU. What is found is data, not text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.checks import gpu as measuring
from pytest_torchmem.checks import result as results
from pytest_torchmem.checks.gpu import CalibrationResult, Calibrations, told_figures
from pytest_torchmem.checks.request import CheckTarget, Limit, Request, Settings
from pytest_torchmem.checks.result import Changed, CheckResult, Finding, Outcome, SnapshotResult
from pytest_torchmem.errors import SnapshotError, UsageError, warn_of_defect
from pytest_torchmem.figures import END, HOST, PEAK, RESERVED
from pytest_torchmem.profile.facts import Topic
from pytest_torchmem.profile.timeline import Lifetimes, Role
from pytest_torchmem.snapshots.alive import Alive, What, alive_of, positions_of, what_of
from pytest_torchmem.snapshots.calibration import merged
from pytest_torchmem.snapshots.compare import Comparison, beyond, compare, entry_of
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.location import calibration_path, orphans_in, snapshot_path
from pytest_torchmem.snapshots.store import StoredSnapshot, moves, read, renames
from pytest_torchmem.snapshots.tolerance import Level, parse_rules
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.causes import Watched
    from pytest_torchmem.diagnosis.diagnose import Diagnosis, StepGrowth
    from pytest_torchmem.fake_cuda.memory import OutOfMemoryError
    from pytest_torchmem.graphs.scaling import Scaling
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.targets.gpus import Gpu
    from pytest_torchmem.tracing.code import Code
    from pytest_torchmem.tracing.watch import Watch


@dataclass(frozen=True, slots=True)
class Context:
    """What all the checks of one process share."""

    settings: Settings
    calibrations: Calibrations
    confirmations: measuring.Confirmations | None = None
    """What was measured beside this run, with the stand-in."""
    files: dict[Path, StoredSnapshot] = field(default_factory=dict)
    told: dict[tuple[str, str], str] = field(default_factory=dict)
    """The test that told a cause and its place in full; others refer to it."""

    def stored(self, path: Path) -> StoredSnapshot:
        """Return a snapshot file as it was when this process first asked for it."""
        if path not in self.files:
            self.files[path] = read(path)
        return self.files[path]


def stored_for(request: Request, context: Context) -> StoredSnapshot | None:
    """Return the module's snapshot file before anything is traced, ``None`` for a check without:
    a budget needs none that cannot be read.
    """
    if not request.is_stored:
        return None
    try:
        stored = context.stored(snapshot_path(request.test.module))
        if stored.conflicted and "changed" not in request.test.accepts:
            raise UsageError(stored.conflict_message)
    except (SnapshotError, UsageError):
        if request.uses_snapshot:
            raise
        return None
    return stored


@dataclass(frozen=True)
class Judge:
    """Judges one check on one device by its budget, its snapshot and its measurement."""

    check: DeviceCheck
    profile: MemoryProfile
    stored: StoredSnapshot | None
    run: measuring.RealRun | None
    """The same step on a real GPU."""
    calibration: CalibrationResult | None
    scaling: Scaling | None
    """The same step at other sizes, where it is bound how it may grow."""

    @cached_property
    def alive(self) -> Alive:
        return alive_of(self.profile)

    def texts(self) -> dict[str, str]:
        from pytest_torchmem.tracing.code import texts_of

        return texts_of(self.check.code())

    def judge(self) -> CheckResult:
        profile, gpu, calibration = self.profile, self.check.key.gpu, self.calibration
        request, context = self.check.request, self.check.context
        stored_by = context.calibrations.told_by(request.test.module, gpu) if gpu else ""
        trace = results.TraceResult.of(profile, gpu if request.gpu_named else "", stored_by)
        if not profile.peak and not (profile.device == "cpu" and profile.host_peak):
            found = (Finding(outcome=Outcome.NOT_CHECKED),)
            return CheckResult(self.check.key, found, trace, calibration=calibration)
        snapshot = self._snapshot(trace)
        measurement = self.run.measurement if self.run is not None else None
        if measurement is not None and snapshot is not None and request.uses_snapshot:
            levels = self._levels(snapshot.before)
            comparison = measurement.compared(snapshot.entry, snapshot.before, levels)
            measurement = replace(measurement, comparison=comparison)
        rules, path = context.settings.budget, request.test.relative(request.test.module)
        limits = results.limits_of(request.budget, gpu, profile.figures(), rules, path)
        before = snapshot.before if snapshot is not None else None
        over = self._against_limits(limits, before)
        held = next((one.contents for one in over if one.contents is not None), None)
        if snapshot is not None and held is not None and held.since is not None:
            snapshot = replace(snapshot, diagnosis=held.diagnosis)
        findings: list[Finding] = [*over, *self._against_bounds()]
        findings += self._against_steps(before)
        findings += self._against_snapshot(snapshot) if snapshot is not None else []
        if measurement is not None and self.run is not None:
            findings += self._against_measurement(self.run, measurement, findings)
        if context.settings.strict and profile.warnings and not _failing(findings):
            findings.append(Finding(outcome=Outcome.UNKNOWN_WORKSPACE))
        return CheckResult(
            key=snapshot.entry.key if snapshot is not None else self.check.key,
            findings=tuple(findings),
            trace=trace,
            snapshot=snapshot,
            limits={limit.figure: limit.nbytes for limit in limits},
            measurement=measurement,
            calibration=calibration,
        )

    def _snapshot(self, trace: results.TraceResult) -> SnapshotResult | None:
        profile, key, judges = self.profile, self.check.key, self.check.request.uses_snapshot
        is_of_any_host = profile.host in (None, "reference")
        if self.stored is None or not (is_of_any_host or judges):
            return None
        if not is_of_any_host:
            raise UsageError(
                f"host={profile.host!r} models this machine, and a snapshot must pass on others. "
                "Leave host= out, or set a limit with the marker memory_budget"
            )
        key = self.check.stored_key(trace.torch)
        measured = self.run.entry if self.run is not None else {}
        now = entry_of(key, profile, lambda: self.alive, measured, self.texts)
        before = self.stored.entries.get(now.key)
        file = self.check.request.test.relative(self.stored.path)
        if before is None or not judges:
            return SnapshotResult(file, now, before=before)
        comparison = compare(before, now, self._levels(before))
        changed = self.check.request.test.on_comparison(
            before=before, now=now, comparison=comparison
        )
        comparison = comparison if changed is None else changed
        why = self._diagnose(before, now, comparison)
        return SnapshotResult(file, now, comparison, before, why)

    @property
    def watched(self) -> Callable[[MemoryProfile, Diagnosis], Watched | None]:
        return partial(self.check.watched, test=self.check.request.test.module.name)

    def _diagnose(self, before: Entry, now: Entry, comparison: Comparison) -> Diagnosis | None:
        """Return what grew and why, ``None`` where nothing did."""
        moment = comparison.grown_moment
        if not moment:
            return None
        from pytest_torchmem.diagnosis.diagnose import diagnose

        found = diagnose(before, now, moment, self.alive, self.profile)
        seen = self.watched(self.profile, found)
        if seen is not None:
            found = diagnose(before, now, moment, self.alive, self.profile, seen)
        return self.check.with_code(found, seen, before)

    def _against_snapshot(self, snapshot: SnapshotResult) -> list[Finding]:
        before, now, comparison = snapshot.before, snapshot.entry, snapshot.comparison
        assert self.stored is not None
        if before is None:
            if now.key in self.stored.contested:
                return [Finding(outcome=Outcome.UPDATED, fails=False)]
            if "new" in self.check.request.test.accepts:
                return [Finding(outcome=Outcome.NEW, fails=False)]
            judges = self.check.request.uses_snapshot
            return [self._missing(self.stored, snapshot)] if judges else []
        if self._accepts(before, now):
            above = self._above_cap(snapshot)
            return [above or Finding(outcome=Outcome.UPDATED, fails=False)]
        if comparison is None:
            return []
        if comparison.grew:
            why = snapshot.diagnosis
            return [Changed(outcome=Outcome.GREW, comparison=comparison, diagnosis=why)]
        if comparison.unjudged:
            return [Changed(outcome=Outcome.GREW, comparison=comparison)]
        if comparison.shrank:
            strict = self.check.context.settings.strict
            return [Changed(outcome=Outcome.SHRANK, fails=strict, comparison=comparison)]
        return []

    def _accepts(self, before: Entry, now: Entry) -> bool:
        accepts = self.check.request.test.accepts
        if not accepts or before.same_measurement(now):  # which computes what explains it
            return False
        another_gpu = before.same_trace(now) and not set(before.measured) & set(now.measured)
        return "changed" in accepts or (another_gpu and "new" in accepts)

    def _above_cap(self, snapshot: SnapshotResult) -> results.AboveCap | None:
        """Return what grew by more than an update may accept, traced or else measured."""
        cap = self.check.context.settings.update_max
        if cap is None or snapshot.comparison is None:
            return None
        above = beyond(snapshot.comparison, cap)
        if not above and self.run is not None:
            measured = self.run.measurement.compared(snapshot.entry, snapshot.before, ())
            above = beyond(measured, cap) if measured is not None else ()
        return results.AboveCap(changes=above, cap=str(cap)) if above else None

    def _missing(self, stored: StoredSnapshot, snapshot: SnapshotResult) -> results.Missing:
        entry, entries = snapshot.entry, stored.entries
        gone = [entries[key] for key in entries if self.check.request.test.is_gone(key.test)]
        found = renames(gone, [entry])
        orphans = []
        test = self.check.request.test
        for path in {*orphans_in(test.module.parent), *test.orphans()}:
            try:
                others = self.check.context.stored(path).entries.values()
            except SnapshotError:
                continue
            orphans += [(self.check.request.test.relative(path), other) for other in others]
        moved_from = next(iter(moves(orphans, [("", entry)], certain=False)), ("",))[0]
        renamed = found[0][0] if found else None
        return results.Missing(file=snapshot.file, renamed=renamed, moved_from=moved_from)

    def _against_limits(
        self, limits: list[Limit], before: Entry | None
    ) -> list[results.OverBudget]:
        over, check = results.overruns(limits, self.profile.figures()), self.check
        contents, measured_on = None, ""
        first = next((one.limit for one in over if one.value is not None), None)
        if first is not None:
            now = entry_of(check.key, self.profile, lambda: self.alive)
            known = now, self.profile, first, before, self.watched, check.with_code
            contents = results.contents(*known)
        measured = self.run.measurement if self.run is not None else None
        # A limit is for the bytes of one GPU; another one's say nothing about it.
        if not over and measured is not None and measured.gpu == check.key.gpu and measured.figures:
            over, measured_on = results.overruns(limits, measured.figures), check.key.gpu
        if not over:
            return []
        ran = any(overrun.value is not None for overrun in over)
        return [
            results.OverBudget(
                outcome=Outcome.OVER_BUDGET if ran else Outcome.NOT_CHECKED,
                overruns=over,
                contents=contents,
                measured_on=measured_on,
            )
        ]

    def _against_steps(self, before: Entry | None) -> list[Finding]:
        """Return by how much memory grows from step to step, where that may not be."""
        allowed = self.check.request.growth
        if allowed is None:
            return []
        from pytest_torchmem.diagnosis.diagnose import FEWEST, Diagnosis, step_growth

        found = own = step_growth(self.profile.timeline)
        if self.profile.host_peak is not None:
            found = max(own, step_growth(self.profile.host_timeline), key=lambda one: one.most)
        if own.steps < FEWEST:
            return [results.Leaks(outcome=Outcome.NOT_CHECKED, growth=own, allowed=str(allowed))]
        if found.most <= allowed.allowance(self.profile.baseline):
            return []
        on_host = found is not own
        holder, why = self.check.holder(self.profile, found, on_host=on_host), None
        if found.difference is not None:
            why = self.check.with_code(Diagnosis(found.difference), None, before)
        return [
            results.Leaks(
                growth=found, allowed=str(allowed), diagnosis=why, holder=holder, on_host=on_host
            )
        ]

    def _against_bounds(self) -> list[Finding]:
        scaling = self.scaling
        if scaling is None:
            return []
        polynomial = str(scaling.polynomial())
        return [
            results.GrowsFaster(
                bound=one, power=power, polynomial=polynomial, fastest=scaling.fastest(one.size)
            )
            for one in self.check.request.bounds
            if (power := scaling.degree(one.size)) > one.power
        ]

    def _against_measurement(
        self, run: measuring.RealRun, measurement: measuring.Measurement, findings: list[Finding]
    ) -> list[Finding]:
        found: list[Finding] = []
        most, comparison = self.check.context.settings.measure_tolerance, measurement.comparison
        wrong = measurement.off(most)
        if wrong:
            found.append(results.EstimateOff(run=run, peaks=wrong, most=str(most)))
        accepted = any(
            not finding.fails for finding in findings if finding.outcome in results.ACCEPTED
        )
        accepted = accepted and not _failing([*findings, *found])
        if comparison is not None and comparison.grew and not accepted:
            gpu = measurement.gpu
            grew = Changed(outcome=Outcome.MEASURED_GREW, comparison=comparison, measured_on=gpu)
            found.append(grew)
        return found

    def _levels(self, before: Entry | None) -> list[Level]:
        levels = [*self.check.request.tolerances]
        if before is not None and before.tolerance is not None:
            levels.insert(2, parse_rules(before.tolerance, "the entry's own tolerance"))
        return levels


def _failing(findings: list[Finding]) -> bool:
    return any(finding.fails for finding in findings)


_KEPT = (
    *("held", "held between", "earlier steps", "gradients kept"),
    *("left", "lives longer", "graph kept", "backwards", "gradients recorded"),
    *("operators", "elsewhere", "copy", "larger", "twice", "recomputed"),
)
_HELD = (Role.HELD, Role.EARLIER, Role.OTHER)
_MADE = (*_HELD, *(Role.SAVED, Role.ACTIVATION, Role.RECOMPUTED))
_OF_MODELS = (
    *(Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.GRADIENT_TEMPORARY),
    Role.OPTIMIZER_STATE,
)
_MOST = 50


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """One check on one device, both of which ``key`` names."""

    key: Key
    request: Request
    target: CheckTarget
    context: Context
    world: World | None = None

    def run(self) -> tuple[CheckResult, MemoryProfile | None]:
        """Return the result, and the profile of the trace unless it ran out of memory."""
        request = self.request
        stored = stored_for(request, self.context)
        calibration = self._calibrate()
        must_fit_on = self.key.gpu if self.key.gpu and request.gpu_named else None
        try:
            profile = self.target.trace(self.key.device, must_fit_on, self.world)
        except BaseException as error:
            # A trace that does not fit has imported the error; nothing here may import torch.
            module = sys.modules.get("pytest_torchmem.fake_cuda.memory")
            kind: type[OutOfMemoryError] | tuple[()] = getattr(module, "OutOfMemoryError", ())
            if not isinstance(error, kind):
                raise
            held = self._without_limit(must_fit_on, error.gpu, stored)
            found = results.DoesNotFit(error=error, contents=held)
            return CheckResult(self.key, (found,)), None
        request.test.on_profile(name=request.name, profile=profile)
        judge = Judge(
            self,
            profile,
            stored,
            run=self._run_for_real(profile) if profile.peak else None,
            calibration=self._calibration(calibration, profile),
            scaling=self._scaling(must_fit_on),
        )
        return judge.judge(), profile

    def watched(self, profile: MemoryProfile, found: Diagnosis, test: str = "") -> Watched | None:
        """Trace the target again for details of the findings; errors of this trace are ignored.

        The program begins with what is called in the file ``test``.
        """
        rules = {cause.rule for cause in found.causes}
        came = found.difference.came
        held = sum(row.change for row in came if row.what.role in _HELD)
        kept = not rules or bool(rules.intersection(_KEPT))
        kept = kept or 3 * held >= sum(row.change for row in came)
        on_host = found.difference.moment == HOST
        new, at = _new_at(profile, found)
        whats = _may_be_held(new, found) if kept else {}
        attends = "attention" in rules
        places = {
            place: {index for index, what in new.items() if what in own}
            for place, own in found.places.items()
        }
        if not (whats or attends or places):
            return None
        watch = self._watch(profile, whats, at, attention=attends, places=places, on_host=on_host)
        if watch is None:
            return None
        from pytest_torchmem.diagnosis.causes import Watched
        from pytest_torchmem.tracing.holders import together

        named: dict[What, list[str]] = {}
        for index in sorted(watch.holders):
            named.setdefault(whats[index], []).append(watch.holders[index])
        holders = {what: together(own) for what, own in named.items()}
        reasons = {line: reason for line, reason in watch.attention.items() if reason}
        savers = {whats[index]: saver for index, saver in watch.savers.items()}
        callers = {
            place: [_within_program(lines, test) for lines in leads]
            for place, (_, leads) in watch.callers.items()
        }
        return Watched(reasons, holders, savers, callers, kept)

    def code(self) -> Code:
        """Return the code that the test leads to."""
        from pytest_torchmem.tracing.code import code_of

        with suppress(Exception):  # of objects that are not what they say; a failure needs no code
            return code_of((*self.request.test.functions, self.target.trace))
        return {}

    def stored_key(self, torch: str) -> Key:
        """Return what snapshots know this check by, with a version of torch."""
        if not self.context.settings.split_by_torch:
            return self.key
        return replace(self.key, torch_series=".".join(torch.split(".")[:2]))

    def with_code(
        self, found: Diagnosis, seen: Watched | None, before: Entry | None = None
    ) -> Diagnosis:
        """Return a diagnosis with the code that changed since a snapshot, or else by git."""
        from pytest_torchmem.snapshots.files import committed_text, former_texts
        from pytest_torchmem.tracing.changed_code import Growth, changed_code
        from pytest_torchmem.tracing.code import last_committed

        paths = seen.callers.get(found.place, ()) if seen is not None else ()
        near = [found.place[1], *found.lines, *chain(*paths), *(one for _, one in found.places)]
        near = [*dict.fromkeys((*near, *chain(*found.leads.values())))]
        growth = Growth(near, found.words, found.code, found.renamed, found.switch)
        try:
            now, then = self.code(), before.facts.get(Topic.CODE, {}) if before else None
            then = last_committed(now, committed_text) if then is None else then
            return replace(found, changed=tuple(changed_code(then, now, growth, former_texts)))
        except Exception as error:  # of texts that are odd; a failure needs no code
            warn_of_defect("the code that changed", error)
        return found

    def holder(self, profile: MemoryProfile, found: StepGrowth, *, on_host: bool) -> str:
        """Trace again and return what refers to a step's largest tensor, "" if unknown."""
        made = (profile.host_timeline if on_host else profile.timeline).allocations
        largest = sorted(found.made, key=lambda index: -made[index].nbytes)[:_MOST]
        watch = self._watch(profile, largest, found.end, on_host=on_host) if largest else None
        if watch is None:
            return ""
        savers = {
            index: f"the graph of {function}, which saves it at {line}"
            for index, (function, line) in watch.savers.items()
        }
        named = savers | watch.holders
        return next((named[index] for index in largest if index in named), "")

    def _watch(
        self,
        profile: MemoryProfile,
        indices: Iterable[int],
        at: int,
        *,
        attention: bool = False,
        places: Mapping[tuple[str, str], Collection[int]] | None = None,
        on_host: bool = False,
    ) -> Watch | None:
        """Trace the target again, and see what leads to ``places``, and what refers to allocations
        after ``at`` events.

        Looked at is before what is made next; where nothing is, before what was made last, when
        the program has its variables still; at the end after all events.
        """
        from pytest_torchmem.tracing.watch import watching

        timeline = profile.host_timeline if on_host else profile.timeline
        wanted = {index: timeline.allocations[index].nbytes for index in indices}
        last = max(timeline.events, default=0) if at < len(timeline.events) else 0
        before = next((event for event in timeline.events[at:] if event > 0), last) - 1
        key = self.key
        try:
            device = "cpu" if on_host else key.device
            with watching(device, wanted, before, attention=attention, places=places) as watch:
                self.target.trace(key.device, key.gpu or None, self.world, memory="unlimited")
        except Exception:  # the first trace is the one that counts
            return None
        return watch

    def _without_limit(
        self, on: str | None, gpu: Gpu, stored: StoredSnapshot | None
    ) -> results.PeakContents | None:
        """Trace what did not fit as if it did; ``None`` where that goes wrong as well."""
        try:
            profile = self.target.trace(self.key.device, on, self.world, memory="unlimited")
            room = gpu.memory - gpu.context
            limit = Limit(PEAK if profile.peak > room else RESERVED, room, "")
            now = entry_of(self.stored_key(profile.torch_version), profile)
            before = stored.entries.get(now.key) if stored is not None else None
            return results.contents(now, profile, limit, before, self.watched, self.with_code)
        except Exception:  # that it does not fit is what counts
            return None

    def _scaling(self, must_fit_on: str | None) -> Scaling | None:
        names = [bound.size for bound in self.request.bounds]
        if not names:
            return None
        if self.target.scale is None:
            raise UsageError(
                "scaling= needs the step and its inputs, to trace other sizes of them: use the "
                "fixture, def test(torchmem), and in it torchmem.check(model, x)"
            )
        return self.target.scale(self.key.device, must_fit_on, self.world, names)

    def _run_for_real(self, profile: MemoryProfile) -> measuring.RealRun | None:
        measure = self.request.measure
        if not self.key.gpu or measure == "never":
            return None
        asked = self.target, measure == "require", profile, self.key.gpu
        run, confirmations = partial(measuring.run_for_real, *asked), self.context.confirmations
        if confirmations is None:
            return run()
        return confirmations.of(self.request.test.name, self.key, profile, run)

    def _calibrate(self) -> CalibrationResult | None:
        """In an update, measure workspaces on this machine's GPU."""
        wanted = self.key.gpu and self.request.test.accepts & {"new", "changed"}
        if not wanted or self.request.measure == "never" or self.target.calibrate is None:
            return None
        return self.context.calibrations.measure(self.request.test.module, self.target)

    def _calibration(
        self, found: CalibrationResult | None, profile: MemoryProfile
    ) -> CalibrationResult | None:
        """Return the calibration of this check: the workspaces asked for, and measured ones."""
        if not self.key.gpu or not self.context.settings.update:
            return None
        test, found = self.request.test, found or CalibrationResult()
        questions = [*profile.questions, *(one.question for one in profile.library_answers)]
        asked = {self.key.gpu: questions}
        for gpu, others in found.asked.items():
            asked[gpu] = [*asked.get(gpu, ()), *others]
        figures = merged([found.figures, told_figures(profile)])
        return replace(
            found, figures=figures, asked=asked, file=test.relative(calibration_path(test.module))
        )


def _within_program(lines: tuple[str, ...], test: str) -> tuple[str, ...]:
    """Return the lines of a call but for the outermost one, if that is the test's."""
    is_of_test = bool(test and lines) and f"{test}:" in lines[-1]
    return lines[:-1] if is_of_test else lines


def _new_at(profile: MemoryProfile, found: Diagnosis) -> tuple[dict[int, What], int]:
    """Return the new allocations that are alive, and the events before the peak's last."""
    timeline, moment = profile.timeline, found.difference.moment
    came = {row.now for row in found.difference.came if row.now}
    at = positions_of(profile).get(moment)
    if moment == HOST:
        timeline = profile.host_timeline
        _, at = timeline.peak()
    if at is None or not came:
        return {}, 0
    lifetimes = Lifetimes.of(timeline)
    step = lifetimes.step_at(timeline, at)
    allocations = ((one, timeline.allocations[one]) for one in timeline.live_indices([at])[at])
    whats = {
        index: what_of(allocation, lifetimes.role(index, allocation, step))[0]
        for index, allocation in allocations
    }
    new = {index: what for index, what in whats.items() if what in came}
    return new, at if moment == END else max(at - 1, 0)


def _may_be_held(new: Mapping[int, What], found: Diagnosis) -> dict[int, What]:
    """Return the new allocations that something may refer to."""
    of_models = any(cause.rule in ("gradients kept", "twice") for cause in found.causes)
    at_end = found.difference.moment == END or of_models or not found.causes
    roles = (*_OF_MODELS, *_MADE) if at_end else _MADE
    return dict([(index, what) for index, what in new.items() if what.role in roles][:_MOST])
