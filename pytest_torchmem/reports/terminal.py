"""The summary at the end of a run: one table, what was written, and what to do."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_torchmem.checks.gpu import Measurement
from pytest_torchmem.checks.result import AT_MOST, CheckResult, Outcome, TraceResult
from pytest_torchmem.figures import label
from pytest_torchmem.printable import counted, first_of, printable
from pytest_torchmem.reports import growth
from pytest_torchmem.reports.files import apply_command, left_out_lines, marked_lines
from pytest_torchmem.reports.layout import columns, joined, lines_of, tabulated, wrapped
from pytest_torchmem.reports.summary import Check, Summary
from pytest_torchmem.snapshots.calibration import place_name
from pytest_torchmem.snapshots.compare import Verdict, main_change
from pytest_torchmem.snapshots.format import Entry, Key, notes_of
from pytest_torchmem.units import format_change, format_size

Line = tuple[str, dict[str, bool]]
"""A line, and how a terminal marks it: the names are those of pytest's ``write_line``."""
MOST_ROWS = 40
MOST_IMPROVED = 10
MOST_NOTICED = 5
MOST_OPERATORS = 2
_HEADERS = ("test", "device", "forward", "backward", "change", "result")


def lines(summary: Summary, verbosity: int) -> Iterator[Line]:
    """Yield the lines of the summary section, none where there is nothing to show."""
    found = (summary.checks, summary.obsolete, summary.problems, summary.plans, summary.hints)
    if not any(found):
        return
    verbose = verbosity > 0
    if verbosity >= 0 and summary.checks:
        yield from _table(summary.checks, every=verbose)
    yield from _shared_causes(summary.checks)
    failed = [check for check in summary.checks if check.result.failed]
    on_github = summary.settings.on_github
    plain = [*marked_lines(failed, summary.root), *left_out_lines(summary)] if on_github else []
    plain += _written(summary, details=verbose)
    improved = [*_improved(summary.checks)]
    plain += [*_warnings(summary.checks, every=verbose)]
    left_out = _tests_by(summary.checks, lambda trace: trace.not_counted)
    plain += [f"{counted(len(tests), 'test')} without {one}" for one, tests in left_out.items()]
    plain += _workspaces(summary.checks) if verbose else []
    yield from ((line, {"green": True}) for line in improved)
    yield from ((line, {}) for line in plain)
    for line in (
        *_not_checked(summary, every=verbose),
        *_not_measured(summary.checks),
        *_obsolete(summary),
    ):
        yield line, {"yellow": True}
    for problem in summary.problems:
        yield f"error: {problem}", {"red": True}
    yield from ((line, {}) for line in _what_to_do(summary))
    yield counts(summary), {"bold": True, "red": bool(failed), "green": not failed}


def _shared_causes(checks: Iterable[Check]) -> Iterator[Line]:
    """Yield each cause that several tests share, with the first of them."""
    failed = (check for check in checks if check.result.failed)
    found = growth.by_cause((check.nodeid, check.result.diagnosis) for check in failed)
    for (why, place), nodeids in found.items():
        tests = [*dict.fromkeys(nodeids)]
        if len(tests) > 1 and why:
            shown = tests[:MOST_NOTICED]
            more = f" and {len(tests) - len(shown)} more" if len(shown) < len(tests) else ""
            text = joined(f"{len(tests)} tests: {why}", place, separator=": ")
            with lines_of(columns()):
                text = wrapped(f"{text} ({', '.join(shown)}{more})")
            yield from ((line, {"red": True}) for line in text.split("\n"))


def counts(summary: Summary) -> str:
    """Return how many checks had which result, in one line."""
    parts = Counter(_result(check) for check in summary.checks)
    parts["obsolete"] = len(summary.obsolete)
    if summary.settings.writes:
        plans = [plan for plan in summary.plans if not plan.problem]
        parts["removed"] = sum(len(plan.removed) for plan in plans)
        parts["renamed"] = sum(len(plan.renamed + plan.moved) for plan in plans)
    checks = counted(len(summary.checks), "memory check")
    named = ", ".join(f"{number} {name}" for name, number in parts.items() if number)
    return f"{checks}: {named}" if named else checks


