"""How the memory of a step grows with its sizes, exactly: each allocation is a polynomial of them.

The same program with other sizes makes and frees the same storages in the same order, each with
other bytes. So it is not the peaks that are fitted, which change their moment, but the bytes of
each allocation; the peaks at other sizes follow from the order of events. A step that is given is
traced at other sizes with its tensors made longer along a dimension.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.figures import FIGURES
from pytest_torchmem.graphs import fitting, operators_at
from pytest_torchmem.printable import printable
from pytest_torchmem.profile.profile import PEAK_FIELDS, MemoryProfile, figures_of
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline
from pytest_torchmem.step.generators import Draws, drawing
from pytest_torchmem.step.step import Step
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.units import format_size

_FAR = 1024
"""How many times its largest value a size is taken for what decides in the end."""
_ROUNDS = 5
"""How often sizes that were not predicted are added to the fit."""
_NOWHERE = Origin(Phase.FORWARD)
_CHANCE = "random numbers decide what the step runs"


class Verified(NamedTuple):
    """A step whose sizes were not among those that were fitted: figures as predicted and traced."""

    sizes: dict[str, int]
    predicted: dict[str, int]
    traced: dict[str, int]

    @property
    def exact(self) -> bool:
        """Whether all figures are the same to the byte."""
        return self.predicted == self.traced


class Prediction(dict[str, int]):
    """The figures of a step in bytes by name, and what may be wrong with them."""

    def __init__(self, figures: fitting.Sizes, doubts: Sequence[str] = ()) -> None:
        super().__init__(figures)
        self.doubts = tuple(doubts)
        """Why figures may not be those that a trace has, one sentence each."""

    @property
    def exact(self) -> bool:
        """Whether the figures are to the byte, for a program that takes the same way."""
        return not self.doubts

    def __repr__(self) -> str:
        doubts = f" (an estimate: {'; '.join(self.doubts)})" if self.doubts else ""
        return f"{super().__repr__()}{doubts}"


@dataclass(frozen=True)
class Scaling:
    """The memory of a step as a function of its sizes; all figures are bytes."""

    sizes: dict[str, tuple[int, ...]]
    """The values of each size that were fitted. Those given that go another way are left out."""
    largest: MemoryProfile
    """The profile of the largest of them."""
    verified: tuple[Verified, ...] = ()
    _bytes: tuple[fitting.Polynomial, ...] = field(default=(), repr=False)
    """The polynomials of allocations, one for all that have the same."""
    _of: tuple[int, ...] = field(default=(), repr=False)
    """Which of them each allocation has."""
    _timeline: Timeline = field(default=Timeline(), repr=False)
    """Of the largest sizes, with one workspace for each operator."""
    _operators: operators_at.OperatorsAt | None = field(default=None, repr=False)
    _missed: frozenset[int] = frozenset()
    """Places of allocations that no polynomial gave at a size that was verified."""
    _chance: str = ""
    """That random numbers decide what the step runs, where they do."""

    @property
    def exact(self) -> bool:
        """Whether the figures of all steps that were traced to verify it were predicted."""
        return all(one.exact for one in self.verified)

    def predict(self, **sizes: int) -> Prediction:
        """Return the figures of a step of other sizes, by name: ``"forward_peak"``, ``"peak"``, …

        The program is not run: tensors have the bytes of their polynomials, and operators whose
        kernels decide how much they take are asked, with the arguments that they have at these
        sizes. ``exact`` of the result says whether that gave all, and ``doubts`` what is missing.
        Raises ``UsageError`` unless the sizes are those that were fitted, whole numbers from 1 on.
        """
        if set(sizes) != set(self.sizes):
            raise UsageError(
                f"predict({', '.join(sizes)}): expected a value of each of {', '.join(self.sizes)}"
            )
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise UsageError(f"{name}={value!r}: expected a whole number from 1 on")
        asked = self._operators
        nbytes, missing = ({}, ()) if asked is None else asked.at(sizes)
        found = figures_of(self._timeline_of(sizes, nbytes))
        figures = {name: found[name] for name in FIGURES if found.get(name) is not None}
        chance = [self._chance] if self._chance else []
        unknown = sorted(self._missed - set(nbytes))  # and not asked of its operator
        origins = (self._timeline.allocations[place].origin for place in unknown)
        doubts = dict.fromkeys(
            f"{operators_at.where(one)} is no polynomial of the sizes" for one in origins
        )
        return Prediction(figures, (*chance, *missing, *doubts))

    def polynomial(self, figure: str = "peak") -> fitting.Polynomial:
        """Return a peak in bytes as a polynomial: what is alive at its moment when sizes are large.

        ``figure`` is ``"peak"``, ``"forward_peak"``, ``"backward_peak"`` or ``"optimizer_peak"``.
        """
        live = self._live(figure, tuple(self.sizes))
        return fitting.total(tuple(self.sizes), (nbytes for _, nbytes in live))

    def by_module(self, figure: str = "peak") -> dict[str, fitting.Polynomial]:
        """Return the polynomial of a peak by module path, those that grow fastest first."""
        return self._by(figure, lambda allocation: allocation.origin.module)

    def by_operator(self, figure: str = "peak") -> dict[str, fitting.Polynomial]:
        """Return the polynomial of a peak by operator, those that grow fastest first."""
        return self._by(figure, lambda allocation: allocation.origin.operator)

    def degree(self, size: str, figure: str = "peak") -> int:
        """Return the power of one size that a peak grows with when this size is large.

        1 is linear. Raises ``UsageError`` for a size that was not fitted.
        """
        if size not in self.sizes:
            raise UsageError(f"{size!r} is none of the sizes: {', '.join(self.sizes)}")
        live = self._live(figure, (size,))
        return max((nbytes.degree(size) for _, nbytes in live), default=0)

    def fastest(self, size: str, figure: str = "peak") -> list[Allocation]:
        """Return what makes a peak grow with the power ``degree(size)``, the largest first."""
        degree = self.degree(size, figure)
        live = self._live(figure, (size,))
        found = [one for one, nbytes in live if nbytes.degree(size) == degree]
        return sorted(found, key=lambda allocation: -allocation.nbytes)

    def table(self, figure: str = "peak") -> str:
        """Return a peak's coefficients with the modules that have the largest parts in them."""
        whole = self.polynomial(figure)
        modules = self.by_module(figure)
        rows = []
        for exponents, coefficient in sorted(whole.terms.items(), reverse=True):
            parts = sorted(
                ((module, one.terms.get(exponents, 0)) for module, one in modules.items()),
                key=lambda part: -part[1],
            )
            shown = [
                f"{printable(module) or '-'} {format_size(int(part))}"
                for module, part in parts
                if part
            ]
            more = f" and {len(shown) - 3} others" if len(shown) > 3 else ""
            size = format_size(int(coefficient))
            rows.append((whole.term(exponents), size, ", ".join(shown[:3]) + more))
        return tabulate(rows, (figure.replace("_", " "), "bytes", "modules"), disable_numparse=True)

    def _by(self, figure: str, key: Any) -> dict[str, fitting.Polynomial]:
        groups: dict[str, list[fitting.Polynomial]] = {}
        for allocation, nbytes in self._live(figure, tuple(self.sizes)):
            groups.setdefault(key(allocation), []).append(nbytes)
        sums = {name: fitting.total(tuple(self.sizes), members) for name, members in groups.items()}
        far = self._far(tuple(self.sizes))
        return dict(sorted(sums.items(), key=lambda item: (-item[1](far), item[0])))

    def _far(self, names: Sequence[str]) -> dict[str, int]:
        return {
            name: values[-1] * (_FAR if name in names else 1) for name, values in self.sizes.items()
        }

    def _live(
        self, figure: str, names: Sequence[str]
    ) -> list[tuple[Allocation, fitting.Polynomial]]:
        """Return what is alive at a peak where the sizes of ``names`` are large, and its bytes."""
        if figure != "peak" and figure not in PEAK_FIELDS:
            raise UsageError(f"{figure!r}: expected 'peak' or one of {', '.join(PEAK_FIELDS)}")
        timeline = self._timeline_of(self._far(names))
        _, position = timeline.peak(PEAK_FIELDS.get(figure))
        allocations, live = self._timeline.allocations, timeline.live_indices([position])[position]
        return [(allocations[place], self._bytes[self._of[place]]) for place in live]

    def _timeline_of(
        self, sizes: fitting.Sizes, known: Mapping[int, int] = MappingProxyType({})
    ) -> Timeline:
        """Return the timeline at some sizes; of places that are ``known``, with these bytes."""
        values = [max(int(polynomial(sizes)), 0) for polynomial in self._bytes]
        same = self._timeline
        allocations = tuple(
            Allocation(known.get(place, values[at]), Kind.OTHER, _NOWHERE)
            for place, at in enumerate(self._of)
        )
        return Timeline(allocations, same.events, same.phases)


