"""The JSON report: what ``docs/report.schema.json`` describes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_torchmem import __version__
from pytest_torchmem.checks.findings import Outcome

if TYPE_CHECKING:
    from pytest_torchmem.checks.gpu import Measurement
    from pytest_torchmem.checks.result import CheckResult
    from pytest_torchmem.reports.summary import Check, Summary
    from pytest_torchmem.snapshots.compare import Change
    from pytest_torchmem.snapshots.explain import Growth

KIND = "pytest-torchmem report"
SCHEMA = 1


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
    return {
        "nodeid": check.nodeid,
        **asdict(result.key),
        "torch": trace.torch,
        "outcome": result.outcome.value,
        "failed": result.failed,
        "test_passed": check.passed,
        "figures": dict(result.figures),
        "workload": result.snapshot.entry.workload if result.snapshot is not None else "",
        "limits": dict(result.limits),
        "headroom": trace.headroom,
        "snapshot": _snapshot(result),
        "measurement": _measurement(result.measurement),
        "grew": [asdict(growth) for growth in _growths(result)],
        "workspaces": dict(trace.workspaces),
        "calibrated_workspaces": list(trace.calibrated_workspaces),
        "library_workspaces": list(trace.library_workspaces),
        "cudnn": trace.cudnn,
        "unknown_workspaces": list(trace.unknown_workspaces),
        "warnings": list(trace.warnings),
        "message": check.message,
        "advice": check.advice,
        "file": check.location[0],
        "line": check.location[1],
    }


def _growths(result: CheckResult) -> Iterable[Growth]:
    snapshot = result.snapshot
    return snapshot.growths if snapshot is not None and result.outcome is Outcome.GREW else ()


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
    }