def _table(checks: Sequence[Check], *, every: bool) -> Iterator[Line]:
    shown = list(checks)
    if len(checks) > MOST_ROWS and not every:
        shown = [check for check in checks if check.result.outcome is not Outcome.PASSED]
        shown = shown[:MOST_ROWS]
    rows = []
    for check in shown:  # what failed, and what shrank
        failed, outcome = check.result.failed, check.result.outcome
        mark = {"red": failed, "green": outcome is Outcome.SHRANK and not failed}
        rows += [(mark, tuple(map(printable, row))) for row in _rows(check)]
    if rows:
        yield from _laid_out(rows)
    if len(shown) < len(checks):
        yield f"... and {len(checks) - len(shown)} more; -v shows all", {}


def _laid_out(rows: Sequence[tuple[dict[str, bool], tuple[str, ...]]]) -> Iterator[Line]:
    """Yield a table of rows; where that is too wide, each test has a line of its own above them."""
    lines = tabulated([row for _, row in rows], _HEADERS)
    if max(map(len, lines)) <= columns():
        marks = ({}, {}, *(mark for mark, _ in rows))
        yield from zip(lines, marks, strict=True)
        return
    header, rule, *others = tabulated([row[1:] for _, row in rows], _HEADERS[1:])
    yield f"  {header}", {}
    yield f"  {rule}", {}
    before = ""
    for (mark, row), line in zip(rows, others, strict=True):
        if row[0] != before:
            before = row[0]
            yield before, mark
        yield f"  {line}", mark


def _rows(check: Check) -> Iterable[tuple[str, ...]]:
    """Yield the table's line of a check, and one for its run on a real GPU."""
    result, measured = check.result, check.result.measurement
    peaks = ("forward_peak", "backward_peak")
    sizes = (format_size(result.figures.get(peak)) for peak in peaks)
    at_most = AT_MOST if result.trace.guessed else ""
    yield (check.name, check.device, *sizes, _change(result), f"{_result(check)}{at_most}")
    if measured is not None and measured.figures:
        sizes = (format_size(measured.figures.get(peak)) for peak in peaks)
        came_to = "not judged" if measured.untold else "measured"
        came_to = "confirmed" if measured.confirmed else came_to
        yield (check.name, f"{measured.place}, measured", *sizes, _estimate(measured), came_to)


def _estimate(found: Measurement) -> str:
    """Return by how much a trace is off where it is most."""
    if not found.apart:
        return ""
    worst = found.apart[0]
    off = format_change(found.figures[worst], found.estimate[worst])
    return "as traced" if off == "0 B" else f"traced {off}"


def _change(result: CheckResult) -> str:
    """Return the change that stands for a check: the figure that failed, or that changed most."""
    verdicts = (Verdict.GREW, Verdict.NOT_RUN)
    broken = [change for change in result.changes if change.verdict in verdicts]
    new = result.comparison.unjudged if result.comparison is not None and not broken else ()
    change = growth.leading_change(broken, result.diagnosis)
    change = change or main_change(new or result.changes)
    if change is not None:
        if change.verdict is Verdict.NEW:
            return f"{label(change.figure)} is not in the snapshot"
        if change.verdict is Verdict.NOT_RUN:
            return f"{label(change.figure)} did not run"
        if change.before == change.now:
            return "none"
        step = format_change(change.before, change.now)
        return f"{label(change.figure).removesuffix(' peak')} {step}"
    return _share(result) if result.limits else ""


def _share(result: CheckResult) -> str:
    """Return the part of a limit that is used, of that of which most is; a phase that did not run
    comes before all.
    """

    def used(figure: str) -> float:
        limit, value = result.limits[figure], result.figures.get(figure)
        return float("inf") if value is None or not limit else value / limit

    figure = max(result.limits, key=used)
    limit, value = result.limits[figure], result.figures.get(figure)
    name = label(figure).removesuffix(" peak")
    if value is None:
        return f"{name} did not run"
    percent = f"{value / limit:.0%}".replace("%", " %") if limit else "all"
    return f"{name} {percent} of {format_size(limit)}"