def scaling(
    build: fitting.Build,
    *,
    verify: bool = True,
    options: Mapping[str, Any] | None = None,
    **sizes: Sequence[int],
) -> Scaling:
    """Trace ``build`` at several sizes, and return its memory as exact polynomials of these.

    ``build(batch=2, sequence=256)`` returns a module and its arguments, as a tuple whose last
    element may be a dictionary of keyword arguments, or a callable that runs a whole step.
    ``sizes`` are the values of each of its arguments, such as ``batch=[1, 2, 4]``; n values
    determine a polynomial of degree n - 1. With ``verify``, sizes beyond these are traced as well,
    and where they are not predicted, they are added to the fit. ``options`` go to ``trace``.

    Raises ``UsageError`` for sizes that cannot be fitted and where the program takes other ways
    at other sizes, so that its allocations cannot be compared.
    """
    values = {name: _values(name, given) for name, given in sizes.items()}
    if not values:
        raise UsageError("scaling() needs values of at least one size, such as batch=[1, 2, 4]")
    traces = _Traces(build, dict(options or {}))
    for turn in range(_ROUNDS):
        values = _that_go_one_way(traces, values)
        found = _fit(traces, values)
        if not verify:
            return found
        # Beyond those that were fitted, each by itself and then together.
        base = {name: known[0] for name, known in values.items()}
        ahead = {name: 2 * known[-1] - known[-2] for name, known in values.items()}
        points = [{**base, name: value} for name, value in ahead.items()]
        beyond = points if len(points) == 1 else [*points, ahead]
        wrong = [point for point in beyond if not _verify(found, traces, point).exact]
        if not wrong:
            break
        # A higher power shows with one more value. What only begins at some size (the blocks of a
        # kernel) does not: from the second time on the smallest value goes.
        values = {
            name: sorted({*known, *(point[name] for point in wrong)})[
                1 if turn and any(point[name] > known[-1] for point in wrong) else 0 :
            ]
            for name, known in values.items()
        }
    found = _settled(found, traces, beyond)
    found = replace(found, _chance=traces.chance())
    return replace(found, verified=tuple(_verify(found, traces, point) for point in beyond))


