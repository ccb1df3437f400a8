"""The summary at the end of a run: one table, what was written, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pytest_torchmem.checks.result import Measurement, Outcome, Record
from pytest_torchmem.reports.github import annotation, apply_command
from pytest_torchmem.reports.measured import difference
from pytest_torchmem.reports.summary import Check, Summary
from pytest_torchmem.reports.text import change_text
from pytest_torchmem.snapshots.compare import Change, Verdict, headline
from pytest_torchmem.snapshots.format import PEAKS
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    import pytest

MOST_ROWS = 40
MOST_IMPROVED = 10
MOST_OPERATORS = 2
_HEADERS = ("test", "device", "forward", "backward", "change", "result")
_QUIET = (Outcome.PASSED,)


def show(terminal: pytest.TerminalReporter, summary: Summary) -> None:
    """Write the summary section."""
    settings = summary.settings
    if not (summary.checks or summary.obsolete or summary.problems or summary.plans):
        return
    terminal.section("memory (torchmem)", sep="=", bold=True)
    if terminal.verbosity >= 0 and summary.checks:
        _table(terminal, summary)
    if settings.on_github:
        for record in summary.records:
            if record.failed:
                terminal.write_line(annotation(record, summary.root))
    for line in _written(summary, details=terminal.verbosity > 0):
        terminal.write_line(line)
    for line in _improved(summary.records):
        terminal.write_line(line)
    for line in _unknown(summary.records, every=terminal.verbosity > 0):
        terminal.write_line(f"unknown bytes: {line}")
    for line in _calibrated(summary.records, every=terminal.verbosity > 0):
        terminal.write_line(line)
    for line in _not_calibrated(summary.records):
        terminal.write_line(f"not calibrated: {line}", yellow=True)
    for line in _not_measured(summary.records):
        terminal.write_line(f"not measured: {line}", yellow=True)
    for line in _obsolete(summary):
        terminal.write_line(line, yellow=True)
    for hint in summary.hints:
        terminal.write_line(f"renamed? {hint}", yellow=True)
    if summary.obsolete and not settings.update:
        terminal.write_line("  Remove obsolete entries: pytest --torchmem-update=obsolete")
    for problem in summary.problems:
        terminal.write_line(f"error: {problem}", red=True)
    if any(record.outcome is Outcome.MISSING for record in summary.records):
        where = " (on your machine: CI never writes any)" if settings.in_ci else ""
        terminal.write_line(f"To create missing snapshots{where}: pytest --torchmem-update=new")
    if summary.proposal:
        _proposal(terminal, summary)
    failed = any(record.failed for record in summary.records)
    terminal.write_line(counts(summary), bold=True, red=failed, green=not failed)


def counts(summary: Summary) -> str:
    """Return how many checks came to what, in one line."""
    tally = Counter(_result(check) for check in summary.checks)
    obsolete = len(summary.obsolete)
    removed = sum(len(plan.removed) for plan in summary.plans if not plan.problem)
    renamed = sum(len(plan.renamed + plan.moved) for plan in summary.plans if not plan.problem)
    parts = [f"{number} {name}" for name, number in tally.items()]
    parts += [f"{obsolete} obsolete"] if obsolete else []
    if summary.settings.writes:
        parts += [f"{removed} removed"] if removed else []
        parts += [f"{renamed} renamed"] if renamed else []
    total = len(summary.checks)
    checks = f"{total} memory check{'' if total == 1 else 's'}"
    return f"{checks}: {', '.join(parts)}" if parts else checks


def _table(terminal: pytest.TerminalReporter, summary: Summary) -> None:
    from tabulate import tabulate

    checks = list(summary.checks)
    left_out = 0
    if len(checks) > MOST_ROWS and terminal.verbosity < 1:
        kept = [check for check in checks if check.record.outcome not in _QUIET][:MOST_ROWS]
        left_out, checks = len(checks) - len(kept), kept
    if checks:
        told = [(check, row) for check in checks for row in _rows(check)]
        text = tabulate(
            [row for _, row in told],
            headers=_HEADERS,
            colalign=("left", "left", "right", "right", "right", "left"),
            disable_numparse=True,
        )
        lines = text.splitlines()
        for line in lines[:2]:
            terminal.write_line(line)
        for (check, _), line in zip(told, lines[2:], strict=True):
            terminal.write_line(line, red=check.record.failed)
    if left_out:
        terminal.write_line(f"... and {left_out} more; -v shows all")


def _rows(check: Check) -> Iterable[tuple[str, ...]]:
    """Return what the table says of a check: a line, and one for its run on a real GPU."""
    record = check.record
    name = f"{record.nodeid} · {record.key.name}" if record.key.name else record.nodeid
    yield (
        name,
        _device(record),
        _size(record.figures.get("forward_peak")),
        _size(record.figures.get("backward_peak")),
        _change(record),
        _result(check),
    )
    found = record.measurement
    if found is not None and found.figures:
        yield (
            name,
            f"{found.gpu}, measured",
            _size(found.figures.get("forward_peak")),
            _size(found.figures.get("backward_peak")),
            _estimate(found),
            "measured",
        )


def _estimate(found: Measurement) -> str:
    """Return by how much a trace is off where it is most."""
    apart = [name for name in PEAKS if difference(found, name)]
    if not apart:
        return ""
    worst = max(apart, key=lambda name: abs(found.estimate[name] - found.figures[name]))
    off = difference(found, worst)
    return "as traced" if off == "0 B" else f"traced {off}"


def _change(record: Record) -> str:
    """Return the change that stands for a check: the figure that failed, or that changed most."""
    if record.changes:
        broken = [c for c in record.changes if c.verdict in (Verdict.GREW, Verdict.NOT_RUN)]
        change = _most(broken or record.changes)
        if change.verdict is Verdict.NOT_RUN:
            return f"{change.figure.replace('_', ' ')} did not run"
        text = change_text(change.before, change.now)
        figure = change.figure.replace("_", " ").removesuffix(" peak")
        return f"{figure} {text}" if change.before != change.now else "none"
    if record.limits:
        return _share(record, max(record.limits, key=lambda figure: _used(record, figure)))
    return ""


def _most(changes: Sequence[Change]) -> Change:
    by_name = {change.figure: change for change in changes}
    name = headline({c.figure: (c.before, c.now) for c in changes})
    return by_name.get(name, changes[0])


def _used(record: Record, figure: str) -> float:
    """Return the part of a limit that is used; a phase that did not run comes before all."""
    limit, value = record.limits[figure], record.figures.get(figure)
    return float("inf") if value is None or not limit else value / limit


def _share(record: Record, figure: str) -> str:
    limit, value = record.limits[figure], record.figures.get(figure)
    name = figure.removesuffix("_peak")
    if value is None:
        return f"{name} did not run"
    percent = f"{value / limit:.0%}".replace("%", " %") if limit else "all"
    return f"{name} {percent} of {format_size(limit)}"


def _result(check: Check) -> str:
    record = check.record
    if record.accepted and not check.passed:
        return "not written: the test did not pass"
    if record.failed and record.outcome is Outcome.SHRANK:
        return "shrank (strict)"
    return record.outcome.value


def _device(record: Record) -> str:
    return record.key.where or "-"


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_size(nbytes)


def _unknown(records: Iterable[Record], *, every: bool) -> Iterable[str]:
    """Return what profiles warned of: ``every`` warning with its tests, or one line for all."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    workspaces: dict[str, None] = {}
    others: dict[str, None] = {}
    operators: dict[str, None] = {}
    for record in records:
        if record.warnings:
            found.setdefault(record.warnings, {})[record.nodeid] = None
        if record.unknown_workspaces:
            workspaces[record.nodeid] = None
            operators.update(dict.fromkeys(record.unknown_workspaces))
        # Workspaces are one warning, whatever their number.
        if len(record.warnings) > bool(record.unknown_workspaces):
            others[record.nodeid] = None
    if every:
        for warnings, nodeids in found.items():
            more = f" and {len(nodeids) - 1} more" if len(nodeids) > 1 else ""
            yield f"{next(iter(nodeids))}{more}: {'; '.join(warnings)}"
        return
    parts = []
    if workspaces:
        names = ", ".join([*operators][:MOST_OPERATORS])
        names += ", …" if len(operators) > MOST_OPERATORS else ""
        what = f"runs kernels whose workspace is not known ({names})"
        parts.append(_tests(workspaces, f"{what}: figures are lower bounds"))
    if others:
        parts.append(_tests(others, "gives warnings"))
    if parts:
        yield f"{'; '.join(parts)}; -v lists them"


