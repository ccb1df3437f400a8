"""What one check on one device came to, as it travels from a worker to the controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from pytest_torchmem.snapshots.calibration_format import dump, load
from pytest_torchmem.snapshots.compare import Change, Comparison, Verdict
from pytest_torchmem.snapshots.format import MEASURED, Entry, Key, Measured, entry_from_plain
from pytest_torchmem.targets.calibration import Figures, Question

if TYPE_CHECKING:
    from pytest_torchmem.profile.timeline import Allocation

_TUPLES = ("warnings", "unknown_workspaces", "calibrated_workspaces", "grew")


class Outcome(str, Enum):
    """What a check on one device came to."""

    PASSED = "passed"
    SHRANK = "shrank"
    NEW = "new"
    UPDATED = "updated"
    GREW = "grew"
    MISSING = "no snapshot"
    OVER_BUDGET = "over budget"
    UNKNOWN_BYTES = "unknown bytes"
    ESTIMATE_OFF = "estimate off"
    """A real GPU counted something else than the trace for it."""
    MEASURED_GREW = "measured grew"
    """The trace is as it was, and a real GPU counted more than its snapshot has."""
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same step run on the real GPU of this machine, beside what a trace says of that GPU."""

    gpu: str
    """The GPU's name in the catalogue, or of its own where the catalogue does not have it."""
    torch: str = ""
    figures: dict[str, int] = field(default_factory=dict)
    """What the GPU counted."""
    estimate: dict[str, int] = field(default_factory=dict)
    """What a trace for that GPU gives."""
    changes: tuple[Change, ...] = ()
    """How what was counted stands to the snapshot; empty where that GPU is not in it."""
    not_measured: str = ""
    """Why the step was not run there, as where it does not fit."""

    def to_plain(self) -> dict[str, Any]:
        """Return this measurement of builtin types."""
        plain = asdict(replace(self, changes=()))
        return {**plain, "changes": _plain_changes(self.changes)}