def _values(name: str, given: Sequence[int]) -> list[int]:
    ones = list(given) if isinstance(given, Iterable) else []
    if len(set(ones)) < 2 or any(type(one) is not int or one < 1 for one in ones):
        raise UsageError(f"{name}={given!r}: expected two or more whole numbers from 1 on")
    return sorted(set(ones))


class _Traces:
    def __init__(self, build: fitting.Build, options: dict[str, Any]) -> None:
        self._build, self.options = build, options
        self._known: dict[tuple[int, ...], tuple[MemoryProfile, operators_at.Comparable]] = {}
        self._draws = Draws()
        self._sizes: list[dict[str, int]] = []

    def at(self, sizes: fitting.Sizes) -> tuple[MemoryProfile, operators_at.Comparable]:
        """Return the profile of a step, and the timeline that can be compared with others'."""
        key = tuple(sizes.values())
        if key not in self._known:
            self._sizes.append(dict(sizes))
            with drawing(self._draws):
                profile = fitting.trace_built(self._build, sizes, **self.options)
            self._known[key] = profile, operators_at.comparable(profile)
        return self._known[key]

    def chance(self) -> str:
        """Return a sentence that says so if random numbers decide what the step runs.

        A step that drew any is traced again at its smallest sizes, with numbers at both ends of
        what they are drawn from.
        """
        if not self._draws.any:
            return ""
        sizes = min(self._sizes, key=lambda one: tuple(one.values()))
        usual = self.timeline(sizes)
        for end in (0, 1):
            try:
                with drawing(Draws(end)):
                    found = operators_at.comparable(
                        fitting.trace_built(self._build, sizes, **self.options)
                    ).timeline
            except Exception as error:
                return f"{_CHANCE}: with other draws it raises {type(error).__name__}"
            if found.events != usual.events:
                return f"{_CHANCE}, from {_parting(found, usual)} on"
            if found.changes() != usual.changes():
                return _CHANCE
        return ""

    def timeline(self, sizes: fitting.Sizes) -> Timeline:
        return self.at(sizes)[1].timeline


