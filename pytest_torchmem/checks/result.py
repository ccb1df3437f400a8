"""The result of one check on one device, as it travels from a worker to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pytest_torchmem.checks.calibrations import CalibrationResult
from pytest_torchmem.checks.findings import Finding, Outcome
from pytest_torchmem.checks.gpu import Measurement
from pytest_torchmem.snapshots.compare import Change, Comparison
from pytest_torchmem.snapshots.format import Entry, Key

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.diagnose import Diagnosis
    from pytest_torchmem.profile.profile import MemoryProfile

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
    """Operators whose workspace comes from a calibration."""
    library_workspaces: tuple[str, ...] = ()
    """Operators whose workspace cuDNN told."""
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
    """What takes memory of the GPU and is in no figure."""

    @classmethod
    def of(
        cls, profile: MemoryProfile, headroom: int | None, cudnn_before: str = ""
    ) -> TraceResult:
        """Return what a check takes of ``profile``."""
        return cls(
            figures=profile.figures(),
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
            headroom=headroom,
            guessed=profile.values == "guessed",
            not_counted=profile.not_counted,
        )


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """How a check stands to its snapshot."""

    file: str
    """The snapshot file, relative to the root with ``/``."""
    entry: Entry
    """What the snapshot would hold now."""
    comparison: Comparison | None = None
    """``None`` where the snapshot had no entry."""
    before: Entry | None = None
    """The snapshot's entry."""
    diagnosis: Diagnosis | None = None
    """What grew and why, where a figure grew beyond its tolerance."""


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
        """Whether the check fails."""
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
        """The traced figures, none where nothing was traced."""
        return self.trace.figures

    @property
    def comparison(self) -> Comparison | None:
        """The comparison with the snapshot, ``None`` where there was none."""
        return self.snapshot.comparison if self.snapshot is not None else None

    @property
    def changes(self) -> tuple[Change, ...]:
        """How the traced figures stand to the snapshot's."""
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