@dataclass(frozen=True, slots=True)
class RealRun:
    """What came of running a check on the real GPU."""

    measurement: Measurement
    only_measured: tuple[tuple[int, int], ...] = ()
    """Sizes in bytes, and how many of each are alive at the GPU's peak and not at the trace's."""
    only_traced: tuple[Allocation, ...] = ()
    """What is alive at the trace's peak and has no counterpart of its size at the GPU's."""
    unknown_workspaces: tuple[str, ...] = ()
    """Operators whose workspace the estimate leaves out."""

    @property
    def entry(self) -> dict[str, Measured]:
        """What a snapshot's entry holds of it: nothing where nothing was measured."""
        found = self.measurement
        if not found.figures:
            return {}
        figures = {name: found.figures[name] for name in MEASURED if name in found.figures}
        return {found.gpu: Measured(found.torch, figures)}


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What one check asks of GPUs' kernels, and what this machine's GPU said."""

    figures: Figures = field(default_factory=dict)
    """What an update writes of it."""
    asked: Mapping[str, Sequence[Question]] = field(default_factory=dict)
    """The workspaces that no formula gives, by the GPU that a trace stood for."""
    unanswered: tuple[str, ...] = ()
    """Operators that were asked about, and did not run there with the same arguments."""
    not_calibrated: str = ""
    """Why the step was not run there, as where it does not fit."""
    file: str = ""
    """The calibration file, relative to the root with ``/``."""

    def to_plain(self) -> dict[str, Any]:
        """Return this of builtin types."""
        return {
            "figures": dump(self.figures),
            "asked": {
                gpu: [[question.operator, question.geometry] for question in questions]
                for gpu, questions in self.asked.items()
            },
            "unanswered": list(self.unanswered),
            "not_calibrated": self.not_calibrated,
            "file": self.file,
        }


def calibrated_from_plain(plain: dict[str, Any]) -> Calibrated:
    """Return what ``Calibrated.to_plain`` gave."""
    asked = {
        gpu: tuple(Question(operator, geometry) for operator, geometry in found)
        for gpu, found in plain["asked"].items()
    }
    unanswered = tuple(plain["unanswered"])
    given = {**plain, "figures": load(plain["figures"]), "asked": asked, "unanswered": unanswered}
    return Calibrated(**given)


@dataclass(frozen=True, slots=True)
class Record:
    """One check on one device. ``to_plain`` gives builtin types only: xdist sends nothing else."""

    nodeid: str
    file: str
    """The snapshot file, relative to the root with ``/``; empty where the check has none."""
    key: Key
    outcome: Outcome
    failed: bool = False
    figures: dict[str, int] = field(default_factory=dict)
    entry: Entry | None = None
    """What the snapshot would hold now; ``None`` where the check has no snapshot."""
    accepted: bool = False
    """An update may write ``entry``, once the test has passed."""
    changes: tuple[Change, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    headroom: int | None = None
    """What the GPU has left beyond the reserved peak; ``None`` where no GPU is named."""
    torch: str = ""
    torch_before: str = ""
    workload_changed: bool = False
    warnings: tuple[str, ...] = ()
    unknown_workspaces: tuple[str, ...] = ()
    """Operators whose kernels take what is not counted; one of the warnings names them too."""
    calibrated_workspaces: tuple[str, ...] = ()
    """Operators of whose kernels it was measured what they take."""
    workspaces: dict[str, int] = field(default_factory=dict)
    """Bytes that libraries decide on at the peak, by how sure they are."""
    grew: tuple[dict[str, Any], ...] = ()
    """The modules and operators that grew, with their source lines."""
    measurement: Measurement | None = None
    """The run on a real GPU; ``None`` where there was none to try."""
    calibration: Calibrated | None = None
    """What an update learns of GPUs' kernels; ``None`` without one."""
    message: str = ""
    advice: str = ""
    """What to do about it, often the same for several devices."""
    location: tuple[str, int] = ("", 0)
    """The file, relative to the root, and the line that reports point at."""

    def with_comparison(self, comparison: Comparison) -> Record:
        """Return this record with what a comparison found."""
        return replace(
            self,
            changes=comparison.changes,
            torch_before=comparison.torch_before,
            workload_changed=comparison.workload_changed,
        )

    def change(self, figure: str) -> Change | None:
        """Return how ``figure`` changed, ``None`` where nothing was compared."""
        return next((change for change in self.changes if change.figure == figure), None)

    def to_plain(self) -> dict[str, Any]:
        """Return this record of builtin types."""
        plain = asdict(replace(self, entry=None, changes=(), measurement=None, calibration=None))
        plain["outcome"] = self.outcome.value
        plain["entry"] = self.entry.to_plain() if self.entry is not None else None
        plain["changes"] = _plain_changes(self.changes)
        if self.measurement is not None:
            plain["measurement"] = self.measurement.to_plain()
        if self.calibration is not None:
            plain["calibration"] = self.calibration.to_plain()
        plain["location"] = list(self.location)
        for name in _TUPLES:
            plain[name] = list(plain[name])
        return plain


def record_from_plain(plain: dict[str, Any]) -> Record:
    """Return the record that ``Record.to_plain`` gave."""
    told = plain["measurement"]
    if told is not None:
        told = Measurement(**{**told, "changes": _changes(told["changes"])})
    asked = plain["calibration"]
    return Record(
        **{
            **plain,
            "key": Key(**plain["key"]),
            "outcome": Outcome(plain["outcome"]),
            "entry": entry_from_plain(plain["entry"]) if plain["entry"] is not None else None,
            "changes": _changes(plain["changes"]),
            "measurement": told,
            "calibration": calibrated_from_plain(asked) if asked is not None else None,
            **{name: tuple(plain[name]) for name in _TUPLES},
            "location": (plain["location"][0], plain["location"][1]),
        }
    )


def _plain_changes(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [{**asdict(change), "verdict": change.verdict.value} for change in changes]


def _changes(plain: Iterable[dict[str, Any]]) -> tuple[Change, ...]:
    return tuple(Change(**{**change, "verdict": Verdict(change["verdict"])}) for change in plain)
