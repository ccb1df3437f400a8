"""What a run found: as the reports show it, as properties of the tests, and as the JSON report.

Properties are what JUnit files show, and what xdist carries along; ``docs/report.schema.json``
describes the JSON report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchmem.checks.request import Settings
from pytest_torchmem.checks.result import CheckResult, Outcome, SnapshotResult
from pytest_torchmem.reports import growth
from pytest_torchmem.snapshots.calibration import CalibrationPlan
from pytest_torchmem.snapshots.format import Entry, Key, alive_to_plain, merged
from pytest_torchmem.snapshots.location import relative
from pytest_torchmem.snapshots.store import FilePlan, SnapshotPlan

if TYPE_CHECKING:
    from pytest_torchmem.checks.gpu import Measurement
    from pytest_torchmem.diagnosis.causes import Cause
    from pytest_torchmem.diagnosis.difference import Row
    from pytest_torchmem.snapshots.compare import Change


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
        """The test, and the name of the check if it has one."""
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
        first = " ".join(self.message.partition("\n\n")[0].split())
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
    def not_checked(self) -> dict[str, list[Check]]:
        """The checks that judged nothing and failed nothing, by why that was.

        Of a test whose failure pytest shows anyway nothing more is said.
        """
        found: dict[str, list[Check]] = {}
        for check in self.checks:
            if check.notice and check.is_left_out:
                found.setdefault(check.notice, []).append(check)
        return found

    @property
    def every_plan(self) -> tuple[FilePlan[Any, Any], ...]:
        """What was done with snapshot and with calibration files."""
        return (*self.plans, *self.calibrations)

    def file_of(self, plan: FilePlan[Any, Any]) -> str:
        """Return the file of a plan, relative to the root with ``/``."""
        return relative(plan.stored.path, self.root)


def explained(snapshot: SnapshotResult) -> Entry:
    """Return what a snapshot is to hold now, with why it grew, if that is known."""
    found = snapshot.diagnosis
    return replace(snapshot.entry, grew=growth.told(found) if found is not None else ())


PREFIX = "torchmem."


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
    if result.measurement is not None:
        figures = result.measurement.figures
        found |= {f"{name}.measured": size for name, size in figures.items()}
    found |= {f"{name}.limit": size for name, size in result.limits.items()}
    lists = ("calibrated_workspaces", "library_workspaces", "unknown_workspaces", "not_counted")
    found |= {name: ", ".join(getattr(trace, name)) for name in lists if getattr(trace, name)}
    if trace.library_workspaces:
        found["cudnn"] = trace.cudnn
    rank = f"rank {key.rank} of {key.world_size}" if key.world_size else ""
    stem = PREFIX + "".join(f"{part}." for part in (key.name, key.device, rank) if part)
    return [(f"{stem}{name}", value) for name, value in found.items()]


KIND = "pytest-torchmem report"
SCHEMA = 3
"""2: what grew is rows and causes; with what was alive; 3: facts are lists and objects."""


def build(summary: Summary, version: str) -> dict[str, Any]:
    """Return the report of a run, of builtin types, by this ``version`` of the package."""
    outcomes = Counter(check.result.outcome.value for check in summary.checks)
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "version": version,
        "mode": summary.settings.mode,
        "failed": sum(check.result.failed for check in summary.checks),
        "outcomes": dict(sorted(outcomes.items())),
        "checks": [_check(check) for check in summary.checks],
        "obsolete": [
            {
                "file": file,
                **{name: part for name, part in asdict(key).items() if name != "torch_series"},
            }
            for file, key in summary.obsolete
        ],
        "problems": list(summary.problems),
        "extra": {},
    }


def plain_changes(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [{**asdict(change), "verdict": change.verdict.value} for change in changes]


def _check(check: Check) -> dict[str, Any]:
    result, trace = check.result, check.result.trace
    snapshot = result.snapshot
    entry = merged(explained(snapshot), snapshot.before) if snapshot is not None else None
    alive = entry.alive if entry is not None else None
    facts = entry.facts if entry is not None else {}
    return {
        "nodeid": check.nodeid,
        **asdict(result.key),
        "torch": trace.torch,
        "outcome": result.outcome.value,
        "failed": result.failed,
        "test_passed": check.passed,
        "left_out": check.is_left_out,
        "figures": dict(result.figures),
        "workload": entry.workload if entry is not None else "",
        "limits": dict(result.limits),
        "headroom": trace.headroom,
        "snapshot": _snapshot(result),
        "measurement": _measurement(result.measurement),
        "growth": _growth(result),
        "grew": [one._asdict() for one in (entry.grew if entry is not None else ())],
        "alive": alive_to_plain(alive) if alive is not None else None,
        "facts": {topic: dict(known) for topic, known in facts.items()},
        "workspaces": dict(trace.workspaces),
        "calibrated_workspaces": list(trace.calibrated_workspaces),
        "library_workspaces": list(trace.library_workspaces),
        "cudnn": trace.cudnn,
        "unknown_workspaces": list(trace.unknown_workspaces),
        "not_counted": list(trace.not_counted),
        "warnings": list(trace.warnings),
        "message": check.message,
        "advice": check.advice,
        "file": check.location[0],
        "line": check.location[1],
    }


def _growth(result: CheckResult) -> dict[str, Any] | None:
    """Return what grew and why, ``None`` where nothing did."""
    diagnosis = result.diagnosis
    if diagnosis is None or result.outcome is not Outcome.GREW:
        return None
    found = diagnosis.difference
    return {
        "moment": found.moment,
        "before": found.before,
        "now": found.now,
        "why": growth.why(diagnosis),
        "where": growth.place(diagnosis),
        "causes": [plain_cause(cause) for cause in diagnosis.causes],
        "rows": [plain_row(row) for row in found.rows],
        "rest": found.rest,
        "recorded": found.recorded,
    }


def plain_cause(cause: Cause) -> dict[str, Any]:
    row = plain_row(cause.row) if cause.row is not None else None
    return {"rule": cause.rule, "text": cause.text, "bytes": cause.nbytes, "row": row}


def plain_row(row: Row) -> dict[str, Any]:
    """Return a row of a difference of builtin types; a side that is missing is null."""
    sides = {"before": (row.before, row.count_before), "now": (row.now, row.count_now)}
    plain = {
        name: None
        if what is None
        else {
            "count": count,
            "bytes": what.nbytes,
            "kind": what.role,
            "operator": what.source,
            "tensor": what.tensor,
            "line": what.line,
        }
        for name, (what, count) in sides.items()
    }
    return {"change": row.change, "module": row.module, **plain}


def _snapshot(result: CheckResult) -> dict[str, Any] | None:
    """Return what the check was compared with, ``None`` where there was nothing."""
    snapshot, comparison = result.snapshot, result.comparison
    if snapshot is None or comparison is None or not comparison.changes:
        return None
    return {
        "file": snapshot.file,
        "torch": comparison.torch_before,
        "workload_changed": comparison.workload_changed,
        "changes": plain_changes(comparison.changes),
    }


def _measurement(found: Measurement | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "gpu": found.gpu,
        "torch": found.torch,
        "figures": found.figures,
        "estimate": found.estimate,
        "changes": plain_changes(found.comparison.changes if found.comparison is not None else ()),
        "not_measured": found.not_measured,
        "on_stand_in": found.on_stand_in,
        "confirmed": found.confirmed,
        "parting": found.parting._asdict() if found.parting is not None else None,
        "untold": list(found.untold),
    }
