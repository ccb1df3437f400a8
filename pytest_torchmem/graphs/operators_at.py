"""What operators take where the program did not run them: each is asked by itself.

Shapes, strides and numbers among the arguments of operators are polynomials of a program's sizes.
What a kernel takes for itself often is none: it is rounded up, cut into blocks, or another kernel
is chosen. So operators whose kernels decide that are called with the arguments that they have at
other sizes. Whether one answers as it did in the program is checked at sizes that were traced.

Whether a kernel takes a workspace, and in how many requests, depends on sizes. What matters of it
for peaks is how much it holds beyond what is alive when its operator returns: so in a timeline that
is compared each call has one workspace of these bytes, taken last, for all that it gives back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.graphs.fitting import Grid, Polynomial, Sizes
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace_of import Geometry
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.profile.timeline import (
    GRAPH_NODE,
    Allocation,
    Kind,
    OperatorCall,
    Origin,
    Timeline,
)
from pytest_torchmem.step.trees import argument_leaves, replace_leaves
from pytest_torchmem.tracing.trace import trace


class Comparable(NamedTuple):
    """A timeline with the same peaks as a trace's, and the operators that made its allocations."""

    timeline: Timeline
    calls: tuple[OperatorCall, ...]
    made: tuple[range, ...]
    """The places of the allocations that each call made, its workspace the last."""

    def bytes_of(self, call: int) -> tuple[int, ...]:
        """Return the bytes of what a call leaves, and then those of its workspace."""
        allocations = self.timeline.allocations
        return tuple(allocations[place].nbytes for place in self.made[call])


def comparable(profile: MemoryProfile) -> Comparable:
    """Return the timeline of a trace with the same peaks, and one workspace for each operator."""
    timeline, calls, changes = profile.timeline, profile.calls or (), profile.timeline.changes()
    allocations: list[Allocation] = []
    events: list[int] = []
    numbers: dict[int, int] = {}
    made = []
    after = [0]
    """How many events there are after so many of the profile's."""

    def copy(event: int) -> None:
        if event > 0:
            allocations.append(timeline.allocations[event - 1])
            numbers[event] = len(allocations)
        events.append(numbers[event] if event > 0 else -numbers[-event])

    def outside(stop: int) -> None:
        for event in timeline.events[len(after) - 1 : stop]:
            copy(event)
            after.append(len(events))

    for call in calls:
        outside(call.start)
        first, part = len(allocations), timeline.events[len(after) - 1 : call.stop]
        given_back = {-event for event in part if event < 0}.intersection(part)
        for event in part:
            if abs(event) not in given_back:
                copy(event)
        held = [0, *accumulate(changes[event] for event in part)]
        allocations.append(Allocation(max(held) - held[-1], Kind.WORKSPACE, call.origin))
        events += [len(allocations), -len(allocations)]
        after += [len(events)] * len(part)
        made.append(range(first, len(allocations)))
    outside(len(timeline.events))
    phases = tuple((after[start], phase) for start, phase in timeline.phases)
    return Comparable(Timeline(tuple(allocations), tuple(events), phases), calls, tuple(made))


_MACHINE = ("device", "gpu", "host", "calibration", "cudnn", "gpus")
"""The options of a trace that say what kernels run on."""
_CONTAINERS = (list, tuple, torch.Size)


