"""What grew, as a person would say it: the number, the cause, the place, rows that add up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, TypeVar

from pytest_torchmem.figures import END, RESERVED, RETAINED, label
from pytest_torchmem.printable import counted, listed
from pytest_torchmem.profile.facts import UNCHANGED, UNREACHED, CodeChange
from pytest_torchmem.profile.module_paths import fold, prefixes
from pytest_torchmem.profile.timeline import Role
from pytest_torchmem.reports.layout import PLAIN, in_two_lines, joined, lines_of, width, wrapped
from pytest_torchmem.snapshots.alive import What
from pytest_torchmem.snapshots.compare import Change, main_change
from pytest_torchmem.snapshots.format import Entry, Told
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.checks.result import SnapshotResult
    from pytest_torchmem.diagnosis.causes import Cause
    from pytest_torchmem.diagnosis.diagnose import Diagnosis
    from pytest_torchmem.diagnosis.difference import Row

T = TypeVar("T")
MOST_ROWS = 10
_MOMENTS = {RETAINED: "after the forward pass", END: "at the end of the step"}
_WORTH = 100
"""The part of the largest row that a row has to have where there is little room."""
_SIZE = 11
"""Columns of a change."""
_MANY = 2
"""Shapes of one operator, or operators of one shape, beyond which they are one row."""
_SHOWN: dict[str, str] = {Role.EARLIER: "made before this step"}
"""Roles in other words than a snapshot has: there may have been no step before."""
_BEFORE_CALLS = (Role.PARAMETER, Role.BUFFER)
"""Roles of what no call of a module makes."""
_NOT_ALIVE = "not alive now"
"""At the moment: it may be made, and freed before it."""
_DIRECTORIES = re.compile(r"(?<=, )[^\s,]*/(?=[^\s/]+:\d[^:]*$)")
"""Those of the file that a place ends in."""
_NUMBERS = re.compile(r"(?<=\.)(\d+|\{[\d -]+\})(?![^\s.,])")
"""Those of modules in a path: ``2``, ``{0-3}``."""


@dataclass(frozen=True, slots=True)
class Section:
    """Rows below a title: a size, a description and the allocating operator each."""

    title: str
    rows: tuple[tuple[int, str, str], ...] = ()
    """The most important first."""
    rest: int = 0
    """The bytes of what no row names, and ``why`` none does."""
    why: str = ""
    are_changes: bool = True

    def text(self, most: int = MOST_ROWS, lines: int | None = None) -> str:
        """Return at most ``most`` rows that have room in ``lines``, and the sum of the others."""
        if not self.rows and not self.rest:
            return ""
        shown = [
            "\n".join(_two_lines(self._size(size), what, where)) for size, what, where in self.rows
        ]
        largest = max((abs(size) for size, *_ in self.rows), default=0)
        worth = sum(abs(size) * _WORTH >= largest for size, *_ in self.rows)
        number = min(most, len(shown) if lines is None else worth)
        head = wrapped(self.title)
        while lines is not None and number > 1:
            ends = number < len(shown) or bool(self.rest)
            if sum(text.count("\n") + 1 for text in (head, *shown[:number])) + ends <= lines:
                break
            number -= 1
        if lines is not None and number == 1:  # whose place has no room
            size, what, where = self.rows[0]
            shorter = (what, where), (what, ""), (what.rpartition(", ")[0] or what, "")
            texts = ["\n".join(_two_lines(self._size(size), *one)) for one in shorter]
            shown[0] = next((one for one in texts if one.count("\n") < lines - 2), texts[-1])
        return "\n".join([head, *shown[:number], *self._others(number)])

    def _others(self, shown: int) -> Iterator[str]:
        left = [size for size, *_ in self.rows[shown:]]
        more = f"in {counted(len(left), 'more row')}" if left else ""
        if words := " and ".join(filter(None, (more, self.why if self.rest else ""))):
            yield f"{self._size(sum(left) + self.rest):>{_SIZE}}  {words}"

    def _size(self, nbytes: int) -> str:
        return signed(nbytes) if self.are_changes else format_size(nbytes)


def leading_change(changes: Sequence[Change], diagnosis: Diagnosis | None) -> Change | None:
    """Return the change of the figure at whose moment the growth is explained."""
    moment = diagnosis.difference.moment if diagnosis is not None else ""
    return next((one for one in changes if one.figure == moment), None) or main_change(changes)


_OF_NO_TENSOR = (
    "no more tensors are alive then, but more blocks: tensors made before were of other sizes, in "
    "another order or on another stream, or there is no empty_cache()"
)


def why(diagnosis: Diagnosis) -> str:
    """Return in one part of a sentence why memory grew, or else what is new."""
    if diagnosis.told:
        return diagnosis.told[0].why
    if diagnosis.causes:
        cause, (operator, name) = diagnosis.causes[0], _function(diagnosis)
        said = operator if operator in cause.text else operator.removeprefix("aten::")
        said = rf"(?<![\w.:]){re.escape(said)}(?![\w.])"
        named = re.sub(said, lambda _: name, cause.text, count=1)
        return named if name and operator else cause.text
    row = diagnosis.leading_row
    if row is not None:
        return describe(row)
    found = diagnosis.difference  # of nothing now, too, where neither run knows
    if found.moment == RESERVED:
        return _OF_NO_TENSOR
    unknown = "what was alive is not recorded in the snapshot"
    return "" if found.recorded or not found.now else unknown


def place(diagnosis: Diagnosis) -> str:
    """Return operator, module and line of what grew; for a library's module the calling line."""
    if diagnosis.told:
        return diagnosis.told[0].where
    source, module, line = _allocated_by(diagnosis)
    said = why(diagnosis)
    leads = diagnosis.leads.get(diagnosis.place, ())
    is_news = bool(module) and any(line in one.places for one in diagnosis.changed)
    lines = [one for one in leads if one not in said and not is_news]
    lines = lines or [*filter(None, [_caller(diagnosis, module, line)])]
    called = f"called in {' from '.join(lines)}" if lines else ""
    return joined(_inside(source, module), line, called)