def _tests(nodeids: Mapping[str, None], does: str) -> str:
    """Return how many tests do what is said of one."""
    verb, _, rest = does.partition(" ")
    number = len(nodeids)
    return f"1 test {does}" if number == 1 else f"{number} tests {verb.removesuffix('s')} {rest}"


def _written(summary: Summary, *, details: bool) -> Iterable[str]:
    dry = summary.settings.dry_run
    for plan in summary.plans:
        if not plan.changes_file:
            continue
        file = summary.file_of(plan)
        if dry:
            yield f"would write {file}"
        else:
            yield f"removed {file}" if plan.text is None else f"wrote {file}"
        if dry or details:
            names = (
                ("new", plan.added),
                ("changed", plan.changed),
                ("obsolete, removed", plan.removed),
            )
            for what, keys in names:
                yield from (f"  {what}: {key}" for key in keys)
        yield from (f"  renamed: {old} -> {new}" for old, new in plan.renamed)
        yield from (f"  moved: {old} -> {file}: {new}" for old, (file, new) in plan.moved)
    yield from _calibrations(summary, details=details)


def _calibrations(summary: Summary, *, details: bool) -> Iterable[str]:
    dry = summary.settings.dry_run
    for plan in summary.calibrations:
        if not plan.changes_file:
            continue
        file = summary.file_of(plan)
        names = (("new", plan.added), ("changed", plan.changed), ("obsolete", plan.removed))
        told = ", ".join(f"{len(found)} {what}" for what, found in names if found)
        did = "would write" if dry else "removed" if plan.text is None else "wrote"
        yield f"{did} {file}: {told}" if told else f"{did} {file}"
        if dry or details:
            for what, found in names:
                for setup, question in found:
                    yield f"  {what}: {setup}: {question.operator}({question.geometry})"


