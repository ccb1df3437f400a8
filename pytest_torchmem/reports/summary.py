"""What a run found: as the reports show it, and as properties of the tests.

Properties are what JUnit files show, and what xdist carries along.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_torchmem.checks.request import Settings
from pytest_torchmem.checks.result import CheckResult, Outcome
from pytest_torchmem.snapshots.calibration import CalibrationPlan
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.snapshots.location import relative
from pytest_torchmem.snapshots.store import FilePlan, SnapshotPlan


@dataclass(frozen=True, slots=True)
class Check:
    """A result with its text, and what became of its test."""

    nodeid: str
    location: tuple[str, int]
    """The file, relative to the root, and the line that reports point at."""
    result: CheckResult
    message: str = ""
    advice: str = ""
    """What to do about it, often the same for several devices."""
    notice: str = ""
    """Why nothing was checked, told once of all tests: "allocated nothing on cuda (h100)"."""
    passed: bool = False
    """The whole test passed."""
    failed_by_check: bool = False
    unwritten: bool = False
    """Its file could not be written."""
    broke_off: bool = False
    """The step raised, so that there is no result."""

    @property
    def device(self) -> str:
        """The device as people read it, "-" where the check did not come to one."""
        return self.result.key.where or "-"

    @property
    def name(self) -> str:
        name = self.result.key.name
        return f"{self.nodeid} · {name}" if name else self.nodeid

    @property
    def is_left_out(self) -> bool:
        """Whether nothing was judged, and nothing failed for it."""
        is_idle = self.result.outcome is Outcome.NOT_CHECKED and not self.result.failed
        return is_idle and (self.passed or not self.broke_off)

    @property
    def headline(self) -> str:
        """Return a message's first sentence on one line, without the device before it."""
        first = self.message.partition("\n")[0]
        _, _, said = first.partition(": ")
        return said or first


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that the reports of a run show."""

    settings: Settings
    root: Path
    """pytest's root directory."""
    checks: tuple[Check, ...] = ()
    plans: tuple[SnapshotPlan, ...] = ()
    obsolete: tuple[tuple[str, Key], ...] = ()
    """Entries whose test or name is gone, with their file, where they were not removed."""
    problems: tuple[str, ...] = ()
    proposal: tuple[str, ...] = ()
    """The files written for people to take over from CI."""
    orphans: frozenset[str] = frozenset()
    """The files whose test module is gone."""
    hints: tuple[str, ...] = ()
    """Tests that look renamed, where that could not be decided."""
    calibrations: tuple[CalibrationPlan, ...] = ()
    """Calibration files as an update made them, or in a dry run would make them."""

    @property
    def not_checked(self) -> dict[str, dict[str, Check]]:
        """The tests whose checks judged nothing and failed nothing, by why that was: each with the
        first of these checks. Of a test whose failure pytest shows anyway nothing more is said.
        """
        found: dict[str, dict[str, Check]] = {}
        for check in self.checks:
            if check.notice and check.is_left_out:
                found.setdefault(check.notice, {}).setdefault(check.nodeid, check)
        return found

    @property
    def every_plan(self) -> tuple[FilePlan[Any, Any], ...]:
        """What was done with snapshot and with calibration files."""
        return (*self.plans, *self.calibrations)

    def file_of(self, plan: FilePlan[Any, Any]) -> str:
        """Return the file of a plan, relative to the root with ``/``."""
        return relative(plan.stored.path, self.root)


PREFIX = "torchmem."
SAID_OF_TRACES = (
    *("calibrated_workspaces", "library_workspaces", "unknown_workspaces"),
    "not_counted",
)


def properties(check: Check) -> list[tuple[str, object]]:
    """Return a check's properties: ``torchmem.<name>.<device>[.<rank>].<figure>``, in bytes."""
    result = check.result
    key, trace = result.key, result.trace
    found: dict[str, object] = {"outcome": result.told}
    if result.outcome is Outcome.NOT_CHECKED:
        found["reason"] = check.headline
    if key.gpu:
        found["gpu"] = key.gpu
    found |= result.figures
    before = {change.figure: change.before for change in result.changes}
    found |= {f"{name}.snapshot": size for name, size in before.items() if size is not None}
    measured = result.measurement.figures if result.measurement is not None else {}
    found |= {f"{name}.measured": size for name, size in measured.items()}
    found |= {f"{name}.limit": size for name, size in result.limits.items()}
    lists = {name: ", ".join(getattr(trace, name)) for name in SAID_OF_TRACES}
    found |= {name: names for name, names in lists.items() if names}
    if trace.library_workspaces:
        found["cudnn"] = trace.cudnn
    rank = f"rank {key.rank} of {key.world_size}" if key.world_size else ""
    stem = PREFIX + "".join(f"{part}." for part in (key.name, key.device, rank) if part)
    return [(f"{stem}{name}", value) for name, value in found.items()]
