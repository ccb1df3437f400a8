"""The reports that go to files, to GitHub and to other CI systems.

``--torchmem-html`` is a page for each check that failed, and an index of all checks;
``docs/report.schema.json`` describes the report of ``--torchmem-json``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchmem.checks.result import AT_MOST, CheckResult, Outcome
from pytest_torchmem.printable import counted, first_of, printable, printable_lines
from pytest_torchmem.reports import difference, layout
from pytest_torchmem.reports.difference import DifferenceKind
from pytest_torchmem.reports.growth import explained, line_of, place, why
from pytest_torchmem.reports.summary import SAID_OF_TRACES, Check, Summary
from pytest_torchmem.reports.text import message, where_of
from pytest_torchmem.snapshots.files import append, write
from pytest_torchmem.snapshots.format import alive_to_plain, merged
from pytest_torchmem.snapshots.location import PROPOSAL, relative
from pytest_torchmem.units import format_step

if TYPE_CHECKING:
    from pytest_torchmem.checks.gpu import Measurement
    from pytest_torchmem.diagnosis.causes import Cause
    from pytest_torchmem.diagnosis.difference import Row
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.snapshots.compare import Change


def marked_lines(checks: Iterable[Check], root: Path) -> Iterator[str]:
    """Yield the workflow commands that mark the lines to blame, or else tests, each cause once."""
    found: dict[tuple[str, int, str], list[Check]] = {}
    for check in checks:
        place, cause = _blamed(check, root) or (check.location, check.message)
        found.setdefault((*place, cause), []).append(check)
    for (path, line, _), sharing in found.items():
        tests = first_of(dict.fromkeys(check.nodeid for check in sharing))
        text = "\n\n".join(filter(None, (sharing[0].message, sharing[0].advice)))
        yield _marking("error", root, (path, line), tests, text)


def left_out_lines(summary: Summary) -> Iterator[str]:
    """Yield the workflow commands that say why tests were not checked, each reason once."""
    for reason, tests in summary.not_checked.items():
        text, first = f"{reason}: {', '.join(tests)}", next(iter(tests.values()))
        number = counted(len(tests), "test")
        yield _marking("notice", summary.root, first.location, number, text)


def _marking(kind: str, root: Path, place: tuple[str, int], what: str, text: str) -> str:
    """Return the workflow command that marks a line; it ends, as its properties do, at others."""
    path, line = place
    file, title = relative(root / path, _checkout(root)), f"memory: {what}"
    file, title = (_data(one).replace(":", "%3A").replace(",", "%2C") for one in (file, title))
    return f"::{kind} file={file},line={line},title={title}::{_data(printable_lines(text))}"


def _blamed(check: Check, root: Path) -> tuple[tuple[str, int], str] | None:
    """Return the repository's line that made memory grow, and why; ``None`` where there is none.

    That is the first line of the code that changed, which a pull request shows, or what allocates.
    """
    diagnosis = check.result.diagnosis
    if not check.result.failed or diagnosis is None:
        return None
    for line in (*(one.place for one in diagnosis.changed[:1]), line_of(diagnosis)):
        name, _, numbers = line.partition(":")
        number, path = re.split(r"\D", numbers)[0], Path.cwd() / name  # as it is shown
        is_line = number and path.is_file()
        if is_line and not relative(path, _checkout(root)).startswith(".."):
            return (str(path), int(number)), why(diagnosis)
    return None


def _checkout(root: Path) -> Path:
    """Return the top of the repository, from which GitHub wants paths; it need not be ``root``."""
    return Path(os.environ.get("GITHUB_WORKSPACE") or root)


def apply_command(root: Path, proposal: Path) -> str:
    """Return the one command that puts the proposed snapshot files into a checkout at ``root``."""
    environment = os.environ
    checkout = environment.get("GITHUB_WORKSPACE") or environment.get("CI_PROJECT_DIR")
    below = relative(root, Path(checkout)) if checkout else "."
    if environment.get("GITHUB_ACTIONS") == "true":
        run = environment.get("GITHUB_RUN_ID", "RUN_ID")
        repository = environment.get("GITHUB_REPOSITORY")
        where = f" --repo {repository}" if repository else ""
        return f"gh run download {run}{where} --name {PROPOSAL} --dir {shlex.quote(below)}"
    if environment.get("GITLAB_CI"):
        job = f"{environment.get('CI_API_V4_URL')}/projects/{environment.get('CI_PROJECT_ID')}/jobs"
        url = f"{job}/{environment.get('CI_JOB_ID')}/artifacts"
        inside = shlex.quote(relative(proposal, root))
        return (
            'curl --fail --location --header "PRIVATE-TOKEN: $GITLAB_TOKEN" '
            f"--output artifacts.zip {url} && unzip -o artifacts.zip "
            f"&& cp -R {inside}/. {shlex.quote(below)}"
        )
    return f"cp -R {shlex.quote(str(proposal))}/. {shlex.quote(str(root))}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


_GROUPS = {
    Outcome.GREW: DifferenceKind.GREW,
    Outcome.SHRANK: DifferenceKind.SHRANK,
    Outcome.NEW: DifferenceKind.NEW,
}
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
    found = difference.in_order(
        _difference(check) for check in summary.checks if not check.is_left_out
    )
    footer: list[str] = []
    if summary.obsolete:
        footer.append(f"{len(summary.obsolete)} obsolete entries.")
    for reason, tests in summary.not_checked.items():
        footer.append(f"{counted(len(tests), 'test')} {difference.plain(reason)}.")
    footer += _workspaces(summary.checks)
    footer += [f"Error: {difference.plain(problem)}" for problem in summary.problems]
    if summary.proposal and summary.settings.proposal_path is not None:
        command = apply_command(summary.root, summary.settings.proposal_path)
        footer.append(f"To accept these changes:\n\n{difference.fenced(printable(command))}")
    return difference.render(found, footer=footer)


def _workspaces(checks: Iterable[Check]) -> Iterable[str]:
    """Yield how many checks depend on calibrated workspace, and how many lack some."""
    traced = [check.result.trace for check in checks]
    versions = ", ".join(sorted({trace.cudnn for trace in traced if trace.library_workspaces}))
    for name, one, several, what in (
        ("calibrated", "uses", "use", " calibrated (GPU-measured) workspace for"),
        ("library", "uses", "use", f" workspace that cuDNN {versions} told for"),
        ("unknown", "may be too low", "may be too low", ", by the workspace of"),
    ):
        found = [known for trace in traced if (known := getattr(trace, f"{name}_workspaces"))]
        if found:
            operators = map(difference.code, sorted({*chain.from_iterable(found)}))
            yield f"{_checks(found, one, several)}{what}: {', '.join(operators)}."
    if guessed := [trace for trace in traced if trace.guessed]:
        yield f"{_checks(guessed, 'is', 'are')} as reported{AT_MOST}."
    if apart := [trace.not_counted for trace in traced if trace.not_counted]:
        what = ", ".join(sorted({*chain.from_iterable(apart)}))
        yield f"{_checks(apart, 'does', 'do')} not count {what}."


def _checks(found: Sequence[object], one: str, several: str) -> str:
    return f"{counted(len(found), 'check')} {one if len(found) == 1 else several}"


def _difference(check: Check) -> difference.Difference:
    result, notes = check.result, []
    if result.outcome in _BY_HEADLINE:
        number = check.message.partition(f", {where_of(result.key)}: ")[0]
        notes.append(number if result.diagnosis is not None else check.headline)
    elif result.outcome not in _BY_CHANGE:
        notes.append(result.outcome.value)
    if result.comparison is not None:
        notes += difference.notes_on(result.comparison)
    return difference.Difference(
        check.nodeid,
        result.key.name,
        check.device,
        _group(result),
        result.changes,
        result.figures,
        "; ".join(notes),
        result.diagnosis,
    )


def _group(result: CheckResult) -> DifferenceKind:
    if result.outcome not in (Outcome.PASSED, Outcome.UPDATED):
        return _GROUPS.get(result.outcome, DifferenceKind.FAILED)
    return difference.group_of(result.comparison) if result.comparison else DifferenceKind.SAME


INDEX = "index.html"
_COLUMNS = 120
"""The length of a message's lines on a page, which scrolls where it is narrower."""
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.45 system-ui,sans-serif;margin:24px;"
    "background:light-dark(#fff,#0d1117);color:light-dark(#24292f,#e6edf3)}"
    "a{color:light-dark(#0969da,#58a6ff)}main{overflow-x:auto}"
    "table{border-collapse:collapse}th,td{text-align:left;padding:4px 14px 4px 0;"
    "border-bottom:1px solid #8884}td.number{text-align:right;font-variant-numeric:tabular-nums}"
    ".failed{color:light-dark(#cf222e,#ff7b72);font-weight:600}"
)


