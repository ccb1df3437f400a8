"""The JSON report: what ``docs/report.schema.json`` describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_torchmem import __version__
from pytest_torchmem.checks.result import Record

if TYPE_CHECKING:
    from pytest_torchmem.reports.summary import Check, Summary

KIND = "pytest-torchmem report"
SCHEMA = 1


def build(summary: Summary) -> dict[str, Any]:
    """Return the report of a run, of builtin types."""
    outcomes: dict[str, int] = {}
    for record in summary.records:
        outcomes[record.outcome.value] = outcomes.get(record.outcome.value, 0) + 1
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "version": __version__,
        "mode": summary.settings.mode,
        "failed": sum(record.failed for record in summary.records),
        "outcomes": dict(sorted(outcomes.items())),
        "checks": [_check(check) for check in summary.checks],
        "obsolete": [
            {"file": file, "test": key.test, "name": key.name, "device": key.device, "gpu": key.gpu}
            for file, key in summary.obsolete
        ],
        "problems": list(summary.problems),
        "extra": {},
    }


def _check(check: Check) -> dict[str, Any]:
    record = check.record
    return {
        "nodeid": record.nodeid,
        "test": record.key.test,
        "name": record.key.name,
        "device": record.key.device,
        "gpu": record.key.gpu,
        "torch": record.torch,
        "torch_series": record.key.torch_series,
        "outcome": record.outcome.value,
        "failed": record.failed,
        "test_passed": check.passed,
        "figures": record.figures,
        "workload": record.entry.workload if record.entry is not None else "",
        "limits": record.limits,
        "headroom": record.headroom,
        "snapshot": _snapshot(record),
        "measurement": record.measurement.to_plain() if record.measurement is not None else None,
        "grew": list(record.grew),
        "workspaces": record.workspaces,
        "calibrated_workspaces": list(record.calibrated_workspaces),
        "unknown_workspaces": list(record.unknown_workspaces),
        "warnings": list(record.warnings),
        "message": record.message,
        "advice": record.advice,
        "file": record.location[0],
        "line": record.location[1],
    }


def _snapshot(record: Record) -> dict[str, Any] | None:
    """Return what the check was compared with, ``None`` where there was nothing."""
    if not record.changes:
        return None
    return {
        "file": record.file,
        "torch": record.torch_before,
        "workload_changed": record.workload_changed,
        "changes": [
            {
                "figure": change.figure,
                "before": change.before,
                "now": change.now,
                "verdict": change.verdict.value,
                "allowed": change.allowed,
                "rule": change.rule,
            }
            for change in record.changes
        ],
    }