def _result(check: Check) -> str:
    if check.result.accepted and not check.passed:
        return "not written: the test did not pass"
    if check.unwritten:
        return "not written"
    if check.result.failed and check.result.outcome is Outcome.SHRANK:
        return "shrank (strict)"
    changes = check.result.comparison
    if check.result.outcome is Outcome.GREW and changes is not None and not changes.grew:
        return "not in the snapshot"
    return check.result.outcome.value


def _not_checked(summary: Summary, *, every: bool) -> Iterable[str]:
    """Yield once why nothing was checked, with the tests of which that is so."""
    for why, tests in summary.not_checked.items():
        shown = [*tests] if every else [*tests][:MOST_NOTICED]
        more = [f"and {len(tests) - len(shown)} more (-v)"] if len(shown) < len(tests) else []
        yield f"{counted(len(tests), 'test')} {why}: {', '.join((*shown, *more))}"


def _warnings(checks: Iterable[Check], *, every: bool) -> Iterable[str]:
    """Yield what profiles warn of: ``every`` warning with its tests, or one line for all."""
    checks = [check for check in checks if check.result.trace.warnings]
    if every:
        for said, tests in _tests_by(checks, lambda trace: ["; ".join(trace.warnings)]).items():
            yield f"warning: {first_of(tests)}: {said}"
        return
    parts, traced = [], [(check.nodeid, check.result.trace) for check in checks]
    if guessed := {test for test, trace in traced if trace.guessed}:
        number = counted(len(guessed), "test")
        parts.append(f"{number}{AT_MOST} (values='real' computes them)")
    if unknown := {test for test, trace in traced if trace.unknown_workspaces}:
        names = [*dict.fromkeys(name for _, trace in traced for name in trace.unknown_workspaces)]
        more = ", …" if len(names) > MOST_OPERATORS else ""
        what = f"with unknown workspace ({', '.join(names[:MOST_OPERATORS])}{more})"
        parts.append(f"{counted(len(unknown), 'test')} {what}, figures may be too low")
    # Workspaces are one warning, whatever their number.
    several = [(test, t) for test, t in traced if len(t.warnings) > bool(t.unknown_workspaces)]
    if others := {test for test, trace in several if not trace.guessed}:
        parts.append(f"{counted(len(others), 'test')} with other warnings")
    if parts:
        yield f"warnings: {'; '.join(parts)}; -v lists them"


def _tests_by(
    checks: Iterable[Check], said: Callable[[TraceResult], Iterable[str]]
) -> dict[str, dict[str, None]]:
    """Return what traces say, each with the tests whose traces do, in order."""
    found: dict[str, dict[str, None]] = {}
    for check in checks:
        for one in said(check.result.trace):
            found.setdefault(one, {})[check.nodeid] = None
    return found


def _written(summary: Summary, *, details: bool) -> Iterable[str]:
    """Yield the files that were written, or that a dry run would have written."""
    dry = summary.settings.dry_run
    for plan in (one for one in summary.every_plan if one.changes_file):
        changes = {"new": plan.added, "changed": plan.changed, "obsolete": plan.removed}
        numbers = ", ".join(f"{len(keys)} {what}" for what, keys in changes.items() if keys)
        verb = "would write" if dry else "removed" if plan.text is None else "wrote"
        did = f"{verb} {summary.file_of(plan)}"
        yield f"{did}: {numbers}" if numbers and plan in summary.calibrations else did
        for what, keys in changes.items() if details or dry else ():
            for key in keys:
                yield f"  {what}: {key if isinstance(key, Key) else place_name(key)}"
        for key in plan.removed:
            entry = plan.stored.entries.get(key)
            if isinstance(entry, Entry) and entry.is_annotated:
                notes = _quoted(notes_of(entry))
                yield f"  removed, with what was written into it: {key}: {notes}"
        if plan.dropped:
            yield f"  removed, with what was written at its top: {_quoted(plan.dropped)}"
        yield from (f"  renamed: {old} -> {new}" for old, new in plan.renamed)
        yield from (f"  moved: {old} -> {to}: {new}" for old, (to, new) in plan.moved)


