"""The messages of checks that fail: what, where, by how much, what grew, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_torchmem.snapshots.compare import Change, Comparison, Verdict
from pytest_torchmem.units import format_change, format_size

if TYPE_CHECKING:
    from pytest_torchmem.checks.request import Overrun
    from pytest_torchmem.checks.result import Record
    from pytest_torchmem.fake_cuda.out_of_memory import OutOfMemoryError
    from pytest_torchmem.profile.timeline import Allocation
    from pytest_torchmem.snapshots.format import Key

_LARGEST = 5


def together(failures: Sequence[Record]) -> str:
    """Return one message for all devices of a check; what is said of several is said once, last."""
    said: dict[str, list[str]] = {}
    for record in failures:
        where = title(record.key)
        said.setdefault(record.message.removeprefix(f"{where}: "), []).append(where)
    messages = [f"{', '.join(where)}: {message}".split("\n\n") for message, where in said.items()]
    shared = [part for part in messages[0] if all(part in message for message in messages)]
    parts = [part for message in messages for part in message if part not in shared]
    parts += [*shared, *dict.fromkeys(record.advice for record in failures if record.advice)]
    return "\n\n".join(parts)


def headlines(failures: Sequence[Record]) -> str:
    """Return the first lines of the messages of all devices of a check as one line."""
    said: dict[str, list[str]] = {}
    for record in failures:
        where = title(record.key)
        first = record.message.partition("\n")[0].removeprefix(f"{where}: ")
        said.setdefault(first, []).append(where)
    return "; ".join(f"{', '.join(where)}: {first}" for first, where in said.items())


def grew(record: Record, comparison: Comparison) -> str:
    """Return the message of a check whose figures grew beyond their tolerance."""
    worst = comparison.having(Verdict.GREW)
    missing = comparison.having(Verdict.NOT_RUN)
    key, sections = record.key, [comparison_table(comparison)]
    if worst:
        first = max(_requested(worst), key=lambda change: (change.now or 0) - (change.before or 0))
        headline = (
            f"{title(key)}: {figure_name(first.figure)} grew by "
            f"{_step(first)}, beyond its tolerance of {first.rule}"
        )
    else:
        names = ", ".join(figure_name(change.figure) for change in missing)
        headline = f"{title(key)}: not checked: the snapshot has a {names}, and none was seen now"
    for change in missing if worst else ():
        sections.append(f"not checked: the snapshot has a {figure_name(change.figure)}, now none")
    sections.extend(_growths(record.grew))
    rules = {change.rule for change in worst}
    if len(rules) > 1:
        lines = (f"  {figure_name(change.figure)}: {change.rule}" for change in worst)
        sections.append("Tolerances that were broken\n" + "\n".join(lines))
    sections.extend(circumstances(comparison))
    return in_sections(headline, sections)


def shrank(record: Record, comparison: Comparison) -> str:
    """Return the message of a check whose figures shrank beyond their tolerance."""
    changes = comparison.having(Verdict.SHRANK)
    most = min(_requested(changes), key=lambda change: (change.now or 0) - (change.before or 0))
    headline = (
        f"{title(record.key)}: {figure_name(most.figure)} shrank by "
        f"{_step(most).lstrip('-')}, beyond its tolerance of {most.rule}"
    )
    sections = [comparison_table(comparison), *circumstances(comparison)]
    return in_sections(headline, sections)


def _requested(changes: Sequence[Change]) -> Sequence[Change]:
    """Leave out the reserved peak where others changed too: it follows them, by segments."""
    return [change for change in changes if change.figure != "reserved_peak"] or changes


def above_cap(record: Record, changes: Sequence[Change], most: str) -> str:
    """Return the message of growth that an update was told not to accept."""
    rows = [
        (figure_name(c.figure), *size_texts(c.before, c.now), change_text(c.before, c.now))
        for c in changes
    ]
    headline = (
        f"{title(record.key)}: grew by more than the {most} that --torchmem-update-max accepts"
    )
    return in_sections(headline, [table(rows, ("", "snapshot", "now", "change"))])


def missing(record: Record, renamed: Key | None, moved_from: str = "") -> str:
    """Return the message of a check that has no snapshot yet."""
    headline = f"{title(record.key)}: there is no snapshot of this check in {record.file}"
    sections = []
    if renamed is not None:
        sections.append(
            f"That file has an entry of {renamed.test}, a test that is gone, for the same workload."
            " If the test was renamed, an update of the whole file moves the entry and keeps what"
            " was written into it",
        )
    if moved_from:
        sections.append(
            f"{moved_from} has the same check, and its test module is gone. If the module was"
            " renamed, an update moves its entries and keeps what was written into them",
        )
    return in_sections(headline, sections)


def unknown_bytes(record: Record) -> str:
    """Return the message of a profile that is not sure of all its bytes (``--torchmem-strict``)."""
    lines = "\n".join(f"  {warning}" for warning in record.warnings)
    return in_sections(f"{title(record.key)}: the profile does not know all bytes", [lines])


def does_not_fit(record: Record, error: OutOfMemoryError) -> str:
    """Return the message of a trace that ran out of its GPU's memory."""
    gpu = error.gpu
    headline = (
        f"{title(record.key)}: does not fit on {gpu.name}, which has {format_size(gpu.memory)}: "
        f"{error.request}"
    )
    said = str(error).partition("\n")[0].partition(" If reserved but")[0]
    return in_sections(headline, [f"torch would have said\n  {said}", _alive(error)])


