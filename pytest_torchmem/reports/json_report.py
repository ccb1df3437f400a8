"""The JSON report: what ``docs/report.schema.json`` describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_torchmem import __version__
from pytest_torchmem.checks.result import Outcome
from pytest_torchmem.reports import growth
from pytest_torchmem.snapshots.format import alive_to_plain

if TYPE_CHECKING:
    from pytest_torchmem.checks.gpu import Measurement
    from pytest_torchmem.checks.result import CheckResult
    from pytest_torchmem.diagnosis.causes import Cause
    from pytest_torchmem.diagnosis.difference import Row
    from pytest_torchmem.reports.summary import Check, Summary
    from pytest_torchmem.snapshots.compare import Change

KIND = "pytest-torchmem report"
SCHEMA = 3
"""2: what grew is rows and causes; with what was alive; 3: facts are lists and objects."""


def build(summary: Summary) -> dict[str, Any]:
    """Return the report of a run, of builtin types."""
    outcomes = Counter(check.result.outcome.value for check in summary.checks)
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "version": __version__,
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
    """Return changes of builtin types."""
    return [{**asdict(change), "verdict": change.verdict.value} for change in changes]


def _check(check: Check) -> dict[str, Any]:
    result, trace = check.result, check.result.trace
    entry = result.snapshot.entry if result.snapshot is not None else None
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
        "workload": result.snapshot.entry.workload if result.snapshot is not None else "",
        "limits": dict(result.limits),
        "headroom": trace.headroom,
        "snapshot": _snapshot(result),
        "measurement": _measurement(result.measurement),
        "growth": _growth(result),
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
        **growth.told(diagnosis)._asdict(),
        "causes": [plain_cause(cause) for cause in diagnosis.causes],
        "rows": [plain_row(row) for row in found.rows],
        "rest": found.rest,
        "recorded": found.recorded,
    }


def plain_cause(cause: Cause) -> dict[str, Any]:
    """Return a cause of builtin types."""
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