_MOST_CAUSES, _MOST_LINES_OF_CODE, _MOST_OF_ONE, _MOST_PLACES = 3, 14, 3, 6
CODE = "code that changed since the snapshot"


def told(diagnosis: Diagnosis | None) -> tuple[Told, ...]:
    """Return what is said of a growth, also for those who know less of it; nothing if unknown."""
    if diagnosis is None:
        return ()
    if diagnosis.told:
        return diagnosis.told
    found = diagnosis.difference
    moment = found.moment, found.before, found.now
    first = Told(*moment, why(diagnosis), place(diagnosis))
    others = (Told(*moment, *one) for one in _others(diagnosis.causes[:_MOST_CAUSES]))
    with lines_of(PLAIN):  # whatever the terminal: a snapshot may keep it
        code = code_of(diagnosis, _MOST_LINES_OF_CODE)
    changed = [Told(*moment, CODE, code)] if code else []
    return (first, *changed, *others) if first.why else ()


def code_of(diagnosis: Diagnosis, most: int) -> str:
    """Return the code that changed in at most ``most`` lines, and where what has no room is."""
    shown, left, places = list[str](), dict[str, set[int]](), list[str]()
    for change, number in zip(diagnosis.changed, _rows_told(diagnosis.changed, most), strict=True):
        rows = change.around(number) if number else ()
        shown += change.lines(number) if number else ()
        if UNREACHED not in change.where:
            changed = [one for one in change.rows if UNCHANGED not in one.text]
            numbers = {one.number for one in changed if one.sign == "+"}
            numbers = numbers or {one.number for one in changed}
            told = {one.number for one in rows if one.sign == "+" or not change.places}
            left.setdefault(change.file, set()).update(numbers - told)
    for file, lines in left.items():
        starts, ends = (sorted(one for one in lines if one + by not in lines) for by in (-1, 1))
        for start, end in zip(starts, ends, strict=True):
            places.append(f"{file}:{start}" + (f"-{end}" if end > start else ""))
    others = [f"and {listed(places, _MOST_PLACES)}"] if places else []
    return "\n".join([*shown, *others])


def _rows_told(changes: Sequence[CodeChange], most: int) -> list[int]:
    """Return how many rows of each change are told: as many as leave room for every change that is
    likely, or for every one if none is.
    """
    numbers, is_any_likely = list[int](), any(one.likely for one in changes)
    for of_one in range(max(most, _MOST_OF_ONE), _MOST_OF_ONE - 1, -1):
        numbers, room = [], most
        for change in changes:
            at_most = of_one + (len(change.rows) == of_one + 1)  # no single row is left out
            most_rows = min(at_most, room)
            texts = ((n, map(_of_code, change.lines(n))) for n in range(most_rows, 0, -1))
            heights = ((n, sum(one.count("\n") + 1 for one in text)) for n, text in texts)
            number, height = next((one for one in heights if one[1] <= room), (0, 0))
            numbers.append(number)
            room -= height
        left = (one for one, number in zip(changes, numbers, strict=True) if not number)
        if not any(one.likely or not is_any_likely for one in left):
            break
    return numbers


def _of_code(line: str) -> str:
    return wrapped(line, "        ", start="  ")


def explained(snapshot: SnapshotResult) -> Entry:
    """Return what a snapshot is to hold now, with why it grew, if that is known."""
    return replace(snapshot.entry, grew=told(snapshot.diagnosis))


