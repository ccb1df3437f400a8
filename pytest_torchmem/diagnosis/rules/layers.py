"""Causes in what a model is built of, how it is configured, and what it is called with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from pytest_torchmem.diagnosis.causes import (
    MADE,
    Cause,
    Evidence,
    cause,
    largest,
    placed_in,
    rule,
    shown_by,
    within,
)
from pytest_torchmem.diagnosis.difference import Row
from pytest_torchmem.diagnosis.rules.layer_texts import (
    LayerChange,
    changed_values,
    changes_between,
    new_modules,
    set_otherwise,
    widths_of,
)
from pytest_torchmem.profile.facts import (
    COMPILED,
    GIVEN,
    INPUTS,
    LAYERS,
    Sized,
    exchanged,
    new_in,
)
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.module_paths import (
    are_among,
    fold,
    join_numbers,
    prefixes,
    read_numbers,
    unfold,
)
from pytest_torchmem.profile.timeline import Kind, Origin

_NOTHING = "Identity"
_KEEPS_SHAPE = re.compile("Norm|Drop|LU|Tanh|Sigmoid|Mish")
"""Layers of torch that make as much as they are given."""
_KEPT = (Role.EARLIER, Role.HELD, Role.OTHER)
"""What somebody keeps, who is nearer to the cause."""
_PASSING = (Role.ACTIVATION, Role.GRADIENT_TEMPORARY)


@rule("layer", "{module} is {now}, and was {before}", sure=True)
def another_layer(evidence: Evidence) -> Cause | None:
    """An activation, a norm, a stride or a dropout is another one."""
    return _largest(evidence, "layer", of_torch=True)


@rule("attribute", "{module} has {now}, and had {before}")
def another_attribute(evidence: Evidence) -> Cause | None:
    """A module of the program's has another number or switch among its attributes."""
    return _largest(evidence, "attribute", of_torch=False)


def _largest(evidence: Evidence, name: str, *, of_torch: bool) -> Cause | None:
    """Return the changed modules that explain most: of another class or of torch, or others."""
    resized = [row for row in evidence.came(Role.PARAMETER) if _is_resized(row)]
    otherwise = set_otherwise(evidence) if resized else set()
    larger = _given_larger(evidence)
    found = [
        _of_change(evidence, name, pattern, change, larger)
        for pattern, (before, now) in changed_values(evidence, LAYERS)
        if not resized or pattern in otherwise  # wider layers are another cause
        for change in changes_between(before, now)
        if change.is_of_torch is of_torch
    ]
    return largest(found)


def _of_change(
    evidence: Evidence,
    name: str,
    pattern: str,
    change: LayerChange,
    larger: Mapping[str, _Given],
) -> Cause | None:
    """Return what layers of a pattern that changed alike explain."""
    numbers = change.numbers
    if pattern in larger and are_among(numbers, larger[pattern].numbers):
        return None  # what is before it makes more
    own = [row for row in evidence.of_module(pattern) if _is_about(row, pattern, numbers)]
    resized = [row for row in evidence.came(Role.PARAMETER) if _is_resized(row)]
    is_wider = widths_of(change.layer) != widths_of(change.was) or any(
        not change.is_of_torch or _is_about(row, pattern, numbers) for row in resized
    )
    if change.is_same_class and (
        is_wider or (change.is_of_torch and _is_before(evidence, pattern, numbers, larger))
    ):
        own = [*evidence.came()]  # what is computed of its output is larger, too
    if not own and change.layer.name == _NOTHING and _KEEPS_SHAPE.search(change.was.name):
        return None  # what is given to others is as large without it
    rows = own or [row for row in evidence.came() if _is_resized(row)]
    text, was = change.now, change.before
    if not change.is_of_torch:
        text, was = _attributes(text), _attributes(was) or "not"
        if not text:
            return None
    module = evidence.module(pattern, numbers)
    found = cause(name, rows, module=module, now=text, before=was)
    return found and placed_in(evidence, pattern, found)


