"""What grew, as a person would say it: the number, the cause, the place, rows that add up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pytest_torchmem.diagnosis.causes import Cause
from pytest_torchmem.diagnosis.diagnose import Diagnosis
from pytest_torchmem.diagnosis.difference import MomentDifference, Row, Total
from pytest_torchmem.figures import title
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.module_paths import fold, prefixes, unfold
from pytest_torchmem.profile.timeline import Origin
from pytest_torchmem.reports.layout import joined, width, wrapped
from pytest_torchmem.snapshots.alive import What
from pytest_torchmem.snapshots.compare import Change, main_change
from pytest_torchmem.units import format_size

MOST_ROWS = 6
_SIZE = 11
"""Columns of a change."""


def leading_change(changes: Sequence[Change], diagnosis: Diagnosis | None) -> Change | None:
    """Return the change that stands for all that grew: that of the moment that is explained."""
    moment = diagnosis.difference.moment if diagnosis is not None else ""
    return next((one for one in changes if one.figure == moment), None) or (
        main_change(changes) if changes else None
    )


def why(diagnosis: Diagnosis) -> str:
    """Return in one part of a sentence why memory grew, or else what is new."""
    if diagnosis.causes:
        cause, (operator, name) = diagnosis.causes[0], _function(diagnosis)
        said = operator if operator in cause.text else operator.removeprefix("aten::")
        said = rf"(?<![\w.:]){re.escape(said)}(?![\w.])"
        return re.sub(said, lambda _: name, cause.text, count=1) if name else cause.text
    row = diagnosis.leading_row
    if row is not None:
        return f"{describe(row)}"
    if diagnosis.difference.totals:
        return "what was alive is not recorded in the snapshot"
    return ""


def place(diagnosis: Diagnosis) -> str:
    """Return who allocates what grew: operator, module and line, and of a library's module the
    program's line that calls it.
    """
    operator, name = _function(diagnosis)
    row = diagnosis.leading_row
    if (made := diagnosis.origin) is not None:
        caller = _caller(diagnosis, made.module, made.line)
        module = fold(made.module)[0]
        if row is not None and row.what.module == module:
            module = row.module  # with the numbers of those that it is about
        made = made._replace(operator=name or operator)
        return joined(_place_of_origin(made, module), caller)
    if row is not None:
        caller = _caller(diagnosis, row.what.module, row.what.line)
        what = row.what._replace(source=name) if name else row.what
        return joined(place_of(what, row.module), caller)
    for total in diagnosis.difference.totals[:1]:
        return place_of(total.largest, total.module)
    return ""


def _function(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the operator to name, and both it and the function that the program calls there, ""
    where that is the operator.
    """
    origin, row = diagnosis.origin, diagnosis.leading_row
    if origin is not None:
        key = fold(origin.module)[0], origin.operator, origin.line
    elif row is not None and row.what.role != Role.GRADIENT_TEMPORARY.value:
        key = row.what.module, row.what.source, row.what.line
    else:
        return "", ""
    name = diagnosis.functions.get(key, "")
    return key[1], f"{name} ({key[1]})" if name else ""


def place_of(what: What | None, module: str) -> str:
    """Return an operator, its module and its line: ``aten::mm in GPT.blocks.*, model.py:23``."""
    if what is None:
        return module
    source = what.source or what.role
    return joined(f"{source} in {module}" if module else source, what.line)


def _caller(diagnosis: Diagnosis, module: str, line: str) -> str:
    """Return the program's line behind a library's, "" for a line of the program's own."""
    if found := diagnosis.library_lines.get((fold(module)[0], line)):
        return f"called in {found}"
    around = [fold(path)[0] for path in prefixes(module)]
    for path, caller in diagnosis.callers.items():
        own = caller.rpartition(":")[0] == line.rpartition(":")[0]
        if line and caller and not own and fold(path)[0] in around:
            return f"called in {caller}"
    return ""


def _place_of_origin(origin: Origin, module: str) -> str:
    inside = f" in {module}" if module else ""
    return joined(f"{origin.operator}{inside}", origin.line)