def _improved(records: Iterable[Record]) -> Iterable[str]:
    """Return what shrank: a line for each test, or one for all where there are many."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.outcome is Outcome.SHRANK and not record.failed:
            found.setdefault(record.nodeid, []).append(record)
    if len(found) > MOST_IMPROVED:
        command = "pytest --torchmem-update=changed"
        yield f"improved: {len(found)} tests. To lock all of it in: {command}"
        return
    for nodeid, members in found.items():
        devices = ", ".join(dict.fromkeys(_device(record) for record in members))
        yield f"improved: {nodeid}, {devices}. {members[0].advice}"


def _calibrated(records: Iterable[Record], *, every: bool) -> Iterable[str]:
    """Return, where ``every`` detail is wanted, of which operators figures were measured."""
    found: dict[str, dict[str, None]] = {}
    for record in records if every else ():
        for operator in record.calibrated_workspaces:
            found.setdefault(operator, {})[record.nodeid] = None
    for operator, nodeids in sorted(found.items()):
        more = f" and {len(nodeids) - 1} more" if len(nodeids) > 1 else ""
        yield f"measured workspace: {operator}: {next(iter(nodeids))}{more}"


def _not_calibrated(records: Iterable[Record]) -> Iterable[str]:
    """Return why what no formula gives was not measured on the GPU that there is."""
    for record in records:
        found = record.calibration
        if found is not None and found.not_calibrated:
            yield f"{record.nodeid}: {found.not_calibrated}"
        elif found is not None and found.unanswered:
            names = ", ".join(found.unanswered)
            yield f"{record.nodeid}: {names} did not run there with the arguments of the trace"


def _not_measured(records: Iterable[Record]) -> Iterable[str]:
    """Return why tests were not run on the GPU that there is."""
    for record in records:
        if record.measurement is not None and record.measurement.not_measured:
            yield f"{record.nodeid}: {record.measurement.not_measured}"


def _obsolete(summary: Summary) -> Iterable[str]:
    orphans = Counter(file for file, _ in summary.obsolete if file in summary.orphans)
    for file, number in orphans.items():
        entries = "1 entry" if number == 1 else f"{number} entries"
        yield f"obsolete: {file}: its test module is gone ({entries})"
    for file, key in summary.obsolete:
        if file not in summary.orphans:
            yield f"obsolete: {file}: {key}"


def _proposal(terminal: pytest.TerminalReporter, summary: Summary) -> None:
    proposal = summary.settings.proposal_path
    assert proposal is not None
    terminal.write_line(
        f"The snapshots as they would be after an update are in {proposal}. "
        "To accept them, run on your machine:"
    )
    terminal.write_line(f"  {apply_command(summary.root, proposal)}")