def _is_about(row: Row, pattern: str, numbers: str) -> bool:
    """Tell whether a row is about any module of these numbers, or about none of the pattern: what
    it was given.
    """
    if not within(pattern, row.what.module):
        return True
    pairs = zip(read_numbers(row.numbers), read_numbers(numbers), strict=False)
    return all(not own or not wanted or own & wanted for own, wanted in pairs)


def _is_before(
    evidence: Evidence, pattern: str, numbers: str, larger: Mapping[str, _Given]
) -> bool:
    """Tell whether a layer is called before all that are given more, and may be why they are."""
    order = [*evidence.now.facts.get(GIVEN, {})]
    first = next(iter(larger), None)
    if first is None or pattern not in order:
        return first is not None
    around = (a for a, b in zip(prefixes(pattern), prefixes(first), strict=False) if a == b)
    stars = max((path.count("*") for path in around), default=0)  # of the modules that both are in
    own, other = _first_of(numbers, stars), _first_of(larger[first].numbers, stars)
    return own < other or (own == other and order.index(pattern) <= order.index(first))


def _first_of(numbers: str, stars: int) -> list[int]:
    return [min(star, default=0) for star in read_numbers(numbers)[:stars]]


def _attributes(text: str) -> str:
    return text.partition("(")[2].removesuffix(")")


@rule("layer gone", "{layer} in {module} is gone", last=True)
def layer_gone(evidence: Evidence) -> Cause | None:
    """A pooling or a stride no longer makes what follows it smaller."""
    for pattern, (before, now) in changed_values(evidence, LAYERS):
        _, came = exchanged(before, now)
        gone = [one for one in new_in(before, now) if one.is_of_torch]
        if gone and not came:
            place = evidence.short(pattern.removesuffix(".*"))
            return cause("layer gone", evidence.came(), layer=gone[0].text, module=place)
    return None


@rule("new module", "{module} is new{instead}", sure=True)
def new_module(evidence: Evidence) -> Cause | None:
    """A part of the model was not there before."""
    compiled = evidence.about(COMPILED)
    if any(not change.now.number or not change.before.number for change in compiled):
        return None  # compiled modules go by another path, and their calls are not to be seen
    best: Cause | None = None
    for pattern, numbers in new_modules(evidence):
        rows = [row for row in evidence.came() if _is_in(row, pattern, numbers)]
        places = _places_of_more(evidence, pattern)
        places -= {_place(row) for row in evidence.came(*_KEPT)}
        rows += [row for row in evidence.came() if _place(row) in places and row not in rows]
        instead = "" if numbers else _in_the_place_of(evidence, pattern)
        path = evidence.short(unfold(pattern, numbers))
        found = cause("new module", rows, module=path, instead=instead)
        if found is not None and (best is None or found.nbytes > best.nbytes):
            best = found
    return best


def _places_of_more(evidence: Evidence, pattern: str) -> set[tuple[str, str]]:
    """Return the modules and lines of operators that are called more often than they were, in new
    modules or with what they make: that goes through others, too.
    """
    found: set[tuple[str, str]] = set()
    for name, one in evidence.counts().items():
        places = [*evidence.ran.places(name)] if one.rose else []
        modules = {place.module for place in places}
        if "" in modules:  # a loss of what a module makes
            modules |= evidence.makers_before(name)
        if any(within(pattern, module) for module in modules):
            found.update((fold(place.module)[0], place.line) for place in places)
    return found


def _place(row: Row) -> tuple[str, str]:
    return row.what.module, row.what.line


def _in_the_place_of(evidence: Evidence, pattern: str) -> str:
    """Return in words which modules are gone where a new one is, "" if none."""
    around = pattern.rpartition(".")[0]
    left = {path for name in evidence.now.facts.get(LAYERS, {}) for path in prefixes(name)}
    gone = dict.fromkeys(
        path
        for change in evidence.about(LAYERS)
        if not change.now
        for path in prefixes(change.name)
        if path not in left and path.rpartition(".")[0] == around
    )
    shown = [evidence.short(path) for path in gone]
    more = f" and {len(shown) - 1} more" if len(shown) > 1 else ""
    return f", in the place of {shown[0]}{more}" if shown else ""