class OperatorsAt:
    """The operators of a step, with arguments as they grow with its sizes."""

    def __init__(
        self, grid: Grid, traced: Sequence[Comparable], options: Mapping[str, Any]
    ) -> None:
        self._options = {name: options[name] for name in _MACHINE if name in options}
        self._device = str(self._options.get("device", "cpu"))
        self._last = traced[-1]
        self._calls: list[_Growing] = []
        """One for all calls that have the same arguments at all sizes."""
        known: dict[tuple[int, ...], _Growing] = {}
        if len({len(one.calls) for one in traced}) != 1:
            return
        for place, calls in enumerate(zip(*(one.calls for one in traced), strict=True)):
            works = [call.work for call in calls]
            key = tuple(map(id, works))
            if key not in known:
                known[key] = _Growing(grid, works, calls[-1].origin)
            known[key].places.append(place)
        self._calls = list(known.values())
        self.check(grid.points[-1], traced[-1])

    def check(self, sizes: Sizes, traced: Comparable) -> None:
        """Leave out operators whose answers differ from a trace of these sizes.

        What they took beyond their answer is to be the same at all sizes: a number that a program
        multiplies with is wrapped in a tensor, which autograd may keep.
        """
        if traced.timeline.events != self._last.timeline.events:
            return
        asked = [one for one in self._calls if one.decides]
        found = self._ask(asked, sizes)
        for one in asked:
            answer = found.get(one)
            if answer is None:
                one.agrees = False
                continue
            one.base = one.base or answer
            grown = answer[-1] - one.base[-1]
            for place in one.places:
                before, now = self._last.bytes_of(place), traced.bytes_of(place)
                one.agrees = one.agrees and now[-1] - before[-1] == grown

    def at(self, sizes: Sizes) -> tuple[dict[int, int], tuple[str, ...]]:
        """Return the bytes of allocations, by their places in the timeline, and why some of them
        are not known, one sentence each.
        """
        doubts = [why for one in self._calls if (why := one.not_at(sizes)) is not None]
        missing = dict.fromkeys(doubts[:1])  # what follows has sizes that were rounded there
        nbytes: dict[int, int] = {}
        asked = [one for one in self._calls if one.decides and one.agrees]
        found = self._ask(asked, sizes)
        for one in asked:
            answer = found.get(one)
            if answer is None:
                if one.not_at(sizes) is None:
                    missing[f"{one.name} could not be asked what it takes at these sizes"] = None
                continue
            for place in one.places:
                made, took = self._last.made[place], self._last.bytes_of(place)
                nbytes[made[-1]] = took[-1] + answer[-1] - one.base[-1]
                if took[:-1] == one.base[:-1]:  # outputs whose size a library decides among them
                    nbytes.update(zip(made[:-1], answer[:-1], strict=True))
        for one in self._calls:
            takes = any(self._last.bytes_of(place)[-1] for place in one.places)
            if one.decides and not one.agrees and takes:
                missing[f"what {one.name} takes depends on more than its arguments' shapes"] = None
        return nbytes, tuple(missing)

    def _ask(self, asked: Sequence[_Growing], sizes: Sizes) -> dict[_Growing, tuple[int, ...]]:
        """Return the bytes that each leaves, and then its workspace; nothing of what raised."""
        can_be = [one for one in asked if one.not_at(sizes) is None]

        def number(polynomial: Polynomial) -> int:
            return int(polynomial(sizes))

        def tensor(one: _Fitted) -> Tensor:
            geometry = replace_leaves((one.shape, one.stride), Polynomial, number)
            return torch.empty_strided(*geometry, dtype=one.dtype, device=self._device)

        @torch.no_grad()
        def run() -> None:
            for place, one in enumerate(can_be):
                given = replace_leaves(one.arguments, _Fitted, tensor)
                args, kwargs = replace_leaves(given, Polynomial, number)
                token = GRAPH_NODE.set(str(place))
                try:
                    with suppress(Exception):  # it has no answer then
                        one.spec.overload(*args, **kwargs)
                finally:
                    GRAPH_NODE.reset(token)

        try:
            # Values would be asked for by operators whose sizes depend on them: these go without.
            answered = comparable(trace(run, **self._options, memory="unlimited", values="none"))
        except Exception:  # what none of the operators raised: no answer is told as such
            return {}
        return {
            can_be[int(call.label)]: answered.bytes_of(place)
            for place, call in enumerate(answered.calls)
            if call.label
        }


def where(origin: Origin) -> str:
    return f"{origin.operator} in {origin.module}" if origin.module else origin.operator


class _Growing:
    """The call of an operator, with its arguments as polynomials of sizes."""

    def __init__(self, grid: Grid, works: Sequence[Any], origin: Origin) -> None:
        self.spec: OperatorSpec = works[-1].spec
        self.name = where(origin)
        kernels = (self.spec.cpu, self.spec.cuda)
        self.decides = (
            self.spec.record.library_output is not None
            or any(one.inner is not None for one in works)
            or any(one.workspace is not None or one.meta is not None for one in kernels)
        )
        """Whether its kernel decides how much it takes."""
        self.arguments: Any = None
        """As they are at the points of the grid, which the works are of."""
        with suppress(_Unlike):
            self.arguments = _fitted([one.arguments for one in works], grid)
        self.agrees = self.arguments is not None
        self._polynomials = [
            polynomial
            for leaf in argument_leaves(self.arguments, (Polynomial, _Fitted))
            for polynomial in argument_leaves(
                (leaf.shape, leaf.stride) if isinstance(leaf, _Fitted) else leaf, Polynomial
            )
        ]
        self.base: tuple[int, ...] = ()
        """What it answered at the largest of the fitted sizes."""
        self.places: list[int] = []
        """The calls of the timeline that are this one."""

    def not_at(self, sizes: Sizes) -> str | None:
        """Return why the operator has no arguments at some sizes, or None."""
        for polynomial in self._polynomials:
            value = polynomial(sizes)
            if value.denominator != 1:
                return (
                    f"a size among the arguments of {self.name} is {polynomial}, which is "
                    f"{float(value):g}: how the program rounds it is not known"
                )
        return None


class _Unlike(Exception):
    """Arguments differ in more than numbers."""


class _Fitted(NamedTuple):
    shape: Any
    stride: Any
    dtype: torch.dtype


def _fitted(values: Sequence[Any], grid: Grid) -> Any:
    """Return arguments at the points of a grid as one, with polynomials where numbers differ."""
    last = values[-1]
    kind = type(last)
    if any(type(value) is not kind for value in values):
        raise _Unlike
    if kind is Geometry:
        if last.stride is None or len({value.dtype for value in values}) > 1:
            raise _Unlike
        shape = _fitted([value.shape for value in values], grid)
        return _Fitted(shape, _fitted([value.stride for value in values], grid), last.dtype)
    if kind in _CONTAINERS or kind is dict:
        if len({len(value) for value in values}) > 1:
            raise _Unlike
        if kind is dict:
            return {name: _fitted([value[name] for value in values], grid) for name in last}
        items = [_fitted(one, grid) for one in zip(*values, strict=True)]
        return items if kind is list else tuple(items)
    if kind is int and any(value != last for value in values):
        return grid.through(values)
    if kind is bool and any(value is not last for value in values):
        raise _Unlike
    return last  # no kernel takes more for another number with a point
