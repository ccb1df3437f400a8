"""One check on one device: the target is traced, run for real where there is a GPU, and judged."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pytest_torchmem.checks import gpu as measuring
from pytest_torchmem.checks.calibrations import CalibrationResult, told_figures
from pytest_torchmem.checks.findings import DoesNotFit
from pytest_torchmem.checks.gpu import RealRun
from pytest_torchmem.checks.judge import Context, Judge, stored_for
from pytest_torchmem.checks.limits import Contents, contents
from pytest_torchmem.checks.request import Request, Target
from pytest_torchmem.checks.result import CheckResult
from pytest_torchmem.checks.watched import holder_of_step, watched
from pytest_torchmem.errors import UsageError
from pytest_torchmem.figures import PEAK, RESERVED
from pytest_torchmem.snapshots.calibration_store import merged
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.snapshots.location import calibration_path
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.fake_cuda.out_of_memory import OutOfMemoryError
    from pytest_torchmem.graphs.scaling import Scaling
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.targets.gpus import Gpu


@dataclass(frozen=True, slots=True)
class DeviceCheck:
    """One check on one device, both of which ``key`` names."""

    key: Key
    request: Request
    target: Target
    context: Context
    world: World | None = None
    """The process of a distributed step that is traced."""

    def run(self) -> tuple[CheckResult, MemoryProfile | None]:
        """Return the result, and the profile of the trace unless it ran out of memory."""
        __tracebackhide__ = True
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
            watch=partial(watched, self.target, self.key, self.world),
            holder=partial(holder_of_step, self.target, self.key, self.world),
        )
        return judge.judge(), profile

    def _without_limit(self, on: str | None, gpu: Gpu) -> Contents | None:
        """Trace what did not fit as if it did; ``None`` where that goes wrong as well."""
        try:
            profile = self.target.trace(self.key.device, on, self.world, memory="unlimited")
            room = gpu.memory - gpu.context
            return contents(profile, PEAK if profile.peak > room else RESERVED, room)
        except Exception:  # that it does not fit is what counts
            return None

    def _scaling(self, must_fit_on: str | None) -> Scaling | None:
        """Trace other sizes, where the test bounds how memory may grow with them."""
        __tracebackhide__ = True
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
        __tracebackhide__ = True
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
        __tracebackhide__ = True
        wanted = self.key.gpu and self.request.test.accepts & {"new", "changed"}
        if not wanted or self.request.measure == "never" or self.target.calibrate is None:
            return None
        return self.context.calibrations.measure(self.request.test.module, self.target)

    def _calibration(
        self, found: CalibrationResult | None, profile: MemoryProfile
    ) -> CalibrationResult | None:
        """Return what an update learns of this check: what it asks for, and what was measured."""
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


def _out_of_memory(error: BaseException) -> OutOfMemoryError | None:
    """Return the error of a trace that does not fit on its GPU, ``None`` for any other error."""
    # A trace that raised it has imported it; nothing here may import torch.
    module = sys.modules.get("pytest_torchmem.fake_cuda.out_of_memory")
    found: OutOfMemoryError | None = None
    if module is not None and isinstance(error, module.OutOfMemoryError):
        found = error
    return found