def by_cause(found: Iterable[tuple[T, Diagnosis | None]]) -> dict[tuple[str, str], list[T]]:
    """Return what grew by why and where it did; without what is not known to have grown."""
    shared: dict[tuple[str, str], list[T]] = {}
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for one, diagnosis in found:
        if diagnosis is not None:
            own = why(diagnosis), place(diagnosis)
            shared.setdefault(first.setdefault(same_cause(*own), own), []).append(one)
    return shared


def same_cause(why: str, place: str) -> tuple[str, str]:
    """Return what is equal for causes in modules that differ in their numbers alone."""
    return why, _NUMBERS.sub("*", place)


def line_of(diagnosis: Diagnosis) -> str:
    """Return the program's line that allocates what grew, or calls the library that does."""
    _, module, line = _allocated_by(diagnosis)
    return _caller(diagnosis, module, line) or line


def _allocated_by(diagnosis: Diagnosis) -> tuple[str, str, str]:
    """Return operator, module and line of what stands for the growth."""
    operator, name = _function(diagnosis)
    row, made = diagnosis.leading_row, diagnosis.origin
    if made is not None:
        module = fold(made.module)[0]
        if row is not None and row.what.module == module:
            module = row.module  # with the numbers of those that it is about
        return name or operator, module, made.line
    if row is not None:
        return name or row.what.source or row.what.role, row.module, row.what.line
    return "", "", ""


