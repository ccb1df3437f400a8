"""Differences as Markdown, for a pull request's comment or a job summary."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from pytest_torchmem.figures import label
from pytest_torchmem.printable import printable, printable_lines
from pytest_torchmem.reports import growth
from pytest_torchmem.reports.difference import Difference, DifferenceKind, grouped
from pytest_torchmem.reports.layout import PLAIN, joined, lines_of
from pytest_torchmem.units import format_size, format_step

_MARKUP = re.compile(r"[\\`*_{}\[\]~|!]")
_MENTION = re.compile(r"[@#]|://|(?<=www)\.")
MARKER = "<!-- pytest-torchmem -->"
"""By this line a workflow finds its own earlier comment."""
_MOST = 50
_MOST_TOLD = 5
_FOLDED = (DifferenceKind.WITHIN, DifferenceKind.NEW, DifferenceKind.GONE)


def render(
    found: Sequence[Difference],
    base: str = "snapshot",
    head: str = "now",
    footer: Iterable[str] = (),
) -> str:
    """Return a report: a verdict in one line, then a table per kind of difference."""
    groups = grouped(found)
    lines = [MARKER, "", f"### Memory: {verdict(groups)}", ""]
    for group, members in groups.items():
        if group is DifferenceKind.SAME:
            continue
        table = _table(members, base, head)
        if group in _FOLDED:
            title = f"{group.value} ({len(members)})"
            lines += [f"<details><summary>{title}</summary>", "", *table, "", "</details>", ""]
        else:
            lines += [f"**{group.value} ({len(members)})**", "", *table, ""]
            lines += _what_changed(members)
    if DifferenceKind.SAME in groups:
        lines += [f"{len(groups[DifferenceKind.SAME])} unchanged.", ""]
    lines += [line for part in footer for line in (part, "")]
    return "\n".join(lines).rstrip() + "\n"


def verdict(groups: dict[DifferenceKind, list[Difference]]) -> str:
    """Return the groups' sizes in one line: "2 grew, 1 shrank, 40 unchanged"."""
    words = {
        DifferenceKind.FAILED: "failed",
        DifferenceKind.GREW: "grew",
        DifferenceKind.SHRANK: "shrank",
        DifferenceKind.WITHIN: "changed within tolerance",
        DifferenceKind.NEW: "new",
        DifferenceKind.GONE: "gone",
        DifferenceKind.SAME: "unchanged",
    }
    parts = [f"{len(members)} {words[group]}" for group, members in groups.items()]
    return ", ".join(parts) if parts else "no checks"


def _table(members: Sequence[Difference], base: str, head: str) -> list[str]:
    single = members[0].group in (DifferenceKind.NEW, DifferenceKind.GONE)
    if single:
        lines = ["| test | device | forward | backward | peak |", "|---|---|---:|---:|---:|"]
    else:
        lines = [
            f"| test | device | figure | {plain(base)} | {plain(head)} | change | |",
            "|---|---|---|---:|---:|---:|---|",
        ]
    for difference in members[:_MOST]:
        lines.append(_single(difference) if single else _changed(difference))
    if len(members) > _MOST:
        lines.append(f"| … and {len(members) - _MOST} more |" + " |" * (4 if single else 6))
    return lines


def _changed(difference: Difference) -> str:
    change = difference.main
    if change is None:
        cells = ["", "", "", ""]
    else:
        sizes = format_step(change.before, change.now)
        cells = [label(change.figure), *sizes[:2], sizes[2] or "did not run"]
    note = joined(_why(difference), plain(difference.note), separator="; ")
    return _cells(_name(difference), plain(difference.device), *cells, note)


def _why(difference: Difference) -> str:
    """Return why memory grew, and where, if it can be told."""
    if difference.diagnosis is None:
        return ""
    place = growth.place(difference.diagnosis)
    why = growth.why(difference.diagnosis)
    return joined(plain(why), code(place) if place else "", separator=": ")


def _what_changed(members: Sequence[Difference]) -> list[str]:
    """Return what came and went, of the first test that shows it; folded."""
    lines: list[str] = []
    told: set[tuple[str, str]] = set()
    for difference in members:
        found = difference.diagnosis
        if found is None or not found.difference.rows or len(told) >= _MOST_TOLD:
            continue
        cause = growth.why(found), growth.place(found)
        if cause in told:
            continue
        told.add(cause)
        with lines_of(PLAIN):
            rows = printable_lines(growth.section(found).text())
        title = escape(printable(f"{difference.title}, {difference.device}"))
        title = f"What changed: {title}"
        block = fenced(rows)
        lines += [f"<details><summary>{title}</summary>", "", block, "", "</details>"]
        lines.append("")
    return lines


def _single(difference: Difference) -> str:
    figures = difference.figures or {}
    sizes = (format_size(figures.get(name)) for name in ("forward_peak", "backward_peak", "peak"))
    return _cells(_name(difference), plain(difference.device), *sizes)


def _name(difference: Difference) -> str:
    name = code(difference.test)
    return f"{name} · {plain(difference.name)}" if difference.name else name


def plain(text: str) -> str:
    """Return ``text`` so that it is shown as it is: no markup, HTML, link or mention of anybody."""
    escaped = _MARKUP.sub(r"\\\g<0>", escape(printable(text), quote=False))
    return _MENTION.sub("\\g<0>&#8203;", escaped)


def fenced(text: str) -> str:
    """Return lines as a block of code, also where they hold backticks themselves."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def code(text: str) -> str:
    """Return ``text`` as code on one line, also where it holds backticks itself."""
    text = printable(text)
    fence = "`"
    while fence in text:
        fence += "`"
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def _cells(*cells: str) -> str:
    escaped = (re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells)
    return f"| {' | '.join(escaped)} |"
