"""The memory and the work of each operator of a step, its forward and its backward in one row."""

from __future__ import annotations

import csv
import io
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from heapq import nlargest
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from pytest_torchmem.printable import Tabular, printable
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.timeline import (
    Kind,
    OperatorCall,
    OperatorStep,
    Phase,
    Timeline,
    operator_steps,
    without_collections,
)
from pytest_torchmem.units import format_count, format_size

_NO_ACTIVATIONS = frozenset({Kind.PARAMETER, Kind.BUFFER})
_BASELINE = "(before the step)"
_OUTSIDE = "(outside of operators)"


@dataclass(slots=True)
class NodeRow:
    """One operator, or several that stand together: bytes by storage, operations by call.

    ``fwd`` columns are of the operator itself, whatever phase it ran in, and ``bwd`` columns of the
    operators that its autograd node called. What only the backward has (the node of a view, of
    a custom function, of an accumulated gradient) is a row of its own, named by its node.
    """

    phase: str
    module: str
    operator: str
    line: str
    calls: int = 0
    fwd_in: int = 0
    """Activations that it reads; views count as what they are views of, parameters not at all."""
    fwd_in_saved: int = 0
    """The part of ``fwd_in`` that its backward reads."""
    fwd_saved: int = 0
    """What the backward reads of what was there when the operator returned, outputs included."""
    fwd_tmp: int = 0
    """What it holds at its peak beyond what is alive when it returns; of several, the most."""
    fwd_out: int = 0
    """What it makes and leaves alive."""
    fwd_out_saved: int = 0
    """The part of ``fwd_out`` that stays because its own node or a user's node saved it."""
    fwd_peak: int = 0
    """The most that is alive on the device while it runs; of several, the most."""
    bwd_tmp: int = 0
    bwd_out: int = 0
    bwd_peak: int = 0
    fwd_flops: int = 0
    bwd_flops: int = 0
    fwd_moved: int = 0
    """Bytes that its kernels read and write, each argument and output once."""
    bwd_moved: int = 0
    node: str = ""
    """The node of the graph, where one was run node by node."""


COLUMNS = tuple(entry.name for entry in fields(NodeRow))
_MOST = ("fwd_tmp", "fwd_peak", "bwd_tmp", "bwd_peak")
_COLUMNS_OF = attrgetter(*COLUMNS)
_TEXTS = ("phase", "module", "operator", "line", "node")
_SUMS = ("calls", "fwd_flops", "bwd_flops", "fwd_moved", "bwd_moved")


class _Storages(NamedTuple):
    """What the bytes of a row are made of: allocations as events number them, each once."""

    fwd_in: Collection[int] = ()
    fwd_in_saved: Collection[int] = ()
    fwd_saved: Collection[int] = ()
    fwd_out: Collection[int] = ()
    fwd_out_saved: Collection[int] = ()
    bwd_out: Collection[int] = ()


