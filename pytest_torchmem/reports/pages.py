"""``--torchmem-html``: a page for each check that failed, and an index of all checks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.printable import printable
from pytest_torchmem.reports.layout import lines_of
from pytest_torchmem.reports.summary import Check, Summary
from pytest_torchmem.reports.text import message
from pytest_torchmem.units import format_step

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile

INDEX = "index.html"
_COLUMNS = 120
"""The length of a message's lines on a page, which scrolls where it is narrower."""
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.45 system-ui,sans-serif;margin:24px}"
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
    with lines_of(_COLUMNS):
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
    """Write the index of a run's checks, those that failed first, then by growth; raises
    ``OSError``.
    """
    checks = sorted(summary.checks, key=lambda check: (not check.result.failed, -_growth(check)))
    failed = sum(check.result.failed for check in checks)
    rows = "\n".join(_row(directory, check) for check in checks)
    title = f"{failed} of {len(checks)} memory checks failed"
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main>\n<h1>{title}</h1>\n"
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
    return f"<tr>{outcome}<td>{name}</td>{''.join(_cells(check, sizes))}</tr>"


def _peak_before(check: Check) -> int | None:
    snapshot = check.result.snapshot
    return snapshot.before.figures.get("peak") if snapshot and snapshot.before else None


def _growth(check: Check) -> int:
    before, now = _peak_before(check), check.result.figures.get("peak")
    return now - before if before is not None and now is not None else 0


def _cells(check: Check, sizes: Sequence[str]) -> Iterator[str]:
    yield f"<td>{escape(check.device)}</td>"
    for size in sizes:
        yield f'<td class="number">{escape(size)}</td>'