def page_name(check: Check) -> str:
    """Return the file of a check's page, the same in every process and on every system."""
    what = " ".join((check.nodeid, check.result.key.name, check.device))
    digest = hashlib.sha256(what.encode("utf-8", "surrogatepass")).hexdigest()[:10]
    return f"{_NO_NAME.sub('-', what).strip('-.')[-80:]}-{digest}.html"


def write_page(directory: Path, check: Check, profile: MemoryProfile) -> None:
    """Write the page of a check that failed; raises ``OSError`` where that cannot be."""
    from pytest_torchmem.profile.pictures.page import Content, page
    from pytest_torchmem.profile.profile import drawn, notes_of

    before = check.result.snapshot.before if check.result.snapshot is not None else None
    with layout.lines_of(_COLUMNS):
        said = message(check.result, verbose=True)
    text = page(
        Content(
            check.name,
            profile.timeline,
            profile.figures(),
            lines=[f"{profile.name}, torch {profile.torch_version}", check.result.told],
            notes=notes_of(profile),
            before=before.figures if before is not None else None,
            before_outline=before.timeline if before is not None else (),
            message="\n\n".join(part for part in (said, check.advice) if part),
            **drawn(profile),
        )
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / page_name(check)).write_text(text, encoding="utf-8", errors="replace")