def describe(row: Row) -> str:
    """Return what became of equal allocations: ``12 × float32[8, 16] (was bfloat16[8, 16])``."""
    before, now = row.before, row.now
    if now is None:
        assert before is not None
        return f"{_times(row.count_before, before)}, {before.role}, gone"
    text = _times(row.count_now, now)
    if before is None:
        return f"{text}, {now.role}"
    was = before.tensor or format_size(before.nbytes)
    if row.count_before != row.count_now:
        was = f"{row.count_before} × {was}"
    return f"{text} (was {was}), {now.role}"


def _times(count: int, what: What) -> str:
    tensor = what.tensor or format_size(what.nbytes)
    return f"{count} × {tensor}" if count != 1 else tensor


def section(diagnosis: Diagnosis, most: int = MOST_ROWS) -> str:
    """Return what came and what went at the moment, largest first, with the sum of the rest."""
    found = diagnosis.difference
    if not found.rows and not found.totals:
        return ""
    head = f"What changed at the {title(found.moment)}"
    if not found.recorded:
        head += "; the snapshot, of an older version, has the modules alone"
        rows = list(_total_lines(found.totals[:most]))
        return "\n".join([wrapped(head), *rows])
    lines = [line for row in found.rows[:most] for line in row_lines(row)]
    return "\n".join([head, *lines, *_rest(found, most)])


def one_line_rows(diagnosis: Diagnosis, most: int = 10) -> Iterator[str]:
    """Yield a line for each of the largest rows, however long it is, and the sum of the rest."""
    found = diagnosis.difference
    for row in found.rows[:most]:
        what = joined(describe(row), place_of(row.what, row.module), separator=": ")
        yield f"{signed(row.change):>{_SIZE}}  {what}"
    yield from (line[2:] for line in _rest(found, most))


def rows_that_fit(diagnosis: Diagnosis, most: int = 10) -> Iterator[str]:
    """Yield the largest rows, each in one line if that has room, and the sum of the rest."""
    for row in diagnosis.difference.rows[:most]:
        yield from row_lines(row)
    yield from _rest(diagnosis.difference, most)


def row_lines(row: Row) -> Iterator[str]:
    """Yield the lines of a row: the change and what it is, and who allocated it."""
    return _two_lines(signed(row.change), describe(row), place_of(row.what, row.module))


def _two_lines(size: str, what: str, where: str) -> Iterator[str]:
    start = f"  {size:>{_SIZE}}  "
    text = f"{what}: {where}" if where else what
    if len(start) + len(text) <= width():
        yield f"{start}{text}"
        return
    indent = " " * len(start)
    for part in (what, where):
        if part:
            yield from wrapped(part, indent, start=start).split("\n")
            start = indent


def _rest(found: MomentDifference, most: int) -> Iterator[str]:
    left = found.rows[most:]
    more = sum(row.change for row in left)
    if left:
        noun = "row" if len(left) == 1 else "rows"
        yield f"  {signed(more):>{_SIZE}}  in {len(left)} more {noun}"
    if found.rest:
        yield f"  {signed(found.rest):>{_SIZE}}  in tensors too small to be in the snapshot"


def _total_lines(totals: Sequence[Total]) -> Iterator[str]:
    for total in totals:
        now = format_size(total.now)
        if total.before is None:
            size, what = "?", f"{now} now; in the snapshot not recorded"
        else:
            size = signed(total.now - total.before)
            what = f"{now} now, {format_size(total.before)} in the snapshot"
        largest = total.largest
        where = place_of(largest, unfold(total.module, "")) if largest else total.module
        yield from _two_lines(size, what, where)


def signed(change: int) -> str:
    """Return a change in bytes with its sign."""
    return f"+{format_size(change)}" if change > 0 else format_size(change)


def others(causes: Sequence[Cause]) -> Iterator[str]:
    """Yield the causes after the first, each with its place; those of the same row are one."""
    for number, cause in enumerate(causes):
        row = cause.row
        if not number or (row is not None and any(row is one.row for one in causes[:number])):
            continue
        where = place_of(row.what, row.module) if row is not None else ""
        if cause.origin is not None:
            where = _place_of_origin(cause.origin, fold(cause.origin.module)[0])
        yield wrapped(f"Also: {joined(cause.text, where, separator=': ')}")