def _quoted(notes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(notes[key], ensure_ascii=False)}" for key in notes)


def _improved(checks: Sequence[Check]) -> Iterable[str]:
    """Yield what shrank: a line for each test, or one for all where there are many; with what to do
    if that accepts no failure of the same tests.
    """
    found: dict[str, list[Check]] = {}
    failed = {check.nodeid for check in checks if check.result.failed}
    for check in checks:
        if check.result.outcome is Outcome.SHRANK and not check.result.failed:
            found.setdefault(check.nodeid, []).append(check)
    if len(found) > MOST_IMPROVED:
        command = "pytest --torchmem-update=changed"
        advice = "" if failed else f". To lock all of it in: {command}"
        yield f"improved: {len(found)} tests{advice}"
        return
    for nodeid, members in found.items():
        devices = ", ".join(dict.fromkeys(check.device for check in members))
        advice = "" if nodeid in failed else f". {members[0].advice}"
        yield f"improved: {nodeid}, {devices}{advice}"


def _workspaces(checks: Sequence[Check]) -> Iterable[str]:
    """Yield the operators whose workspace comes from a calibration, or was told by cuDNN."""

    def said(trace: TraceResult) -> Iterable[str]:
        yield from (f"calibrated workspace: {one}" for one in trace.calibrated_workspaces)
        told = f"workspace told by cuDNN {trace.cudnn}"
        yield from (f"{told}: {one}" for one in trace.library_workspaces)

    found = _tests_by(checks, said)
    return (f"{one}: {first_of(found[one])}" for one in sorted(found))


def _not_measured(checks: Iterable[Check]) -> Iterable[str]:
    """Yield what did not run on this machine's GPU, and why: calibrations, then measurements."""
    for check in checks:
        if (found := check.result.calibration) is None:
            continue
        why, names = found.not_calibrated, ", ".join(found.unanswered)
        if not why and names:
            why = f"on the GPU, {names} did not run with the arguments of the trace"
        if why:
            yield f"not calibrated: {check.nodeid}: {why}"
    for check in checks:
        measured = check.result.measurement
        if measured is not None and measured.not_measured:
            yield f"not measured: {check.nodeid}: {measured.not_measured}"
        elif measured is not None and not measured.confirmed and measured.on_stand_in:
            yield f"not confirmed: {check.nodeid}: {_why_not_confirmed(measured)}"


def _why_not_confirmed(found: Measurement) -> str:
    sizes = ", ".join(name for name in found.untold if name != "values")
    parts = [f"first apart at {found.parting}"] if found.parting is not None else []
    parts += [f"only a library that is not installed knows {sizes}"] if sizes else []
    if "values" in found.untold:
        parts += ["the step reads values that no kernel has computed"]
    return "; ".join(parts)


def _obsolete(summary: Summary) -> Iterable[str]:
    orphans = Counter(file for file, _ in summary.obsolete if file in summary.orphans)
    for file, number in orphans.items():
        entries = counted(number, "entry")
        yield f"obsolete: {file}: its test module no longer exists ({entries})"
    for file, key in summary.obsolete:
        if file not in summary.orphans:
            yield f"obsolete: {file}: {key}"
    yield from summary.hints
    if summary.obsolete and not summary.settings.update:
        fails = " (they fail this run)" if summary.settings.fails_on_obsolete else ""
        yield f"  Remove obsolete entries{fails}: pytest --torchmem-update=obsolete"


def _what_to_do(summary: Summary) -> Iterable[str]:
    settings = summary.settings
    failed = (check for check in summary.checks if check.failed_by_check)
    if any(check.result.outcome is Outcome.MISSING for check in failed):
        where = " (on your machine: CI never writes snapshots)" if settings.in_ci else ""
        yield f"To create missing snapshots{where}: pytest --torchmem-update=new"
    if summary.proposal and settings.proposal_path is not None:
        yield (
            f"The updated snapshots are in {settings.proposal_path}. To accept them, run on your "
            "machine:"
        )
        yield f"  {apply_command(summary.root, settings.proposal_path)}"