def write_index(directory: Path, summary: Summary) -> None:
    """Write the index of a run's checks, failed ones first, then by growth; raises ``OSError``."""

    def place(check: Check) -> tuple[bool, int]:
        before, now = _peak_before(check), check.result.figures.get("peak")
        grown = now - before if before is not None and now is not None else 0
        return not check.result.failed, -grown

    checks = sorted(summary.checks, key=place)
    failed = sum(check.result.failed for check in checks)
    rows = "\n".join(_row(directory, check) for check in checks)
    title = f"{failed} of {len(checks)} memory checks failed"
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>\n"
        f"<main tabindex=0>\n<h1>{title}</h1>\n"
        "<table><tr><th>result</th><th>test</th><th>device</th><th>peak before</th><th>now</th>"
        f"<th>change</th></tr>\n{rows}\n</table>\n</main></body></html>\n"
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).write_text(text, encoding="utf-8", errors="replace")


def _row(directory: Path, check: Check) -> str:
    result = check.result
    name = escape(printable(check.name))
    if result.failed and (directory / page_name(check)).is_file():
        name = f'<a href="{escape(page_name(check), quote=True)}">{name}</a>'
    sizes = format_step(_peak_before(check), result.figures.get("peak"))
    told = result.failed or check.is_left_out
    said = result.told + (f": {check.headline}" if told and check.headline else "")
    outcome = f'<td class="{"failed" if result.failed else ""}">{escape(printable(said))}</td>'
    cells = "".join(f'<td class="number">{escape(size)}</td>' for size in sizes)
    return f"<tr>{outcome}<td>{name}</td><td>{escape(check.device)}</td>{cells}</tr>"


def _peak_before(check: Check) -> int | None:
    snapshot = check.result.snapshot
    return snapshot.before.figures.get("peak") if snapshot and snapshot.before else None


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
        "growth": _grown(result),
        "grew": [one._asdict() for one in (entry.grew if entry is not None else ())],
        "alive": alive_to_plain(alive) if alive is not None else None,
        "facts": {topic: dict(known) for topic, known in facts.items()},
        "workspaces": dict(trace.workspaces),
        **{name: list(getattr(trace, name)) for name in (*SAID_OF_TRACES, "warnings")},
        "cudnn": trace.cudnn,
        "message": check.message,
        "advice": check.advice,
        "file": check.location[0],
        "line": check.location[1],
    }


def _grown(result: CheckResult) -> dict[str, Any] | None:
    """Return what grew and why, ``None`` where nothing did."""
    diagnosis = result.diagnosis
    if diagnosis is None or result.outcome not in (Outcome.GREW, Outcome.OVER_BUDGET):
        return None
    found = diagnosis.difference
    return {
        "moment": found.moment,
        "before": found.before,
        "now": found.now,
        "why": why(diagnosis),
        "where": place(diagnosis),
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
    plain, comparison = asdict(replace(found, comparison=None)), found.comparison
    del plain["comparison"]
    return plain | {
        "changes": plain_changes(comparison.changes if comparison is not None else ()),
        "confirmed": found.confirmed,
        "parting": found.parting._asdict() if found.parting is not None else None,
        "untold": list(found.untold),
    }
