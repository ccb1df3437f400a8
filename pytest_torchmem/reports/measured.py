"""The messages of checks that a real GPU ran: the estimate is off, or what it counted grew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pytest_torchmem.reports.text import (
    change_text,
    circumstances,
    comparison_table,
    figure_name,
    in_sections,
    largest,
    size_texts,
    table,
    title,
)
from pytest_torchmem.snapshots.compare import Comparison, Verdict
from pytest_torchmem.snapshots.format import MEASURED
from pytest_torchmem.units import format_change, format_size

if TYPE_CHECKING:
    from pytest_torchmem.checks.result import Measurement, RealRun, Record

_MOST_SIZES = 5


def estimate_off(record: Record, run: RealRun, wrong: Sequence[str], most: str) -> str:
    """Return the message of a trace that a real GPU contradicts.

    ``wrong`` names the peaks that differ by more than ``most``.
    """
    found = run.measurement
    worst = max(wrong, key=lambda name: abs(found.estimate[name] - found.figures[name]))
    headline = (
        f"{title(record.key)}: the trace is not what {found.gpu} counts: {figure_name(worst)} "
        f"{format_size(found.estimate[worst])} traced, {format_size(found.figures[worst])} "
        f"measured, {difference(found, worst)}, beyond the {most} that "
        "--torchmem-measure-tolerance allows"
    )
    rows = [
        (
            figure_name(name),
            *size_texts(found.estimate.get(name), found.figures[name]),
            difference(found, name),
            "too much" if name in wrong else "",
        )
        for name in MEASURED
        if name in found.figures
    ]
    sections = [table(rows, ("", "traced", "measured", "difference", ""))]
    sections.extend(_apart(run))
    if run.unknown_workspaces:
        names = ", ".join(run.unknown_workspaces)
        sections.append(f"Not in the trace is what these kernels take for themselves: {names}")
    return in_sections(headline, sections)


def grew(record: Record, comparison: Comparison) -> str:
    """Return the message of a measured peak that grew beyond its tolerance."""
    assert record.measurement is not None
    worst = comparison.having(Verdict.GREW)
    if not worst:
        names = ", ".join(figure_name(c.figure) for c in comparison.having(Verdict.NOT_RUN))
        headline = (
            f"{title(record.key)}: not checked: {record.measurement.gpu} counted a {names} for the "
            "snapshot, and none was seen now"
        )
        return in_sections(headline, [comparison_table(comparison)])
    first = max(worst, key=lambda change: (change.now or 0) - (change.before or 0))
    step = change_text(first.before, first.now).lstrip("+")
    headline = (
        f"{title(record.key)}: measured on {record.measurement.gpu}, {figure_name(first.figure)} "
        f"grew by {step}, beyond its tolerance of {first.rule}"
    )
    return in_sections(headline, [comparison_table(comparison), *circumstances(comparison)])


def difference(found: Measurement, figure: str) -> str:
    """Return by how much the trace differs from what was measured, "" where one has no figure."""
    if figure not in found.estimate or figure not in found.figures:
        return ""
    return format_change(found.figures[figure], found.estimate[figure])


def _apart(run: RealRun) -> Iterable[str]:
    if run.only_measured:
        sizes = [
            f"  {format_size(nbytes)}" + (f", {number} times" if number > 1 else "")
            for nbytes, number in run.only_measured[:_MOST_SIZES]
        ]
        more = run.only_measured[_MOST_SIZES:]
        rest = sum(nbytes * number for nbytes, number in more)
        sizes += [f"  {format_size(rest)} in other sizes"] if rest else []
        yield "Alive at the highest peak on the GPU alone\n" + "\n".join(sizes)
    if run.only_traced:
        yield "Alive at the highest peak in the trace alone\n" + largest(run.only_traced)
