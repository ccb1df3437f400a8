"""One check on one device: the target is traced, run for real where there is a GPU, and judged."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_torchmem.checks import gpu as measuring
from pytest_torchmem.checks.calibrations import CalibrationResult, told_figures
from pytest_torchmem.checks.gpu import RealRun
from pytest_torchmem.checks.judge import Context, Judge, stored_for
from pytest_torchmem.checks.request import CheckTarget, Request
from pytest_torchmem.checks.result import CheckResult, DoesNotFit, PeakContents, contents
from pytest_torchmem.errors import UsageError
from pytest_torchmem.figures import END, PEAK, RESERVED
from pytest_torchmem.profile.timeline import Lifetimes, Role
from pytest_torchmem.snapshots.alive import What, positions_of, what_of
from pytest_torchmem.snapshots.calibration import merged
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.snapshots.location import calibration_path
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.causes import Watched
    from pytest_torchmem.diagnosis.diagnose import Diagnosis, StepGrowth
    from pytest_torchmem.fake_cuda.memory import OutOfMemoryError
    from pytest_torchmem.graphs.scaling import Scaling
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.profile.timeline import Timeline
    from pytest_torchmem.targets.gpus import Gpu
    from pytest_torchmem.tracing.watch import Watch


_ATTENTION = "attention"
_KEPT = (
    *("held", "held between", "earlier steps", "gradients kept"),
    *("left", "lives longer", "graph kept", "backwards", "operators", "copy"),
)
_MADE = (Role.HELD, Role.EARLIER, Role.OTHER, Role.SAVED, Role.ACTIVATION)
_OF_MODELS = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT, Role.GRADIENT_TEMPORARY)
_ROLES = tuple(role.value for role in _MADE)
_ROLES_AT_END = tuple(role.value for role in (*_OF_MODELS, *_MADE))
_HELD = Role.HELD
_MOST = 50


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """One check on one device, both of which ``key`` names."""

    key: Key
    request: Request
    target: CheckTarget
    context: Context
    world: World | None = None
    """The process of a distributed step that is traced."""

    def run(self) -> tuple[CheckResult, MemoryProfile | None]:
        """Return the result, and the profile of the trace unless it ran out of memory."""
        request = self.request
        stored = stored_for(request, self.context)
        calibration = self._calibrate()
        must_fit_on = self.key.gpu if self.key.gpu and request.gpu_named else None
        try:
            profile = self.target.trace(self.key.device, must_fit_on, self.world)
        except BaseException as error:
            out_of_memory = _out_of_memory(error)
            if out_of_memory is None:
                raise
            found = DoesNotFit(
                error=out_of_memory, contents=self._without_limit(must_fit_on, out_of_memory.gpu)
            )
            return CheckResult(self.key, (found,)), None
        request.test.on_profile(request.name, profile)
        judge = Judge(
            request,
            self.context,
            key=self.key,
            profile=profile,
            stored=stored,
            run=self._run_for_real(profile) if profile.peak else None,
            calibration=self._calibration(calibration, profile),
            scaling=self._scaling(must_fit_on),
            watch=self.watched,
            holder=self.holder,
        )
        return judge.judge(), profile

    def watched(self, profile: MemoryProfile, found: Diagnosis) -> Watched | None:
        """Trace the target again for details of the findings; errors of this trace are ignored."""
        rules = {cause.rule for cause in found.causes}
        row = found.leading_row
        kept = bool(rules.intersection(_KEPT)) or (row is not None and row.what.role == _HELD)
        kept = kept or _is_of_models(found)
        if not kept and _ATTENTION not in rules:
            return None
        whats, at = _kept_at(profile, found) if kept else ({}, 0)
        watch = self._watch(profile.timeline, whats, at, _ATTENTION in rules)
        if watch is None:
            return None
        from pytest_torchmem.diagnosis.causes import Watched

        named: dict[What, list[str]] = {}
        for index in sorted(watch.holders):
            named.setdefault(whats[index], []).append(watch.holders[index])
        holders = {what: max(own, key=own.count) for what, own in named.items()}
        reasons = {line: reason for line, reason in watch.attention.items() if reason}
        savers = {whats[index]: saver for index, saver in watch.savers.items()}
        return Watched(reasons, holders, savers, kept)

    def holder(self, profile: MemoryProfile, found: StepGrowth) -> str:
        """Trace again and return what refers to a step's largest tensor, "" if unknown."""
        timeline = profile.timeline
        largest = sorted(found.made, key=lambda index: -timeline.allocations[index].nbytes)[:_MOST]
        watch = self._watch(timeline, largest, found.end) if largest else None
        if watch is None:
            return ""
        savers = {
            index: f"the graph of {function}, which saves it at {line}"
            for index, (function, line) in watch.savers.items()
        }
        named = savers | watch.holders
        return next((named[index] for index in largest if index in named), "")

    def _watch(
        self, timeline: Timeline, indices: Iterable[int], at: int, attention: bool = False
    ) -> Watch | None:
        """Trace the target again, and see what refers to allocations after ``at`` events.

        Looked at is before what is made next, at the end where nothing is.
        """
        from pytest_torchmem.tracing.watch import watching

        wanted = {index: timeline.allocations[index].nbytes for index in indices}
        before = next((event - 1 for event in timeline.events[at:] if event > 0), -1)
        key = self.key
        try:
            with watching(key.device, wanted, before, attention=attention) as watch:
                self.target.trace(key.device, key.gpu or None, self.world, memory="unlimited")
        except Exception:  # the first trace is the one that counts
            return None
        return watch

    def _without_limit(self, on: str | None, gpu: Gpu) -> PeakContents | None:
        """Trace what did not fit as if it did; ``None`` where that goes wrong as well."""
        try:
            profile = self.target.trace(self.key.device, on, self.world, memory="unlimited")
            room = gpu.memory - gpu.context
            return contents(profile, PEAK if profile.peak > room else RESERVED, room)
        except Exception:  # that it does not fit is what counts
            return None

    def _scaling(self, must_fit_on: str | None) -> Scaling | None:
        """Trace other sizes, where the test bounds how memory may grow with them."""
        names = [bound.size for bound in self.request.bounds]
        if not names:
            return None
        if self.target.scale is None:
            raise UsageError(
                "scaling= needs the step and its inputs, to trace other sizes of them: use the "
                "fixture, def test(torchmem), and in it torchmem.check(model, x)"
            )
        return self.target.scale(self.key.device, must_fit_on, self.world, names)

    def _run_for_real(self, profile: MemoryProfile) -> RealRun | None:
        """Run the step on this machine's GPU, where there is one and nobody forbids it."""
        measure = self.request.measure
        if not self.key.gpu or measure == "never":
            return None
        required, confirmations = measure == "require", self.context.confirmations

        def run() -> RealRun | None:
            return measuring.run_for_real(self.target, required, profile, self.key.gpu)

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


