"""The reports that go to files and to GitHub, written when a run ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pytest_torchmem.checks.findings import Outcome
from pytest_torchmem.checks.result import CheckResult
from pytest_torchmem.printable import printable
from pytest_torchmem.reports.difference import Difference, Group, group_of, in_order, notes_on
from pytest_torchmem.reports.github import apply_command
from pytest_torchmem.reports.markdown import code, fenced, plain, render
from pytest_torchmem.reports.pages import write_index
from pytest_torchmem.reports.summary import Check, Summary
from pytest_torchmem.snapshots.files import append, write

_GROUPS = {Outcome.GREW: Group.GREW, Outcome.SHRANK: Group.SHRANK, Outcome.NEW: Group.NEW}
_BY_CHANGE = (Outcome.PASSED, *_GROUPS)
"""The outcomes that the change of a figure shows."""
_BY_HEADLINE = (Outcome.OVER_BUDGET, Outcome.ESTIMATE_OFF, Outcome.MEASURED_GREW)
"""Failures of which the message says by how much."""


def write_reports(summary: Summary, report: dict[str, Any]) -> list[OSError]:
    """Write the reports that the settings ask for; ``report`` is the JSON report.

    Returns why any of them could not be written; an older one is not left for want of another.
    """
    settings, markdown = summary.settings, run_markdown(summary)
    summary_file = os.environ.get("GITHUB_STEP_SUMMARY") if settings.on_github else None
    writers: tuple[tuple[Path | None, Callable[[Path], None]], ...] = (
        (settings.json_path, lambda path: write(path, json.dumps(report, indent=2) + "\n")),
        (settings.markdown_path, lambda path: write(path, markdown)),
        (settings.html_path, lambda path: write_index(path, summary)),
        (Path(summary_file) if summary_file else None, lambda path: append(path, markdown + "\n")),
    )
    failed = []
    for path, write_to in writers:
        try:
            if path is not None:
                write_to(path)
        except OSError as error:
            failed.append(error)
    return failed


def run_markdown(summary: Summary) -> str:
    """Return a run's results as Markdown, the snapshot as base."""
    found = in_order(_difference(check) for check in summary.checks if not check.is_left_out)
    footer: list[str] = []
    if summary.obsolete:
        footer.append(f"{len(summary.obsolete)} obsolete entries.")
    for why, checks in summary.not_checked.items():
        tests = len({check.nodeid for check in checks})
        footer.append(f"{'1 test' if tests == 1 else f'{tests} tests'} {plain(why)}.")
    footer += _workspaces(summary.checks)
    footer += [f"Error: {plain(problem)}" for problem in summary.problems]
    if summary.proposal and summary.settings.proposal_path is not None:
        command = apply_command(summary.root, summary.settings.proposal_path)
        footer.append(f"To accept these changes:\n\n{fenced(printable(command))}")
    return render(found, footer=footer)


def _workspaces(checks: Iterable[Check]) -> Iterable[str]:
    """Yield how many checks depend on calibrated workspace, and how many lack some."""
    traced = [check.result.trace for check in checks]
    calibrated = [trace.calibrated_workspaces for trace in traced if trace.calibrated_workspaces]
    unknown = [trace.unknown_workspaces for trace in traced if trace.unknown_workspaces]
    if calibrated:
        what = f"{_checks(calibrated, 'uses', 'use')} calibrated (GPU-measured) workspace for"
        yield f"{what}: {_names(calibrated)}."
    told = [trace.library_workspaces for trace in traced if trace.library_workspaces]
    if told:
        versions = ", ".join(sorted({trace.cudnn for trace in traced if trace.library_workspaces}))
        what = f"{_checks(told, 'uses', 'use')} workspace that cuDNN {versions} told for"
        yield f"{what}: {_names(told)}."
    if unknown:
        what = f"{_checks(unknown, 'is a lower bound', 'are lower bounds')}, without the workspace"
        yield f"{what} of: {_names(unknown)}."
    apart = [trace.not_counted for trace in traced if trace.not_counted]
    if apart:
        what = ", ".join(sorted({one for several in apart for one in several}))
        yield f"{_checks(apart, 'does', 'do')} not count {what}."


def _checks(found: Sequence[object], one: str, several: str) -> str:
    return f"1 check {one}" if len(found) == 1 else f"{len(found)} checks {several}"


def _names(found: Iterable[Iterable[str]]) -> str:
    names = {operator for operators in found for operator in operators}
    return ", ".join(code(name) for name in sorted(names))


def _difference(check: Check) -> Difference:
    result, notes = check.result, []
    if result.outcome in _BY_HEADLINE:
        notes.append(check.headline)
    elif result.outcome not in _BY_CHANGE:
        notes.append(result.outcome.value)
    if result.comparison is not None:
        notes += notes_on(result.comparison)
    return Difference(
        check.nodeid,
        result.key.name,
        check.device,
        _group(result),
        result.changes,
        result.figures,
        "; ".join(notes),
        result.snapshot.diagnosis if result.snapshot is not None else None,
    )


def _group(result: CheckResult) -> Group:
    if result.outcome in (Outcome.PASSED, Outcome.UPDATED):
        return group_of(result.comparison) if result.comparison is not None else Group.SAME
    return _GROUPS.get(result.outcome, Group.FAILED)
