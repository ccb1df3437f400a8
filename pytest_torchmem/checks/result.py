"""What a judge can find, whether figures keep to a budget, and the result of a check on one device.

A finding is data; reports make sentences of it. A result travels from a worker to the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from pytest_torchmem.checks.gpu import CalibrationResult, Measurement, RealRun
from pytest_torchmem.checks.request import Bound, Budget, Limit
from pytest_torchmem.figures import ALLOCATOR_PEAKS, HOST, PEAK, RESERVED
from pytest_torchmem.printable import counted
from pytest_torchmem.profile.facts import IN_MODE, Calls, Topic
from pytest_torchmem.profile.timeline import Allocation, Role
from pytest_torchmem.snapshots.alive import alive_of
from pytest_torchmem.snapshots.compare import Change, Comparison, compare
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.tolerance import BUILT_IN, Level, for_path
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.causes import Watched
    from pytest_torchmem.diagnosis.diagnose import Diagnosis, StepGrowth
    from pytest_torchmem.fake_cuda.memory import OutOfMemoryError
    from pytest_torchmem.profile.profile import MemoryProfile


_MOST_CALLS = 10_000
"""Of a step that is traced again with changes: a failure is to come within seconds."""
_MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Overrun:
    """A limit that was not kept; ``value`` is ``None`` where the phase did not run."""

    limit: Limit
    value: int | None


@dataclass(frozen=True, slots=True)
class Less:
    """A change of the step that lowers a peak, traced."""

    change: str
    saved: int
    flops: int
    """The operations that it costs, and ``of`` all those of the step."""
    of: int


@dataclass(frozen=True, slots=True)
class PeakContents:
    """The allocations at a peak over the limit, and changes that would lower it."""

    figure: str
    nbytes: int
    excess: int
    """The bytes that would have to go."""
    diagnosis: Diagnosis
    """What came since the snapshot, if that kept to the limit; else what is alive, as if all of it
    had come, and what leads to the largest that can go.
    """
    holder: str
    """What refers to that, "" if unknown."""
    called: str
    """In words that a model is called, with gradients, more often than there are backwards, ""
    otherwise.
    """
    less: Less | None = None
    since: Comparison | None = None
    """How that is to the snapshot which kept to the limit."""


Watching = Callable[["MemoryProfile", "Diagnosis"], "Watched | None"]
WithCode = Callable[["Diagnosis", "Watched | None", "Entry | None"], "Diagnosis"]


def contents(
    now: Entry,
    profile: MemoryProfile,
    limit: Limit,
    before: Entry | None,
    watched: Watching,
    with_code: WithCode,
) -> PeakContents | None:
    """Return what is alive at the moment of a limit's figure, ``None`` where unknown: what came
    since an entry that kept to it, if there is one.

    ``watched`` traces again, and ``with_code`` adds the code that changed.
    """
    figures, alive, figure = profile.figures(), alive_of(profile), limit.figure
    same = (one for one in alive.moments if figures[one] == figures[PEAK])
    moment = figure if figure in alive.moments else next(same, None)
    if moment is None:
        return None
    from pytest_torchmem.diagnosis.causes import GRAPH
    from pytest_torchmem.diagnosis.diagnose import all_of, diagnose

    if before is not None and overruns([limit], before.figures):
        before = None

    def find(seen: Watched | None = None) -> Diagnosis:
        if before is None:
            return all_of(now, alive, moment, profile, seen)
        grew = before.figures.get(moment, figures[moment]) < figures[moment]
        return diagnose(before, now, moment if grew else figure, alive, profile, seen)

    found, holder = find(), ""
    if (seen := watched(profile, found)) is not None:
        found = find(seen)
    found = with_code(found, seen, before)
    row = found.leading_row  # which may be one of code that changed
    if seen is not None and row is not None:
        holder = seen.holders.get(row.what, "")
        if row.what.role in (Role.PARAMETER, Role.BUFFER, Role.GRADIENT):  # of a model
            _, within, container = holder.partition(" in the ")
            holder = f"the {container}" if within else ""
    nbytes = figures.get(figure, figures[PEAK])
    excess = nbytes - limit.nbytes
    less = _less(profile, figure, excess)
    since = compare(before, now, [BUILT_IN]) if before is not None else None
    is_graph = holder.startswith(GRAPH) or (row is not None and row.what.role == Role.SAVED)
    called = _called(now, is_graph=is_graph)
    return PeakContents(figure, nbytes, excess, found, holder, called, less, since)


def _called(now: Entry, *, is_graph: bool) -> str:
    """Return in words that a model is called more often than there are backwards, "" otherwise."""
    backwards = now.facts.get(Topic.BACKWARD, {}).get("calls", Calls()).number
    found, layers = now.facts.get(Topic.CALLS, {}), now.facts.get(Topic.LAYERS, {})
    without = {*now.facts.get(Topic.FROZEN, {})}
    modes = now.facts.get(Topic.MODES, {})
    without |= {path for path in modes if any(one.name == "no_grad" for one in modes[path])}
    without |= {module for module in found if IN_MODE.format("no_grad", module) in found}
    for module, calls in found.items():
        has_layers = any(one.startswith(f"{module}.") for one in layers)
        if not backwards and has_layers and module not in without:
            return f"{module} runs with gradients, and there is no backward"
        if is_graph and calls.number > backwards > 0:
            times = counted(calls.number, "call")
            return f"{module} has {times} and {counted(backwards, 'backward')}"
    return ""


def _less(profile: MemoryProfile, figure: str, excess: int) -> Less | None:
    """Return the modules to checkpoint: enough at the fewest operations, or else saving most."""
    calls = profile.calls or ()
    if profile.advised is None or len(calls) > _MOST_CALLS:
        return None
    before, of = profile.figures().get(figure, 0), sum(call.work.flops for call in calls)
    try:
        suggested = profile.advised(profile, None, _MOST_CHANGES)
    except Exception:  # the step as it is is what counts
        return None
    found = [
        Less(one.change, before - one.profile.figures().get(figure, before), one.flops, of)
        for one in suggested
    ]
    enough = [one for one in found if one.saved >= excess]
    best = min(enough, key=lambda one: one.flops, default=None)
    best = best or max(found, key=lambda one: one.saved, default=None)
    return best if best is not None and best.saved > 0 else None


def limits_of(
    budget: Budget, gpu: str, figures: Mapping[str, int], rules: Level, path: str
) -> list[Limit]:
    """Return the limits of ``budget``, and of ``rules`` for figures that it does not limit.

    On the CPU, where ``gpu`` is "", there is no caching allocator. A GPU that is named alone limits
    what is reserved on it.
    """
    limits = [one for one in budget.limits if gpu or one.figure not in ALLOCATOR_PEAKS]
    if gpu and not budget.limits and budget.gpu is not None:
        room = _room(gpu)
        limits.append(Limit(RESERVED, room, f"{format_size(room)} (what {gpu} has for tensors)"))
    limited = {limit.figure for limit in limits}
    for level in for_path(rules, path):
        for rule in sorted(level, key=lambda rule: rule.device is None):
            figure = rule.figure or PEAK
            known = figure in figures and figure not in limited
            if known and rule.fits("cuda" if gpu else "cpu", figure):
                limited.add(figure)
                limits.append(Limit(figure, rule.tolerance.allowance(0), str(rule)))
    return limits


def overruns(limits: Iterable[Limit], figures: Mapping[str, int]) -> list[Overrun]:
    """Return the limits that ``figures`` do not keep.

    A limit on a phase that did not run is not kept: nothing was checked. On the CPU, that of the
    peak is for all of the host's memory, whatever it is that allocates it.
    """
    found, on_cpu = [], RESERVED not in figures
    for limit in limits:
        if limit.figure == PEAK and on_cpu and HOST in figures:
            limit = replace(limit, figure=HOST)
        value = figures.get(limit.figure)
        if value is None and limit.figure == HOST:
            value = figures.get(PEAK) if on_cpu else 0
        if value is None and limit.figure in ALLOCATOR_PEAKS:
            value = figures.get(PEAK)
        if value is None or value > limit.nbytes:
            found.append(Overrun(limit, value))
    return found


def _room(gpu: str) -> int:
    found = find_gpu(gpu)
    return found.memory - found.context


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
    diagnosis: Diagnosis | None = None
    """What stays after the step that grew most, and the code that changed."""
    holder: str = ""
    """What refers to the largest tensor that a step left alive, as far as that can be told."""
    on_host: bool = False
    """Whether it is the host's memory that grows beside a GPU's."""


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


AT_MOST = ", at most, by guessed values"
ACCEPTED = (Outcome.NEW, Outcome.UPDATED)
"""The outcomes of checks of which an update writes the entry."""


@dataclass(frozen=True, slots=True)
class TraceResult:
    """What the check takes of a profile; nothing where nothing was traced."""

    figures: Mapping[str, int] = field(default_factory=dict)
    torch: str = ""
    """The version without its build, so that it is the same for cpu and cuda wheels."""
    workload: str = ""
    warnings: tuple[str, ...] = ()
    unknown_workspaces: tuple[str, ...] = ()
    """Operators whose workspace is not counted; one of the warnings names them too."""
    calibrated_workspaces: tuple[str, ...] = ()
    library_workspaces: tuple[str, ...] = ()
    cudnn: str = ""
    """The version of cuDNN that told it."""
    cudnn_before: str = ""
    """The version whose answers are stored beside the snapshot."""
    workspaces: Mapping[str, int] = field(default_factory=dict)
    """Bytes that libraries decide on at the peak, by how sure they are."""
    headroom: int | None = None
    """What the GPU has left beyond the reserved peak; ``None`` where no GPU is named."""
    guessed: bool = False
    """Whether values that are not known decided sizes: figures are at most these."""
    not_counted: tuple[str, ...] = ()

    @classmethod
    def of(cls, profile: MemoryProfile, gpu: str, cudnn_before: str) -> TraceResult:
        """Return what there is for a profile, with the headroom on ``gpu`` unless that is ""."""
        figures = profile.figures()
        return cls(
            figures=figures,
            torch=profile.torch_version.partition("+")[0],
            workload=profile.workload,
            # A check in which nothing was allocated fails, and says so itself.
            warnings=profile.warnings if profile.peak else (),
            unknown_workspaces=profile.unknown_workspaces,
            calibrated_workspaces=profile.calibrated_workspaces,
            library_workspaces=profile.library_workspaces,
            cudnn=max((one.version for one in profile.library_answers if one.version), default=""),
            cudnn_before=cudnn_before,
            workspaces=profile.by_confidence(),
            headroom=_room(gpu) - figures.get(RESERVED, figures.get(PEAK, 0)) if gpu else None,
            guessed=profile.values == "guessed",
            not_counted=profile.not_counted,
        )


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """How a check stands to its snapshot."""

    file: str
    entry: Entry
    comparison: Comparison | None = None
    """``None`` where the snapshot had no entry."""
    before: Entry | None = None
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check on one device; parts that it did not come to are ``None`` or empty."""

    key: Key
    findings: tuple[Finding, ...] = ()
    trace: TraceResult = field(default_factory=TraceResult)
    snapshot: SnapshotResult | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    measurement: Measurement | None = None
    calibration: CalibrationResult | None = None

    @property
    def failed(self) -> bool:
        return any(finding.fails for finding in self.findings)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the first finding that fails, else of the first."""
        by_weight = sorted(self.findings, key=lambda finding: not finding.fails)
        return by_weight[0].outcome if by_weight else Outcome.PASSED

    @property
    def told(self) -> str:
        """The outcome, and whether guessed values make the figures upper bounds."""
        return f"{self.outcome.value}{AT_MOST if self.trace.guessed else ''}"

    @property
    def accepted(self) -> bool:
        """Whether an update may write the snapshot's entry, once the test has passed."""
        return self.outcome in ACCEPTED

    @property
    def figures(self) -> Mapping[str, int]:
        return self.trace.figures

    @property
    def comparison(self) -> Comparison | None:
        return self.snapshot.comparison if self.snapshot is not None else None

    @property
    def diagnosis(self) -> Diagnosis | None:
        return self.snapshot.diagnosis if self.snapshot is not None else None

    @property
    def changes(self) -> tuple[Change, ...]:
        return self.comparison.changes if self.comparison is not None else ()

    def unchecked(self) -> CheckResult:
        """Return this result for what was not checked, and need not be."""
        return replace(self, findings=(Finding(outcome=Outcome.NOT_CHECKED, fails=False),))

    def light(self, *, explained: bool = True) -> CheckResult:
        """Return this result without what only messages need: whole profiles hang on that.

        Unless ``explained``, the entry of a check that passes and is not to be written has its
        figures alone.
        """
        findings = (Finding(outcome=one.outcome, fails=one.fails) for one in self.findings)
        snapshot = self.snapshot
        if snapshot is not None and not (explained or self.failed or self.accepted):
            before = snapshot.before.unexplained() if snapshot.before is not None else None
            snapshot = replace(snapshot, entry=snapshot.entry.unexplained(), before=before)
        return replace(self, findings=tuple(findings), snapshot=snapshot)
