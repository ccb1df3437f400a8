"""What differs between a base and a head, grouped for people: the rows of every comparison.

As Markdown they are for the comment on a pull request, or the summary of a job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING

from pytest_torchmem.figures import label
from pytest_torchmem.printable import first_of, printable, printable_lines
from pytest_torchmem.reports import growth
from pytest_torchmem.reports.layout import PLAIN, joined, lines_of
from pytest_torchmem.snapshots.compare import Change, Comparison, Verdict, compare, main_change
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.tolerance import Level, parse_rules
from pytest_torchmem.units import format_change, format_size, format_step

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.diagnose import Diagnosis


class DifferenceKind(str, Enum):
    """The kinds of differences, in the order in which people want to see them."""

    FAILED = "Failed"
    GREW = "Grew beyond the tolerance"
    SHRANK = "Shrank beyond the tolerance"
    WITHIN = "Changed within the tolerance"
    NEW = "New"
    GONE = "Gone"
    SAME = "Unchanged"


@dataclass(frozen=True, slots=True)
class Difference:
    """One check on one device, in the base and in the head."""

    test: str
    """The test as people find it: file and test id."""
    name: str
    device: str
    group: DifferenceKind
    changes: tuple[Change, ...] = ()
    figures: Mapping[str, int] | None = None
    """The figures of a check that only one side has."""
    note: str = ""
    diagnosis: Diagnosis | None = None
    """What grew and why, where both sides say what was alive."""

    @property
    def title(self) -> str:
        return f"{self.test} · {self.name}" if self.name else self.test

    @property
    def main(self) -> Change | None:
        """The change that stands for all: one that broke its tolerance, or the largest."""
        if self.group is DifferenceKind.GREW:
            verdicts = (Verdict.GREW, Verdict.NOT_RUN)
            return growth.leading_change(
                [c for c in self.changes if c.verdict in verdicts], self.diagnosis
            )
        shrank = [c for c in self.changes if c.verdict is Verdict.SHRANK]
        return main_change(shrank if self.group is DifferenceKind.SHRANK else self.changes)

    @property
    def step(self) -> int:
        """The bytes by which it changed, by the change that stands for all."""
        main = self.main
        if main is None or main.before is None or main.now is None:
            return 0
        return main.now - main.before


Entries = Mapping[tuple[str, Key], Entry]
"""Entries by test file, relative to the root, and key."""


def differences(base: Entries, head: Entries, option: Level) -> list[Difference]:
    """Return what differs between the entries of two revisions or reports, worst first.

    An entry's own tolerance, as the head has it, wins over ``option``, as it does in a test run.
    """
    from pytest_torchmem.diagnosis.diagnose import diagnose

    found = []
    for file, key in sorted({**base, **head}):
        before, now = base.get((file, key)), head.get((file, key))
        where = f"{file}::{key.test}" if file else key.test
        device = f"{key.where}, torch {key.torch_series}" if key.torch_series else key.where
        one = partial(Difference, where, key.name, device)
        if now is None:
            found.append(one(DifferenceKind.GONE, figures=base[file, key].figures))
            continue
        if before is None:
            found.append(one(DifferenceKind.NEW, figures=now.figures))
            continue
        own = parse_rules(now.tolerance, "the entry's own tolerance")
        comparison = compare(before, now, [own, option])
        notes = notes_on(comparison)
        if now.reason and now.reason != before.reason:
            notes.append(now.reason)
        moment = comparison.grown_moment if before.alive and now.alive else ""
        why = diagnose(before, now, moment) if moment else None
        group, note = group_of(comparison), "; ".join(notes)
        found.append(one(group, comparison.changes, now.figures, note, why))
    return in_order(found)


def notes_on(comparison: Comparison) -> list[str]:
    """Return what else is different: the workload, torch."""
    notes = ["different workload"] if comparison.workload_changed else []
    if comparison.torch_before != comparison.torch_now:
        notes.append(f"torch {comparison.torch_before} → {comparison.torch_now}")
    return notes


def group_of(comparison: Comparison) -> DifferenceKind:
    if comparison.grew:
        return DifferenceKind.GREW
    if comparison.shrank:
        return DifferenceKind.SHRANK
    return DifferenceKind.WITHIN if comparison.having(Verdict.WITHIN) else DifferenceKind.SAME


def in_order(found: Iterable[Difference]) -> list[Difference]:
    """Return differences by group, and in each the largest change first."""
    groups = list(DifferenceKind)
    return sorted(found, key=lambda d: (groups.index(d.group), -abs(d.step), d.test, d.device))


def failing(difference: Difference) -> bool:
    """Tell whether a gate must not let ``difference`` through."""
    return difference.group in (DifferenceKind.FAILED, DifferenceKind.GREW)


def grouped(found: Sequence[Difference]) -> dict[DifferenceKind, list[Difference]]:
    """Return differences by group, in order, without empty groups."""
    return {
        group: members
        for group in DifferenceKind
        if (members := [difference for difference in found if difference.group is group])
    }


_MARKUP = re.compile(r"[\\`*_{}\[\]~|!]")
_MENTION = re.compile(r"[@#]|://|(?<=www)\.")
MARKER = "<!-- pytest-torchmem -->"
"""By this line a workflow finds its own earlier comment."""
_MOST = 50
_MOST_TOLD = 5
_LONGEST = 60_000
"""Characters beyond which causes are left out: a comment of GitHub has at most 65,536."""
_FOLDED = (DifferenceKind.WITHIN, DifferenceKind.NEW, DifferenceKind.GONE)


def render(
    found: Sequence[Difference],
    base: str = "snapshot",
    head: str = "now",
    footer: Iterable[str] = (),
    *,
    title: str = "Memory",
) -> str:
    """Return a report: a verdict in one line, then a table per kind of difference."""
    groups = grouped(found)
    lines = [MARKER, "", f"### {plain(title)}: {verdict(groups)}", ""]
    for group, members in groups.items():
        if group is DifferenceKind.SAME:
            continue
        table = _table(members, base, head)
        if group in _FOLDED:
            title = f"{group.value} ({len(members)})"
            lines += [f"<details><summary>{title}</summary>", "", *table, "", "</details>", ""]
        else:
            changed = _what_changed(members)
            left = _LONGEST - sum(map(len, (*lines, *table, *changed)))
            lines += [f"**{group.value} ({len(members)})**", "", *table, ""]
            lines += [*_cut(members, left), *changed]
    if DifferenceKind.SAME in groups:
        lines += [f"{len(groups[DifferenceKind.SAME])} unchanged.", ""]
    lines += [line for part in footer for line in (part, "")]
    return "\n".join(lines).rstrip() + "\n"


def verdict(groups: dict[DifferenceKind, list[Difference]]) -> str:
    """Return the groups' sizes in one line: "2 grew, 1 shrank, 40 unchanged"."""
    words = {DifferenceKind.WITHIN: "changed within tolerance", DifferenceKind.SAME: "unchanged"}
    named = ((words.get(group, group.name.lower()), members) for group, members in groups.items())
    parts = [f"{len(members)} {name}" for name, members in named]
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
    lines += (_row(difference, single=single) for difference in members[:_MOST])
    if len(members) > _MOST:
        lines.append(f"| … and {len(members) - _MOST} more |" + " |" * (4 if single else 6))
    return lines


