"""The reports that go to files and to GitHub, written when a run ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pytest_torchmem.checks.result import Outcome, Record
from pytest_torchmem.reports.difference import Difference, Group, in_order
from pytest_torchmem.reports.github import apply_command
from pytest_torchmem.reports.json_report import build
from pytest_torchmem.reports.markdown import render
from pytest_torchmem.reports.summary import Check, Summary
from pytest_torchmem.snapshots.compare import Verdict
from pytest_torchmem.snapshots.store import write

if TYPE_CHECKING:
    import pytest

_GROUPS = {
    Outcome.GREW: Group.GREW,
    Outcome.SHRANK: Group.SHRANK,
    Outcome.NEW: Group.NEW,
    Outcome.MISSING: Group.FAILED,
    Outcome.OVER_BUDGET: Group.FAILED,
    Outcome.UNKNOWN_BYTES: Group.FAILED,
    Outcome.ESTIMATE_OFF: Group.FAILED,
    Outcome.MEASURED_GREW: Group.FAILED,
    Outcome.NOT_CHECKED: Group.FAILED,
}
_BY_HEADLINE = (Outcome.OVER_BUDGET, Outcome.ESTIMATE_OFF, Outcome.MEASURED_GREW)
"""Failures of which no change of a traced figure tells."""


def write_reports(config: pytest.Config, summary: Summary) -> None:
    """Write the reports that the settings ask for; what cannot be written is a problem to show."""
    settings = summary.settings
    report = build(summary)
    config.hook.pytest_torchmem_report(config=config, report=report)
    if settings.json_path is not None:
        write(settings.json_path, json.dumps(report, indent=2) + "\n")
    markdown = run_markdown(summary)
    if settings.markdown_path is not None:
        write(settings.markdown_path, markdown)
    summary_file = os.environ.get("GITHUB_STEP_SUMMARY")
    if settings.on_github and summary_file:
        with open(summary_file, "a", encoding="utf-8") as file:
            file.write(markdown + "\n")


def run_markdown(summary: Summary) -> str:
    """Return a run's results as Markdown, the snapshot as base."""
    found = in_order(_difference(check) for check in summary.checks if not _is_idle(check))
    footer: list[str] = []
    if summary.obsolete:
        footer.append(f"{len(summary.obsolete)} obsolete entries.")
    footer += _libraries(summary.records)
    footer += [f"Error: {problem}" for problem in summary.problems]
    if summary.proposal and summary.settings.proposal_path is not None:
        command = apply_command(summary.root, summary.settings.proposal_path)
        footer.append(f"To accept these changes:\n\n```\n{command}\n```")
    return render(found, footer=footer)


def _libraries(records: Iterable[Record]) -> Iterable[str]:
    """Tell of how many checks figures are measured, and of how many lower bounds."""
    kinds: dict[str, tuple[list[str], dict[str, None]]] = {}
    for record in records:
        for kind in ("calibrated_workspaces", "unknown_workspaces"):
            operators = getattr(record, kind)
            if operators:
                nodeids, names = kinds.setdefault(kind, ([], {}))
                nodeids.append(record.nodeid)
                names.update(dict.fromkeys(operators))
    said = {
        "calibrated_workspaces": "measured on a GPU is what these kernels take for themselves",
        "unknown_workspaces": "a lower bound, without what these kernels take for themselves",
    }
    for kind, text in said.items():
        if kind in kinds:
            nodeids, names = kinds[kind]
            checks = "1 check" if len(nodeids) == 1 else f"{len(nodeids)} checks"
            yield f"Of {checks}, {text}: {', '.join(f'`{name}`' for name in sorted(names))}."


def _is_idle(check: Check) -> bool:
    """Tell whether a test passed that left this one of the configured devices alone."""
    return check.record.outcome is Outcome.NOT_CHECKED and check.passed


def _difference(check: Check) -> Difference:
    record, notes = check.record, []
    if record.outcome in (Outcome.MISSING, Outcome.NOT_CHECKED, Outcome.UNKNOWN_BYTES):
        notes.append(record.outcome.value)
    elif record.outcome in _BY_HEADLINE:
        notes.append(record.message.partition("\n")[0].partition(": ")[2])
    elif record.outcome is Outcome.UPDATED:
        notes.append("updated")
    if record.changes:
        if record.workload_changed:
            notes.append("another workload")
        if record.torch_before != record.torch:
            notes.append(f"torch {record.torch_before} → {record.torch}")
    return Difference(
        record.nodeid,
        record.key.name,
        record.key.where or "-",
        _group(record),
        record.changes,
        record.figures,
        "; ".join(notes),
    )


def _group(record: Record) -> Group:
    if record.outcome in _GROUPS:
        return _GROUPS[record.outcome]
    verdicts: set[Any] = {change.verdict for change in record.changes}
    if Verdict.GREW in verdicts:
        return Group.GREW
    if Verdict.SHRANK in verdicts:
        return Group.SHRANK
    return Group.WITHIN if Verdict.WITHIN in verdicts else Group.SAME