def _alive(error: OutOfMemoryError) -> str:
    return "Largest then\n" + largest(error.live) if error.live else "Nothing was alive then"


def nothing_there(record: Record) -> str:
    """Return the message of a target that used no memory of the device at all."""
    return (
        f"{title(record.key)}: not checked: nothing was ever allocated on {record.key.device}. "
        "Put the model and its inputs there, or name the device that is meant, such as "
        'device="cpu", in the marker or the check'
    )


def over_budget(
    record: Record,
    over: Sequence[Overrun],
    contents: Mapping[str, Sequence[Allocation]],
    how: str = "",
) -> str:
    """Return the message of limits that were not kept, with what is largest at the peak.

    ``how`` tells how the figures came about, where not by a trace.
    """
    lines, sections = [], []
    for overrun in over:
        name, limit = figure_name(overrun.limit.figure), overrun.limit
        if overrun.value is None:
            lines.append(f"not checked: a limit is set for the {name}, which did not run")
            continue
        by = format_change(limit.nbytes, overrun.value).lstrip("+")
        written = limit.text if any(unit in limit.text for unit in "Bb") else ""
        size = format_size(limit.nbytes)
        limited = written or size
        lines.append(f"{name} {format_size(overrun.value)} exceeds the budget of {limited} by {by}")
    allocations = _at_peak(over, contents)
    if allocations:
        sections.append("Largest at that peak\n" + largest(allocations))
    return in_sections(f"{title(record.key)}: {how}" + "; ".join(lines), sections)


def explained(comparison: Comparison) -> list[Change]:
    """Return the change whose growth is worth explaining: the largest, of a phase if it is one.

    The overall peak is one of the phases' peaks, so it is left out where that phase is there.
    """
    found = sorted(
        comparison.having(Verdict.GREW), key=lambda change: (change.before or 0) - (change.now or 0)
    )
    values = {change.now for change in found if change.figure != "peak"}
    phases = [
        change
        for change in found
        if change.figure.endswith("peak")
        and change.figure != "reserved_peak"
        and not (change.figure == "peak" and change.now in values)
    ]
    return phases[:1]


def title(key: Key) -> str:
    """Return what was checked, in one line: the name of the check and the device."""
    return f"{key.name}, {key.where}" if key.name else key.where


def figure_name(figure: str) -> str:
    """Return a figure's name as people read it: "forward peak", "reserved peak"."""
    return {"retained": "memory retained after the forward", "peak": "peak"}.get(
        figure, figure.replace("_", " ")
    )