def _function(diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the operator, and both it and the program's function, "" where they are the same."""
    origin, row = diagnosis.origin, diagnosis.leading_row
    if origin is not None:
        key = fold(origin.module)[0], origin.operator, origin.line
    elif row is not None and row.what.role != Role.GRADIENT_TEMPORARY:
        key = row.what.module, row.what.source, row.what.line
    else:
        return "", ""
    name = diagnosis.functions.get(key, "")
    return key[1], f"{name} ({key[1]})" if name and key[1] else name


def place_of(what: What, module: str) -> str:
    """Return an operator, its module and its line: ``aten::mm in GPT.blocks.*, model.py:23``."""
    return joined(_inside(what.source, module), what.line)


def _inside(source: str, module: str) -> str:
    return joined(source, module, separator=" in ")


def _caller(diagnosis: Diagnosis, module: str, line: str) -> str:
    """Return the program's line behind a library's, "" for a line of the program's own."""
    row = diagnosis.leading_row
    if diagnosis.origin is None and row is not None and row.what.role in _BEFORE_CALLS:
        return ""
    if found := diagnosis.library_lines.get((fold(module)[0], line)):
        return found
    around = [fold(path)[0] for path in prefixes(module)]
    for path, caller in diagnosis.callers.items():
        own = caller.rpartition(":")[0] == line.rpartition(":")[0]
        if line and caller and not own and fold(path)[0] in around:
            return caller
    return ""


def describe(row: Row) -> str:
    """Return what became of equal allocations: ``12 × float32[8, 16] (was bfloat16)``."""
    before, now = row.before, row.now
    if now is None:
        assert before is not None
        return joined(_times(row.count_before, before), _role(before), _NOT_ALIVE)
    text = _times(row.count_now, now)
    if before is None:
        return joined(text, _role(now))
    if row.count_before != row.count_now:
        was = f"{row.count_before} × {_tensor(before)}"
    elif "" in (before.dtype, now.dtype):
        was = _tensor(before)
    elif before.dtype != now.dtype:
        was = before.dtype if before.shape == now.shape else before.tensor
    else:
        was = str([*before.shape])
        if before.nbytes * prod(now.shape) != now.nbytes * prod(before.shape):
            was += f" in {format_size(before.nbytes)}"  # it is a part of what is alive
    return f"{text or _tensor(now)} (was {was}), {_role(now)}"


def _role(what: What) -> str:
    return _SHOWN.get(what.role, what.role)


def _times(count: int, what: What) -> str:
    """Return equal tensors, "" for one that is none and has no more to it than its bytes."""
    return what.tensor if count == 1 else f"{count} × {_tensor(what)}"


def _tensor(what: What) -> str:
    return what.tensor or format_size(what.nbytes)


def section(diagnosis: Diagnosis) -> Section:
    """Return what came and what went at the moment, with the sum of the rest: what came most, and
    then the largest first.
    """
    found = diagnosis.difference
    head = f"What changed {at(found.moment)}" if found.moment else ""
    if diagnosis.was_peak:
        head += f", which was in the {label(diagnosis.was_peak).removesuffix(' peak')} before"
    why = "in tensors too small for the snapshot"
    rows = rows_of(found.rows)
    first = max(rows, key=lambda row: row[0], default=None)
    rows = tuple(sorted(rows, key=lambda row: row is not first))
    return Section(head, rows, found.rest, why)


def at(figure: str) -> str:
    """Return the moment of a figure: "at the backward peak"."""
    return _MOMENTS.get(figure, f"at the {label(figure)}")


def rows_of(rows: Iterable[Row]) -> tuple[tuple[int, str, str], ...]:
    """Return rows of a difference as those of a section; as one row many shapes of one operator,
    and equal tensors of many operators of one module and file.
    """
    groups = [[row] for row in rows]
    for key in (_by_operator, _by_tensor):
        alike: dict[object, list[list[Row]]] = {}
        for first, *more in groups:
            is_one = bool(more or (first.before and first.now)) or not first.what.dtype
            alike.setdefault((first,) if is_one else key(first), []).append([first, *more])
        groups = [
            group
            for own in alike.values()
            for group in ([[*chain(*own)]] if len(own) > _MANY else own)
        ]
    told = [(sum(row.change for row in group), *_described(group)) for group in groups]
    return tuple(sorted(told, key=lambda one: -abs(one[0])))


def _by_operator(row: Row) -> tuple[object, ...]:
    return row.what.role, *row.place, row.what.source, row.what.dtype, row.now is None


def _by_tensor(row: Row) -> tuple[object, ...]:
    module, line = row.place
    return row.what.role, module, line.rpartition(":")[0], row.what.tensor, row.now is None


def _described(rows: Sequence[Row]) -> tuple[str, str]:
    """Return in words what became of allocations, equal or of several shapes, and where."""
    from pytest_torchmem.diagnosis.rules.operators import short_names

    row = max(rows, key=lambda one: one.what.nbytes)
    if not rows[1:]:
        return describe(row), place_of(row.what, row.module)
    what, number = row.what, sum(one.count_now or one.count_before for one in rows)
    several = len({one.what.tensor for one in rows}) > 1
    text = f"{number} × {f'{what.dtype}, {[*what.shape]} at most' if several else what.tensor}"
    module = row.module if len({one.numbers for one in rows}) == 1 else what.module
    operators = [*dict.fromkeys(one.what.source for one in rows)]
    file, _, _ = what.line.rpartition(":")
    numbers = {one.what.line.rpartition(":")[2] for one in rows}
    line = f"{file}:{listed(sorted(numbers, key=lambda one: (len(one), one)))}" if file else ""
    source = short_names(operators) if operators[1:] else what.source
    text = joined(text, _role(what), "" if row.now else _NOT_ALIVE)
    return text, joined(_inside(source, module), line)


def _two_lines(size: str, what: str, where: str) -> Iterator[str]:
    """Yield size, description and allocating operator, in two lines where one has no room."""
    start = f"{size:>{_SIZE}}  "
    together = joined(what, where, separator=": ")
    if len(start) + len(together) <= width():
        yield f"{start}{together}"
        return
    if len(start) + len(where) > width():
        where = _DIRECTORIES.sub("", where)
    yield from in_two_lines(start, what, where)


def signed(change: int) -> str:
    return f"+{format_size(change)}" if change > 0 else format_size(change)


def also(one: Told) -> str:
    """Return in words what is told beside the first cause: another one, or code that changed."""
    if one.why != CODE:
        return wrapped(f"Also: {joined(one.why, one.where, separator=': ')}")
    return _below(CODE.capitalize(), one.where)


def lines_of_code(head: str, diagnosis: Diagnosis, most: int) -> str:
    """Return the code that changed, with a head, in at most ``most`` lines; "" if none did."""
    texts = (_below(head, code_of(diagnosis, one)) for one in range(most, 0, -1))
    fitting = (one for one in texts if one.count("\n") < most)
    return next(fitting, _below(head, code_of(diagnosis, 1))) if diagnosis.changed else ""


def _below(head: str, text: str) -> str:
    """Return the text of code below a head, or beside it if it is one line."""
    lines = text.split("\n")
    if not lines[1:]:
        return wrapped(f"{head}: {text}")
    return "\n".join([f"{head}:", *map(_of_code, lines)])


def others(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what is told beside the first cause."""
    yield from map(also, told(diagnosis)[1:])


def _others(causes: Sequence[Cause]) -> Iterator[tuple[str, str]]:
    """Yield text and place of the causes after the first; those at the same place are one."""
    for number, cause in enumerate(causes):
        row, made = cause.row, cause.origin
        if not number or (row, made) in [(one.row, one.origin) for one in causes[:number]]:
            continue
        where = place_of(row.what, row.module) if row is not None else ""
        if made is not None:
            where = joined(_inside(made.operator, fold(made.module)[0]), made.line)
        yield cause.text, where