def _is_of_models(found: Diagnosis) -> bool:
    """Tell whether parameters or gradients grew for no cause that is known yet."""
    row = found.leading_row
    return not found.causes and row is not None and row.what.role in _OF_MODELS


def _kept_at(profile: MemoryProfile, found: Diagnosis) -> tuple[dict[int, What], int]:
    """Return the new allocations that may be referred to, and the events before the peak's last."""
    timeline, moment = profile.timeline, found.difference.moment
    gradients = any(cause.rule == "gradients kept" for cause in found.causes)
    roles = _ROLES_AT_END if moment == END or gradients or _is_of_models(found) else _ROLES
    came = {row.now for row in found.difference.came if row.now and row.now.role in roles}
    at = positions_of(profile).get(moment)
    if at is None or not came:
        return {}, 0
    lifetimes = Lifetimes.of(timeline)
    step = lifetimes.step_at(timeline, at)
    whats: dict[int, What] = {}
    for index in timeline.live_indices([at])[at]:
        allocation = timeline.allocations[index]
        what = what_of(allocation, lifetimes.role(index, allocation, step))[0]
        if what in came and len(whats) < _MOST:
            whats[index] = what
    return whats, max(at - 1, 0)


def _out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Return the error of a trace that does not fit on its GPU, ``None`` for any other error."""
    # A trace that raised it has imported it; nothing here may import torch.
    module = sys.modules.get("pytest_torchmem.fake_cuda.memory")
    found: OutOfMemoryError | None = None
    if module is not None and isinstance(error, module.OutOfMemoryError):
        found = error
    return found