@rule("given", "{module} is given {now}, and was given {before}")
def given_more(evidence: Evidence) -> Cause | None:
    """A layer works on more than it did: every position instead of one, a longer sequence."""
    if any(change.before for change in evidence.about(INPUTS)) or layer_gone(evidence):
        return None  # which says why
    larger = _given_larger(evidence)
    if not larger:
        return None
    shapes = {one.shape for given in larger.values() for one in given.now}  # a layer may save them
    first, given = next(iter(larger.items()))  # in the order of their calls
    shape = given.now[0]
    own = [row for row in evidence.came() if any(within(one, row.what.module) for one in larger)]
    around = {path for one in larger for path in ("", *prefixes(one))}
    rows = own + [
        row
        for row in evidence.came(*MADE, *_PASSING)
        if row.what.module in around - {*larger}
        and (row.what.role in _PASSING or row.what.shape in shapes)
        and row not in own
    ]
    begun = min((evidence.order(row) for row in own if within(first, row.what.module)), default=0)
    if any(_is_resized(row) and evidence.order(row) < begun for row in evidence.came(*MADE)):
        return None  # who made what the layer is given is nearer to the cause
    made = _maker_of(evidence, first, shape)
    now = f"{shape.text} of {made.operator}" if made else shape.text
    module = evidence.module(first, shape.numbers)
    values = {"now": now, "before": given.before.text}
    placed = [row for row in own if within(first, row.what.module)]
    counted = evidence.counted(made.operator) if made is not None else None
    is_new = counted is not None and counted.rose
    is_new = is_new or (made is not None and _made_otherwise(evidence, made, shape))
    origin = made if is_new or not placed else None  # else what it is given to
    return cause("given", rows, shown_by(placed or own or rows), origin, module=module, **values)


class _Given(NamedTuple):
    """What layers of a pattern are given that were given less."""

    now: list[Sized]
    before: Sized
    numbers: str
    """Those of the modules that are given any of them."""


def _given_larger(evidence: Evidence) -> dict[str, _Given]:
    """Return by pattern what layers are given that is larger than it was, in the order of their
    calls.
    """
    found: dict[str, _Given] = {}
    for pattern, (before, now) in changed_values(evidence, GIVEN):
        came, gone = new_in(now, before), new_in(before, now)
        if came and gone and prod(came[0].shape) > prod(gone[0].shape):
            found[pattern] = _Given(came, gone[0], join_numbers([one.numbers for one in came]))
    return found


def _maker_of(evidence: Evidence, module: str, given: Sized) -> Origin | None:
    """Return who made what a layer is given now; ``None`` where it is an input of the step."""
    for read in evidence.ran.read_in(module, read_numbers(given.numbers)):
        if read.shape == given.shape and not given.kind and read.kind is not Kind.PARAMETER:
            return read.origin if read.origin.operator and read.origin.line else None
    return None


def _made_otherwise(evidence: Evidence, made: Origin, given: Sized) -> bool:
    """Tell whether an operator made something smaller at its place."""
    gone = evidence.gone(fold(made.module)[0], made.operator)
    return any(0 < prod(one.shape) < prod(given.shape) for one in gone)


def _is_resized(row: Row) -> bool:
    return row.before is not None and row.now is not None and row.before.shape != row.now.shape


def _is_in(row: Row, pattern: str, numbers: str) -> bool:
    """Tell whether a row is about modules of these numbers alone, or in them."""
    if not within(pattern, row.what.module):
        return False
    own = read_numbers(row.numbers)[: pattern.count("*")]
    wanted = read_numbers(numbers)
    if not wanted or len(own) != len(wanted):
        return not wanted
    around = zip(own[:-1], wanted[:-1], strict=True)  # of which all may be meant, an empty set
    return bool(own[-1]) and own[-1] <= wanted[-1] and all(one <= other for one, other in around)