class NodeTable(Tabular):
    """The operators of a step in order; every event of the timeline is in one row.

    ``fwd_peak`` of the forward's rows and ``bwd_peak`` of all rows have the peaks of the phases as
    their largest; ``peaks()`` returns them.
    """

    def __init__(
        self, rows: Sequence[NodeRow], storages: Sequence[_Storages], sizes: Sequence[int]
    ) -> None:
        self.rows = tuple(rows)
        self._storages = tuple(storages)
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[NodeRow]:
        return iter(self.rows)

    def peaks(self) -> dict[str, int]:
        """Return the peak of each phase that ran, in bytes, by the names of a profile's figures."""
        found: dict[str, int] = {}
        for row in self.rows:
            for phase, peak in ((row.phase, row.fwd_peak), ("backward", row.bwd_peak)):
                if peak or phase == row.phase:
                    found[phase] = max(found.get(phase, 0), peak)
        peaks = {f"{name}_peak": peak for name, peak in found.items() if name in _PHASES_SHOWN}
        return peaks | {"peak": max(found.values(), default=0)}

    def total(self) -> NodeRow:
        """Return all rows in one: storages counted once, the highest of peaks and temporaries."""
        return next(iter(self._regrouped(lambda row: ()).rows), NodeRow("", "", "", ""))

    def by_module(self) -> NodeTable:
        """Return a row for each module, by its path."""
        return self._regrouped(lambda row: (row.phase, row.module))

    def by_operator(self) -> NodeTable:
        """Return a row for each operator, by its name."""
        return self._regrouped(lambda row: (row.phase, row.operator))

    def by_node(self) -> NodeTable:
        """Return a row for each node of a graph that was run node by node."""
        return self._regrouped(lambda row: (row.node,))

    def folded(self) -> NodeTable:
        """Return a row for each operator and line; numbers of repeated layers become ``*``."""
        return self._regrouped(lambda row: (row.phase, fold(row.module)[0], row.operator, row.line))

    def largest(self, most: int | None = None) -> list[NodeRow]:
        """Return the ``most`` rows with the most bytes, or all, in the order of the step."""
        rows = [row for row in self.rows if row.operator != _OUTSIDE or row.fwd_out]
        if most is None or most >= len(rows):
            return rows
        weight = attrgetter("fwd_saved", "fwd_tmp", "fwd_out", "bwd_tmp", "bwd_out")
        kept = set(map(id, nlargest(most, rows, key=lambda row: sum(weight(row)))))
        return [row for row in rows if id(row) in kept]

    def table(self, largest: int | None = None) -> str:
        """Return the rows as text; ``largest`` keeps the rows with the most bytes, in order."""
        shown = [*self.largest(largest), self.total()]
        lines = [
            (
                *map(printable, (row.module, row.operator, row.line)),
                *(_text(row, name) for name in _SHOWN),
            )
            for row in shown
        ]
        align = ("left", "left", "left", *("right" for _ in _SHOWN))
        headers = ("module", "operator", "line", *(name.replace("_", " ") for name in _SHOWN))
        lines[-1] = ("all", *lines[-1][1:])
        return tabulate(lines, headers=headers, colalign=align, disable_numparse=True)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the rows as comma-separated values, and write them to ``path`` if there is one.

        Bytes and operations are plain numbers. The first line has the names of the columns, which
        are the fields of ``NodeRow``.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(_COLUMNS_OF, self.rows))
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def _regrouped(self, key: Callable[[NodeRow], tuple[str, ...]]) -> NodeTable:
        with without_collections():
            groups: dict[tuple[str, ...], list[int]] = {}
            for index, row in enumerate(self.rows):
                groups.setdefault(key(row), []).append(index)
            storages = [self._union(members) for members in groups.values()]
            rows = [
                self._merged([self.rows[index] for index in members], union)
                for members, union in zip(groups.values(), storages, strict=True)
            ]
            for row, name in zip(rows, groups, strict=True):
                if len(name) == 4:
                    row.module = name[1]
            return NodeTable(rows, storages, self._sizes)

    def _union(self, members: Sequence[int]) -> _Storages:
        if len(members) == 1:
            return self._storages[members[0]]
        columns = zip(*(self._storages[at] for at in members), strict=True)
        return _Storages(*({*chain.from_iterable(column)} for column in columns))

    def _merged(self, rows: Sequence[NodeRow], storages: _Storages) -> NodeRow:
        """Return several rows in one; a text that is not the same in all of them is left out."""
        if len(rows) == 1:
            return replace(rows[0])
        columns = dict(zip(COLUMNS, zip(*map(_COLUMNS_OF, rows), strict=True), strict=True))
        merged: dict[str, Any] = {
            name: columns[name][0] if len({*columns[name]}) == 1 else "" for name in _TEXTS
        }
        merged |= {name: sum(columns[name]) for name in _SUMS}
        merged |= {name: max(columns[name]) for name in _MOST}
        merged |= {
            name: sum(map(self._sizes.__getitem__, getattr(storages, name)))
            for name in _Storages._fields
        }
        return NodeRow(**merged)