def change_text(before: int | None, now: int | None) -> str:
    """Return a change as text, empty where a side is missing."""
    return format_change(before, now) if before is not None and now is not None else ""


def comparison_table(comparison: Comparison) -> str:
    """Return every figure of a comparison, with what is too much of it."""
    rows = []
    for change in comparison.changes:
        mark = {
            Verdict.GREW: "too much",
            Verdict.SHRANK: "less",
            Verdict.NOT_RUN: "did not run",
            Verdict.NEW: "new",
        }.get(change.verdict, "")
        allowed = f"±{format_size(change.allowed)}" if change.rule else ""
        step = change_text(change.before, change.now)
        name = change.figure.replace("_", " ")
        rows.append((name, *size_texts(change.before, change.now), step, allowed, mark))
    return table(rows, ("", "snapshot", "now", "change", "allowed", ""))


def _growths(found: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    by_peak: dict[str, list[tuple[str, ...]]] = {}
    for growth in found:
        sizes = size_texts(growth["before"], growth["now"])
        step = format_size(growth["now"] - growth["before"])
        row = (growth["what"], growth["name"], *sizes, f"+{step}", growth["detail"], growth["line"])
        by_peak.setdefault(growth["peak"], []).append(row)
    for peak, rows in by_peak.items():
        headers = ("", "", "snapshot", "now", "change", "mostly", "made at")
        yield f"What grew at the {figure_name(peak)}\n{table(rows, headers)}"


def circumstances(comparison: Comparison) -> Iterable[str]:
    """Return what else is different and may be the cause: the workload, torch."""
    if comparison.workload_changed:
        yield (
            "The workload is another one than in the snapshot: the shapes or dtypes of the inputs, "
            "or the parameters' bytes, differ"
        )
    if comparison.torch_changed:
        yield (
            f"The snapshot was taken with torch {comparison.torch_before}, this is torch "
            f"{comparison.torch_now}: the change may come from torch"
        )


def _at_peak(
    over: Sequence[Overrun], contents: Mapping[str, Sequence[Allocation]]
) -> Sequence[Allocation]:
    for overrun in over:
        if overrun.value is not None and overrun.limit.figure in contents:
            return contents[overrun.limit.figure]
    sums = {peak: sum(a.nbytes for a in found) for peak, found in contents.items()}
    highest = max(sums, key=lambda peak: sums[peak], default=None)
    return contents[highest] if highest is not None else ()


def largest(allocations: Sequence[Allocation]) -> str:
    """Return the first of ``allocations``, which are in order, and the sum of the rest."""
    from pytest_torchmem.profile.tables import allocation_rows

    rows = allocation_rows(allocations[:_LARGEST])
    rest = allocations[_LARGEST:]
    if rest:
        total = format_size(sum(a.nbytes for a in rest))
        rows.append((total, f"{len(rest)} more", "", "", ""))
    return table(rows, ("", "kind", "what", "operator", "made at"))


def _step(change: Change) -> str:
    return change_text(change.before, change.now).lstrip("+")


def size_texts(*sizes: int | None) -> list[str]:
    """Return sizes as people read them, "-" where there is none."""
    return ["-" if size is None else format_size(size) for size in sizes]


def table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table, indented; columns of sizes are on the right."""
    from tabulate import tabulate

    # Columns that are empty in every row say nothing.
    used = [i for i in range(len(headers)) if any(row[i] for row in rows)]
    sizes = ("snapshot", "now", "change", "allowed", "traced", "measured", "difference")
    text = tabulate(
        [[row[i] for i in used] for row in rows],
        headers=[headers[i] for i in used],
        colalign=["right" if headers[i] in sizes else "left" for i in used],
        tablefmt="plain",
        disable_numparse=True,
    )
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def in_sections(headline: str, sections: Iterable[str]) -> str:
    """Return a message: a headline, and sections below it."""
    return "\n\n".join([headline, *sections])
