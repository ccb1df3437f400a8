"""What a judge can find. A finding is data; reports make sentences of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from pytest_torchmem.checks.gpu import RealRun
from pytest_torchmem.checks.limits import Overrun, PeakContents
from pytest_torchmem.checks.request import Bound
from pytest_torchmem.snapshots.compare import Change, Comparison
from pytest_torchmem.snapshots.format import Key

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.diagnose import Diagnosis
    from pytest_torchmem.diagnosis.steps import StepGrowth
    from pytest_torchmem.fake_cuda.memory import OutOfMemoryError
    from pytest_torchmem.profile.timeline import Allocation


class Outcome(str, Enum):
    """How a check on one device ended."""

    PASSED = "passed"
    SHRANK = "shrank"
    NEW = "new"
    UPDATED = "updated"
    GREW = "grew"
    MISSING = "no snapshot"
    OVER_BUDGET = "over budget"
    UNKNOWN_WORKSPACE = "unknown bytes"
    ESTIMATE_OFF = "estimate off"
    """The trace for a real GPU and the measurement on it disagree."""
    MEASURED_GREW = "measured grew"
    """The trace is as it was, and the measurement is larger than the snapshot's."""
    NOT_CHECKED = "not checked"
    """The target used no memory of the device, or it raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a check found, and the outcome where this is what decides it."""

    outcome: Outcome
    fails: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(Finding):
    """Figures grew or shrank beyond their tolerance, or a phase of the snapshot did not run."""

    comparison: Comparison
    diagnosis: Diagnosis | None = None
    """What grew and why, where a peak did."""
    measured_on: str = ""
    """The real GPU, where it is not the trace that changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboveCap(Finding):
    """Figures grew by more than an update may accept."""

    outcome: Outcome = Outcome.GREW
    changes: tuple[Change, ...]
    cap: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing(Finding):
    """The snapshot has no entry for this check."""

    outcome: Outcome = Outcome.MISSING
    file: str
    renamed: Key | None = None
    """An entry of the file whose test is gone, for the same workload."""
    moved_from: str = ""
    """A snapshot file without a test module that has this very check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverBudget(Finding):
    """Limits were not kept."""

    outcome: Outcome = Outcome.OVER_BUDGET
    overruns: Sequence[Overrun]
    contents: PeakContents | None = None
    """What was alive at the peak, where it is known."""
    measured_on: str = ""
    """The real GPU, where it is not a trace that is over budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowsFaster(Finding):
    """The peak grows with a higher power of a size than it may."""

    outcome: Outcome = Outcome.OVER_BUDGET
    bound: Bound
    power: int
    polynomial: str
    fastest: Sequence[Allocation]
    """What grows with that power, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks(Finding):
    """Memory grows from step to step by more than it may."""

    outcome: Outcome = Outcome.OVER_BUDGET
    growth: StepGrowth
    allowed: str
    holder: str = ""
    """What refers to the largest tensor that a step left alive, as far as that can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit(Finding):
    """The GPU to model has too little memory."""

    outcome: Outcome = Outcome.OVER_BUDGET
    error: OutOfMemoryError
    contents: PeakContents | None = None
    """What the step has at its peak where memory is unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOff(Finding):
    """The trace for a real GPU and the measurement on it disagree by more than ``most``."""

    outcome: Outcome = Outcome.ESTIMATE_OFF
    run: RealRun
    peaks: Sequence[str]
    most: str