def _cut(members: Sequence[Difference], characters: int) -> list[str]:
    """Return the causes of what the table has no row for, each once, in so many characters."""
    shared: dict[str, list[Difference]] = {}
    shown = {_note(one) for one in members[:_MOST]} - {""}
    for one in members[_MOST:]:
        why = _note(one)
        shared.setdefault("causes that stand above" if why in shown else why, []).append(one)
    lines: list[str] = []
    for why, alike in shared.items():
        first, change = alike[0], alike[0].main
        size = format_change(change.before, change.now) if change is not None else ""
        name = first_of([f"{_name(first)}, {plain(first.device)}", *alike[1:]])
        lines.append(f"- {joined(joined(name, size), why, separator=': ')}")
    kept = sum(length <= characters for length in accumulate(map(len, lines)))
    if kept < len(lines):
        lines[kept:] = [f"- … and {len(lines) - kept} more causes"]
    return [f"The {len(members) - _MOST} without a row, by cause:", "", *lines, ""] if lines else []


def _row(difference: Difference, *, single: bool) -> str:
    """Return a row of Markdown: of a ``single`` side the peaks, of both the figure that changed."""
    change, figures = difference.main, difference.figures or {}
    cells = [_name(difference), plain(difference.device)]
    if single:
        peaks = ("forward_peak", "backward_peak", "peak")
        cells += (format_size(figures.get(name)) for name in peaks)
    elif change is None:
        cells += ("", "", "", "", _note(difference))
    else:
        sizes = format_step(change.before, change.now)
        cells += (label(change.figure), *sizes[:2], sizes[2] or "did not run", _note(difference))
    escaped = (re.sub(r"(?<!\\)\|", r"\|", cell) for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _note(difference: Difference) -> str:
    """Return why memory grew, and where, if it can be told, and what else there is to say."""
    parts = (
        joined(plain(one.why), "".join(map(code, one.where.splitlines()[:1])), separator=": ")
        for one in growth.told(difference.diagnosis)
    )
    return joined(joined(*parts, separator="; also "), plain(difference.note), separator="; ")


def _what_changed(members: Sequence[Difference]) -> list[str]:
    """Return the code that changed and what came and went, of the first that shows it, folded."""
    lines: list[str] = []
    shown = ((one, one.diagnosis) for one in members if one.diagnosis)
    found = growth.by_cause(pair for pair in shown if pair[1].difference.rows)
    for difference, *_ in [*found.values()][:_MOST_TOLD]:
        assert difference.diagnosis is not None
        with lines_of(PLAIN):
            rows = printable_lines(growth.section(difference.diagnosis).text())
        title = escape(printable(f"{difference.title}, {difference.device}"))
        summary = f"<details><summary>What changed: {title}</summary>"
        told = growth.told(difference.diagnosis)
        texts = (one.where.splitlines() for one in told if one.why == growth.CODE)
        diffs = ("\n".join(line.removeprefix("  ") for line in text) for text in texts)
        blocks = [*(fenced(printable_lines(one), "diff") for one in diffs), fenced(rows)]
        lines += [summary, "", "\n\n".join(blocks), "", "</details>", ""]
    return lines


def _name(difference: Difference) -> str:
    name = code(difference.test)
    return f"{name} · {plain(difference.name)}" if difference.name else name


def plain(text: str) -> str:
    """Return ``text`` so that it is shown as it is: no markup, HTML, link or mention of anybody."""
    escaped = _MARKUP.sub(r"\\\g<0>", escape(printable(text), quote=False))
    return _MENTION.sub("\\g<0>&#8203;", escaped)


def fenced(text: str, language: str = "") -> str:
    """Return lines as a block of code, also where they hold backticks themselves."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def code(text: str) -> str:
    """Return ``text`` as code on one line, also where it holds backticks itself."""
    text = printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"