def _fit(traces: _Traces, values: Mapping[str, Sequence[int]]) -> Scaling:
    grid = fitting.Grid(values)
    timelines = [traces.timeline(point) for point in grid.points]
    known: dict[tuple[int, ...], int] = {}
    sizes = [[allocation.nbytes for allocation in timeline.allocations] for timeline in timelines]
    of = tuple(known.setdefault(numbers, len(known)) for numbers in zip(*sizes, strict=True))
    polynomials = tuple(grid.through(numbers) for numbers in known)
    fitted = dict(zip(grid.names, grid.values, strict=True))
    largest = traces.at(grid.points[-1])[0]
    return Scaling(fitted, largest, (), polynomials, of, timelines[-1])


def _that_go_one_way(traces: _Traces, values: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return values of sizes for which the program makes the same storages in the same order.

    A batch of one often goes a way of its own (a tensor counts as contiguous in more than one
    layout): the value that goes another way than the largest is left out, and one beyond is taken.
    """
    count = {name: len(known) for name, known in values.items()}
    for _ in range(2 * sum(count.values())):
        points = fitting.Grid(values).points
        largest = traces.timeline(points[-1])
        other = [point for point in points if traces.timeline(point).events != largest.events]
        if not other:
            return values
        for name, known in values.items():
            at_least = [point for point in points if point[name] == known[0]]
            if len(known) > 1 and all(point in other for point in at_least):
                kept = known[1:]
                step = kept[-1] - known[-2]
                values = {**values, name: [*kept, kept[-1] + step]}
                break
        else:
            break
    one, another = map(fitting.written, (other[0], points[-1]))
    why = (
        f"the step makes other storages with {one} than with {another}, from "
        f"{_parting(traces.timeline(other[0]), largest)} on: choose sizes for which the program "
        "takes the same way"
    )
    chance = traces.chance()
    raise UsageError(f"{why}. {chance[0].upper()}{chance[1:]}" if chance else why)


def _parting(one: Timeline, two: Timeline) -> str:
    """Return what is made where the first of two steps makes other storages than the other."""
    pairs = enumerate(zip(one.events, two.events, strict=False))
    shorter = min(len(one.events), len(two.events))
    place = next((at for at, (first, second) in pairs if first != second), shorter)
    longer = max(one, two, key=lambda timeline: len(timeline.events))
    made = next((event for event in longer.events[place:] if event > 0), 0)
    origin = longer.allocations[made - 1].origin if made else _NOWHERE
    return " ".join(part for part in (origin.operator, origin.module, origin.line) if part)


def _settled(found: Scaling, traces: _Traces, beyond: Sequence[Mapping[str, int]]) -> Scaling:
    """Return what was fitted, after a look at sizes beyond.

    What a kernel takes may be rounded or cut into blocks, and a polynomial through a few of such
    numbers tells nothing of others: of one that missed a size beyond, the power is kept that it
    grows with, and operators are asked what they take.
    """
    grid = fitting.Grid(found.sizes)
    operators = operators_at.OperatorsAt(
        grid, [traces.at(point)[1] for point in grid.points], traces.options
    )
    missed: set[int] = set()
    for point in beyond:
        traced = traces.at(point)[1]
        operators.check(point, traced)
        if traced.timeline.events != found._timeline.events:
            continue
        expected = [polynomial(point) for polynomial in found._bytes]
        numbered = enumerate(zip(found._of, traced.timeline.allocations, strict=True))
        missed |= {place for place, (at, one) in numbered if expected[at] != one.nbytes}
    wrong = {found._of[place] for place in missed}
    polynomials = tuple(
        _power(found, polynomial) if at in wrong else polynomial
        for at, polynomial in enumerate(found._bytes)
    )
    return replace(found, _bytes=polynomials, _operators=operators, _missed=frozenset(missed))


def _power(found: Scaling, polynomial: fitting.Polynomial) -> fitting.Polynomial:
    """Return one term that grows as a polynomial does between the largest values of each size."""
    top = {name: values[-1] for name, values in found.sizes.items()}
    most = polynomial(top)
    exponents = []
    for name, values in found.sizes.items():
        less = polynomial({**top, name: values[-2]})
        ratio = most / less if less > 0 else 1
        exponents.append(round(math.log(max(ratio, 1)) / math.log(values[-1] / values[-2])))
    scale = math.prod(map(pow, top.values(), exponents))
    return fitting.Polynomial(
        polynomial.names, {tuple(exponents): Fraction(most, scale)} if most else {}
    )


def _verify(found: Scaling, traces: _Traces, sizes: dict[str, int]) -> Verified:
    traced, predicted = traces.at(sizes)[0].figures(), found.predict(**sizes)
    names = [name for name in traced if name in predicted]
    return Verified(sizes, *({name: one[name] for name in names} for one in (predicted, traced)))


DIMENSIONS = {"batch": 0, "sequence": 1}
"""Which dimension of its input tensors a module means by a size."""
_MULTIPLES = (1, 2, 3)


def scaling_of(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    sizes: Mapping[str, Sequence[int]] | None = None,
    **options: Any,
) -> Scaling:
    """Return how a step grows with the sizes ``names``.

    A module's inputs are made longer: ``"batch"`` is their dimension 0 and ``"sequence"`` their
    dimension 1, of those that are as long there as the first tensor. ``sizes`` has other values
    than its own length, twice and three times that. A callable is called with a value of each of
    ``sizes``, by name, and returns a module with its arguments. ``options`` go to ``trace``.
    Raises ``UsageError`` for sizes that are not known.
    """
    if not isinstance(target, nn.Module):
        missing = sorted(set(names) - set(sizes or ()))
        if missing:
            raise UsageError(
                f"a function needs values of {', '.join(missing)}: "
                f'sizes={{"{missing[0]}": [256, 512, 1024]}}'
            )
        given: dict[str, Any] = dict(sizes or {})
        return scaling(lambda **at: target(*args, **at), options=options, **given)
    step, own = Step.taken_from(kwargs)
    known = {name: _length(name, args, own) for name in names}
    values: dict[str, Any] = {name: [known[name] * times for times in _MULTIPLES] for name in names}
    values |= {name: list(given) for name, given in (sizes or {}).items() if name in known}

    def build(**at: int) -> tuple[Any, ...]:
        lengths = {DIMENSIONS[name]: (known[name], value) for name, value in at.items()}
        longer = resized((args, own), lengths)
        return (target, *longer[0], longer[1])

    return scaling(build, options={**step.options(), **options}, **values)


def _length(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    dimension = DIMENSIONS.get(name)
    if dimension is None:
        raise UsageError(
            f"{name!r} is no size of a module's inputs: expected one of {', '.join(DIMENSIONS)}; "
            "pass a function of the sizes instead of the module, with sizes="
        )
    for tensor in tensors_in((args, kwargs)):
        if tensor.dim() > dimension:
            return int(tensor.shape[dimension])
    raise UsageError(f"none of the inputs has a dimension {dimension}, which is the {name}")


def resized(value: Any, lengths: Mapping[int, tuple[int, int]]) -> Any:
    """Return nested tensors made longer: of each dimension, those of one length have another."""
    if isinstance(value, Tensor):
        for dimension, (before, now) in lengths.items():
            if value.dim() > dimension and value.shape[dimension] == before and now != before:
                positions = torch.arange(now, device=value.device) % before
                grad = value.requires_grad
                value = value.detach().index_select(dimension, positions).requires_grad_(grad)
        return value
    if isinstance(value, dict):
        return {key: resized(item, lengths) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(resized(item, lengths) for item in value)
    return value