_PHASES_SHOWN = frozenset(phase.value for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
_SHOWN = (
    *("fwd_in", "fwd_saved", "fwd_tmp", "fwd_out", "fwd_peak"),
    *("bwd_tmp", "bwd_out", "bwd_peak", "fwd_flops", "bwd_flops"),
)


def _text(row: NodeRow, name: str) -> str:
    value: int = getattr(row, name)
    if not value:
        return ""
    return format_count(value) if name.endswith("flops") else format_size(value)


def node_table_of(timeline: Timeline, calls: Sequence[OperatorCall]) -> NodeTable:
    builder = _Builder(timeline)
    with without_collections():
        builder.add(operator_steps(timeline, calls))
        return builder.table()


@dataclass(slots=True)
class _Open:
    row: NodeRow
    births: int
    """The last allocation that was made when the operator returned."""
    reads: tuple[int, ...]
    made: tuple[int, ...]
    saved: Collection[int] = ()
    made_in_backward: Collection[int] = ()


class _Builder:
    """Makes rows of steps: a backward's steps go to the row of the operator they belong to."""

    def __init__(self, timeline: Timeline) -> None:
        self._sizes = [0, *(allocation.nbytes for allocation in timeline.allocations)]
        kinds = (allocation.kind for allocation in timeline.allocations)
        self._activation = bytearray([0, *(kind not in _NO_ACTIVATIONS for kind in kinds)])
        self._rows: list[_Open] = []
        self._of_node: dict[int, _Open] = {}
        self._named: dict[tuple[int, str], _Open] = {}
        self._births = 0
        """The last allocation so far: they are numbered as they are made."""
        self._numbers: list[int] = []
        """The numbers of the autograd nodes of the rows so far."""
        self._births_before: list[int] = []
        """The last allocation before each of them."""

    def add(self, steps: Iterable[OperatorStep]) -> None:
        for step in steps:
            if step.call is None:
                self._outside(step)
            elif step.call.node < 0 and step.origin.phase is Phase.BACKWARD:
                self._backward(step, step.call)
            else:
                self._forward(step, step.call)

    def table(self) -> NodeTable:
        sizes, rows = self._sizes, self._rows
        storages: list[_Storages] = []
        is_saved = bytearray(len(sizes))
        for opened in rows:
            for index in opened.saved:
                is_saved[index] = 1
        made_rows = []
        for found in (self._of_node, self._named, self._numbers, self._births_before):
            found.clear()
        rows.reverse()
        while rows:  # each is let go of as soon as it is a row: there may be millions
            opened = rows.pop()
            reads, saved, made = opened.reads, opened.saved, opened.made
            reads_saved = _those(reads, saved.__contains__)
            made_saved = _those(made, is_saved.__getitem__)
            own = _Storages(reads, reads_saved, saved, made, made_saved, opened.made_in_backward)
            for name, column in zip(own._fields, own, strict=True):
                if column:
                    setattr(opened.row, name, sum(map(sizes.__getitem__, column)))
            made_rows.append(opened.row)
            storages.append(own)
        return NodeTable(made_rows, storages, sizes)

    def _open(
        self, step: OperatorStep, operator: str, reads: tuple[int, ...], made: tuple[int, ...]
    ) -> _Open:
        origin, call = step.origin, step.call
        row = NodeRow(origin.phase.value, origin.module, operator, origin.line)
        row.node = call.label if call is not None else ""
        opened = _Open(row, self._births, reads, made)
        self._rows.append(opened)
        return opened

    def _outside(self, step: OperatorStep) -> None:
        phase = step.origin.phase
        name = _BASELINE if phase is Phase.BASELINE else _OUTSIDE
        row = self._open(step, name, (), step.made).row
        self._births = max((self._births, *step.made[-1:]))  # which are in the order of making
        if phase is Phase.BACKWARD:
            row.bwd_tmp, row.bwd_peak = step.temporary, step.peak
        else:
            row.fwd_tmp, row.fwd_peak = step.temporary, step.peak

    def _forward(self, step: OperatorStep, call: OperatorCall) -> None:
        births, work, made, reads = self._births, call.work, step.made, call.reads
        self._births = max((births, *made[-1:], *reads))
        own = reads if len(reads) < 2 else tuple(dict.fromkeys(reads))
        own = _those(own, self._activation.__getitem__)
        opened = self._open(step, step.origin.operator, own, made)
        row = opened.row
        row.calls, row.fwd_tmp, row.fwd_peak = 1, step.temporary, step.peak
        row.fwd_flops, row.fwd_moved = work.flops, work.read + work.written
        if call.node > 0:
            self._of_node.setdefault(call.node, opened)
            self._numbers.append(call.node)
            self._births_before.append(births)
        if step.origin.phase is Phase.BACKWARD:  # computed again, for a checkpoint
            row.bwd_peak, row.fwd_peak = row.fwd_peak, 0

    def _backward(self, step: OperatorStep, call: OperatorCall) -> None:
        opened = self._of_node.get(-call.node)
        if opened is None:
            key = (call.node, call.node_name)
            opened = self._named.get(key)
            if opened is None:
                name = call.node_name or step.origin.operator
                opened = self._named[key] = self._open(step, name, (), ())
                opened.births = 0
                # What was there when the next node was made may have been saved by this one.
                after = bisect_right(self._numbers, -call.node)
                if after < len(self._numbers):
                    opened.births = self._births_before[after]
        row, work, made = opened.row, call.work, step.made
        row.bwd_tmp, row.bwd_peak = max(step.temporary, row.bwd_tmp), max(step.peak, row.bwd_peak)
        row.bwd_flops += work.flops
        row.bwd_moved += work.read + work.written
        births, is_activation = opened.births, self._activation
        if saved := {one: None for one in call.reads if one <= births and is_activation[one]}:
            opened.saved = _joined(opened.saved, saved, set)
        if made:
            opened.made_in_backward = _joined(opened.made_in_backward, made, list)
            self._births = max(self._births, made[-1])


def _those(indices: tuple[int, ...], counts: Callable[[int], object]) -> tuple[int, ...]:
    if len(indices) == 1:
        return indices if counts(indices[0]) else ()
    return tuple(filter(counts, indices))


def _joined(before: Collection[int], more: Collection[int], kind: Any) -> Collection[int]:
    """Return allocations of a row with more of them, in a container of a kind that grows.

    Most rows get theirs at once, in a tuple, of which there may be millions. The backward of a
    function of the program's own may have millions of steps that belong to one row.
    """
    if not before:
        return tuple(more)
    found = before if isinstance(before, kind) else kind(before)
    (found.update if kind is set else found.extend)(more)
    return found  # type: ignore[no-any-return]
