"""Causes in what a model is built of, and what its layers are given: classes, settings, shapes."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any, NamedTuple

from pytest_torchmem.diagnosis import causes, difference
from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, rule, shown_by, total, within
from pytest_torchmem.printable import first_of, listed
from pytest_torchmem.profile import facts, module_paths
from pytest_torchmem.profile.facts import Layer, Sized, Topic, is_width
from pytest_torchmem.profile.module_paths import are_among, join_numbers, prefixes, read_numbers
from pytest_torchmem.profile.timeline import Kind, Role

_LONG = 40
"""Letters of a layer beyond which another class is told by its name alone."""


def changed_values(
    evidence: Evidence, topic: str, *, also_new: bool = False
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what changed of a topic that the snapshot has, by name."""
    for change in evidence.about(topic) if Topic.LAYERS in evidence.before.facts else ():
        if change.now and (change.before or also_new):
            yield change.name, (change.before, change.now)


def differing_settings(own: Layer, other: Layer) -> str:
    """Return in words how a layer differs: its class, or the settings alone of one class, or of
    two of the program's own: that one has another name says nothing.
    """
    if own.is_of_torch is not other.is_of_torch:  # most often a class of the other
        shared = {
            name: value
            for name, value in own.settings.items()
            if other.settings.get(name, value) != value and not (is_width(name) or name.isdecimal())
        }
        if shared:
            return f"{own.name}({', '.join(facts.parts_of(shared))})"
    if own.kind != other.kind and (own.is_of_torch or other.is_of_torch):
        is_short = len(own.text) + len(other.text) <= 2 * _LONG
        return own.text if is_short else _switched_on(own, other)
    differ = {name for name, value in own.settings.items() if other.settings.get(name) != value}
    if any(name.isdecimal() for name in {*differ, *(other.settings.keys() - own.settings.keys())}):
        differ |= {name for name in own.settings if name.isdecimal()}  # their places say which
    if not own.is_of_torch:  # what is new with a value that switches nothing on says nothing
        differ -= {n for n in differ - other.settings.keys() if not own.settings[n]}
    kept = {name: value for name, value in own.settings.items() if name in differ}
    if own.kind == other.kind and own.is_of_torch:  # which says of a switch that it is not as usual
        lost = other.settings.items() - own.settings.items()
        kept |= {n: not on for n, on in lost if n not in own.settings and type(on) is bool}
    parts = ", ".join(facts.parts_of(kept))
    return f"{own.name}({parts})" if own.is_of_torch else parts


def _switched_on(own: Layer, other: Layer) -> str:
    """Return the class of a layer, with what is switched on in it and not in another one."""
    came = own.settings.items() - other.settings.items()
    on = ", ".join(sorted(f"{name}=True" for name, value in came if value is True))
    return f"{own.name}({on})" if on else own.name


class LayerChange(NamedTuple):
    """How layers of a pattern changed that changed alike."""

    now: str
    """What they have that they had not: their class, and the settings that differ."""
    before: str
    layer: Layer
    """One of them."""
    was: Layer
    numbers: str

    @property
    def is_same_class(self) -> bool:
        """Whether they are still of the class that they were of, or of another of the program's."""
        own = not (self.layer.is_of_torch or self.was.is_of_torch)
        return own or self.layer.kind == self.was.kind

    @property
    def is_of_torch(self) -> bool:
        """Whether a layer of torch, or another class, is what changed, and no attribute."""
        return self.layer.is_of_torch or not self.is_same_class

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The settings that differ: what each is and was, ``None`` where it is not there."""
        own, other = self.layer.settings, self.was.settings
        names = dict.fromkeys(name for name, _ in own.items() ^ other.items())
        return {name: (own.get(name), other.get(name)) for name in names}

    @property
    def is_narrower(self) -> bool:
        """Whether no more changed than that widths are smaller."""
        return self.layer.kind == self.was.kind and all(
            is_width(name) and type(now) is type(was) is int and now < was
            for name, (now, was) in self.changed.items()
        )

    @property
    def is_of_shares(self) -> bool:
        """Whether no more changed than numbers with a point that are not 0. Some decide the size of
        what the layer makes (``scale_factor``), none that of anything else (``eps``).
        """
        changed = [one for pair in self.changed.values() for one in pair]
        are_shares = bool(changed) and all(type(one) is float and one for one in changed)
        return are_shares and self.layer.kind == self.was.kind

    @property
    def is_of_rates(self) -> bool:
        """Whether no more changed of a program's own module than numbers with a point, or came."""
        sides = self.layer.settings, self.was.settings
        changed = sides[0].items() ^ sides[1].items()
        new = sides[0].keys() - sides[1].keys()
        return not self.is_of_torch and all(
            type(value) is float or (type(value) is int and name in new) for name, value in changed
        )

    @property
    def factor(self) -> float:
        """By how much the number that changed most is another one; infinite for other settings."""
        found = 1.0
        for now, was in self.changed.values():
            if not (isinstance(now, int | float) and isinstance(was, int | float) and now and was):
                return inf
            found = max(found, now / was, was / now)
        return found

    @property
    def has_other_names(self) -> bool:
        """Whether numbers of a program's own module have other names, so that none says more."""
        own, other = self.layer.settings, self.was.settings
        changed = own.items() ^ other.items()
        are_numbers = all(type(value) in (int, float) for _, value in changed)
        are_renamed = bool(changed) and {name for name, _ in changed} == own.keys() ^ other.keys()
        return not self.is_of_torch and are_renamed and are_numbers and len(own) == len(other)

    @property
    def is_set_otherwise(self) -> bool:
        """Whether settings changed, and not the widths alone.

        Which numbers of a program's own modules are widths is not known: a switch is none.
        """
        return self.is_same_class and any(
            not is_width(name) and (self.layer.is_of_torch or type(value) not in (int, float))
            for name, value in self.layer.settings.items() ^ self.was.settings.items()
        )


def changes_between(before: tuple[Layer, ...], now: tuple[Layer, ...]) -> list[LayerChange]:
    """Return how the layers of a pattern changed, by two facts.

    Layers that differ in width may have changed in the same setting: a switch of some stages.
    """
    gone, came = facts.exchanged(before, now)
    found: dict[tuple[str, str], list[tuple[Layer, Layer]]] = {}
    for layer in came if gone else ():
        there = [one for one in gone if _shared(layer, one)] or gone[:1]
        there.sort(key=lambda one: -_shared(layer, one))
        was = dict.fromkeys(differing_settings(one, layer) for one in there)
        change = differing_settings(layer, there[0]), " and ".join(was)
        found.setdefault(change, []).append((layer, there[0]))
    return [
        LayerChange(
            *change,
            *alike[0],
            join_numbers(one.numbers for one, _ in alike) if alike[1:] else alike[0][0].numbers,
        )
        for change, alike in found.items()
    ]


def _shared(layer: Layer, other: Layer) -> int:
    """Return how many modules of a pattern are one and were the other."""
    both = zip(read_numbers(layer.numbers), read_numbers(other.numbers), strict=False)
    return prod(len(star & other) for star, other in both)


def set_otherwise(evidence: Evidence) -> set[str]:
    """Return the patterns of layers of another class, or in another setting than their widths."""
    return {
        pattern
        for pattern, (before, now) in changed_values(evidence, Topic.LAYERS)
        for change in changes_between(before, now)
        if change.is_set_otherwise or not change.is_same_class
    }


def new_modules(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the outermost modules that are new, each as a pattern and the numbers in it."""
    if evidence.about(Topic.COMPILED):
        return  # the calls of compiled modules are not to be seen but where a graph breaks
    known, present = evidence.then(Topic.LAYERS), evidence.present(Topic.LAYERS)
    parents = {path for name in known for path in prefixes(name)}
    known_roots = {path.partition(".")[0] for path in known}
    for name, (before, now) in changed_values(evidence, Topic.LAYERS, also_new=True):
        if not before and not known_roots.isdisjoint(name.split(".")[1:]):
            continue  # what was called by itself is called in a module that it is no part of
        inside = [path for path in present if path.startswith(f"{name}.")]
        moved = bool(inside) and all(path in known for path in inside)
        if not before and (moved or known.get(name.rpartition(".")[0]) == now):
            continue  # what is in it, or stood there itself, has been wrapped
        if not before:
            yield next((path for path in prefixes(name) if path not in parents), name), ""
            continue
        # Where modules of a pattern are not all alike, which of them are new is not told.
        own, other = (rows[0].numbers if not rows[1:] else "" for rows in (now, before))
        if own == other or "*" not in name:
            continue
        added = module_paths.only_in(own, other)
        changed = [a != b for a, b in zip(own.split("/"), other.split("/"), strict=False)]
        if added == own or changed.count(True) != 1:
            continue
        star = changed.index(True) + 1
        parts = name.split(".")
        stars = [place for place, part in enumerate(parts) if part == "*"]
        around, number = ".".join(parts[: stars[star - 1] + 1]), "/".join(added.split("/")[:star])
        beside = (rows for path, rows in known.items() if path != name and within(around, path))
        there = ("/".join(one.numbers.split("/")[:star]) for rows in beside for one in rows)
        # What was shared, or of some modules alone, is new in others that there were.
        is_there = are_among(number, join_numbers(there))
        yield (name, added) if is_there else (around, number)


_KEEPS_SHAPE = re.compile("Norm|Drop|LU|Tanh|Sigmoid|Mish")
"""Layers of torch that make as much as they are given."""
_PASSING = (Role.ACTIVATION, Role.GRADIENT_TEMPORARY)


@rule("layer", "{module} {are} {now}, and {were} {before}", sure=True)
def another_layer(evidence: Evidence) -> Cause | None:
    """An activation, a norm, a stride or a dropout is another one."""
    return _largest(evidence, "layer", of_torch=True)


@rule("attribute", "{module} {has} {now}, and had {before}")
def another_attribute(evidence: Evidence) -> Cause | None:
    """A module of the program's has another number or switch among its attributes."""
    return _largest(evidence, "attribute", of_torch=False)


@rule("more layers", "{modules} {have} more layers: {kinds}", sure=True)
def more_layers(evidence: Evidence) -> Cause | None:
    """Layers were put between others of a ``Sequential``."""
    put = _put_between(evidence)
    modules = [pattern.rpartition(".")[0] for pattern in put]
    rows = dict.fromkeys(row for one in modules for row in evidence.of_module(one))
    kinds = listed([*dict.fromkeys(kind for more in put.values() for kind in more)])
    have, names = "have" if modules[1:] else "has", listed([*map(evidence.short, modules)])
    return cause("more layers", rows, modules=names, have=have, kinds=kinds)


def _put_between(evidence: Evidence) -> dict[str, Counter[str]]:
    """Return by pattern of which classes there are more layers, where there are no fewer of any,
    and as many modules around: those after them have other numbers than before.
    """
    found: dict[str, Counter[str]] = {}
    for pattern, (before, now) in changed_values(evidence, Topic.LAYERS):
        more = _counted(now) - _counted(before)
        sides = (join_numbers(one.numbers for one in side) for side in (before, now))
        (outer, _, was), (around, _, own) = (one.rpartition("/") for one in sides)
        is_put = pattern.endswith(".*") and now[1:] and outer == around and own != was
        if is_put and more and not _counted(before) - _counted(now):
            found[pattern] = more
    return found


def _counted(layers: Iterable[Layer]) -> Counter[str]:
    found = Counter[str]()
    for one in layers:
        found[one.name] += prod(map(len, read_numbers(one.numbers)))
    return found


def _largest(evidence: Evidence, name: str, *, of_torch: bool) -> Cause | None:
    """Return the changed modules that explain most: of another class or of torch, or others."""
    resized = [row for row in evidence.came(Role.PARAMETER) if row.is_resized]
    otherwise = set_otherwise(evidence) if resized else set()
    larger, put = _given_larger(evidence), _put_between(evidence)
    alike: dict[tuple[str, str], list[tuple[LayerChange, Cause]]] = {}
    for pattern, (before, now) in changed_values(evidence, Topic.LAYERS):
        # wider layers are another cause
        is_meant = pattern not in put and (not resized or pattern in otherwise)
        for change in changes_between(before, now) if is_meant else ():
            found = _of_change(evidence, name, pattern, change, larger)
            is_meant = change.is_of_torch is of_torch and not change.has_other_names
            if found is not None and is_meant:
                kinds = change.layer.kind, change.was.kind
                key = change[:2] if change.is_same_class or not of_torch else kinds
                alike.setdefault(key, []).append((change, found))
    return causes.largest(map(_together, alike.values()))


def _together(found: Sequence[tuple[LayerChange, Cause]]) -> Cause:
    """Return modules that changed alike as one cause."""
    found = sorted(found, key=lambda one: -one[1].nbytes)
    change, best = found[0]
    if not found[1:]:
        return best
    values = {**best.values, "are": "are", "were": "were", "has": "have"}
    if len({other[:2] for other, _ in found}) > 1:
        sides = change.layer, change.was
        values |= {"now": _switched_on(*sides), "before": _switched_on(*sides[::-1])}
    paths = [one.values["module"] for _, one in found]
    around = module_paths.common_parent(paths)
    names = [path.removeprefix(f"{around}.") for path in paths]
    values["module"] = f"{listed(names)} of {around}" if around else listed(names)
    rows = tuple(dict.fromkeys(row for _, one in found for row in one.rows))
    return replace(best, values=values, nbytes=total(rows), rows=rows)


def _of_change(
    evidence: Evidence, name: str, pattern: str, change: LayerChange, larger: "Mapping[str, _Given]"
) -> Cause | None:
    """Return what layers of a pattern that changed alike explain."""
    numbers = change.numbers
    inside = evidence.of_module(pattern)
    calls_others = any(evidence.rose(row.what.source) for row in inside)
    if change.is_narrower or (change.is_of_rates and calls_others):
        return None
    if not change.before and not change.is_of_torch:
        return None  # an attribute that was not there was not read either
    if change.is_same_class and not evidence.can_explain(change.factor, (Role.LIBRARY,)):
        return None
    given = larger.get(pattern)
    # Of several stars all numbers go together: what is given as before tells.
    as_before = any(are_among(numbers, one.numbers) for one in given.same) if given else True
    if given and are_among(numbers, given.numbers) and not as_before:
        return None  # what is before it makes more
    own = [row for row in inside if _is_about(row, pattern, numbers)]
    if change.is_of_shares and not own:
        return None
    resized = [row for row in evidence.came(Role.PARAMETER) if row.is_resized]
    is_wider = change.layer.widths != change.was.widths or any(
        not change.is_of_torch or _is_about(row, pattern, numbers) for row in resized
    )
    if change.is_same_class and (
        is_wider or (change.is_of_torch and _is_before(evidence, pattern, numbers, larger))
    ):
        own = [*evidence.came()]  # what is computed of its output is larger, too
    if not own and change.layer.name == "Identity" and _KEEPS_SHAPE.search(change.was.name):
        return None  # what is given to others is as large without it
    rows = own or [row for row in evidence.came() if row.is_resized]
    if not change.now:
        return None
    module = evidence.module(pattern, numbers)
    before, now = change.before or "not", change.now
    computed = (row.count_now for row in rows if ".parametrizations." in row.what.module)
    if (calls := max(computed, default=0)) > 1:  # torch.nn.utils.parametrize.cached() is for this
        now = f"{now}, whose weight is computed in each of {calls} calls"
    values = {"are": "is", "were": "was", "has": "has", "now": now, "before": before}
    found = cause(name, rows, module=module, **values)
    return found and causes.placed_in(pattern, found)


def _is_about(row: difference.Row, pattern: str, numbers: str) -> bool:
    """Tell whether a row is about a module of these numbers, or about none of the pattern."""
    return not within(pattern, row.what.module) or module_paths.have_common(row.numbers, numbers)


def _is_before(
    evidence: Evidence, pattern: str, numbers: str, larger: "Mapping[str, _Given]"
) -> bool:
    """Tell whether a layer is called before all that are given more, and may be why they are."""
    order = [*evidence.present(Topic.GIVEN)]
    first = next(iter(larger), None)
    if first is None or pattern not in order:
        return first is not None
    around = (a for a, b in zip(prefixes(pattern), prefixes(first), strict=False) if a == b)
    stars = max((path.count("*") for path in around), default=0)  # of the modules that both are in
    own, other = _first_of(numbers, stars), _first_of(larger[first].numbers, stars)
    return own < other or (own == other and order.index(pattern) <= order.index(first))


def _first_of(numbers: str, stars: int) -> list[int]:
    return [min(star, default=0) for star in read_numbers(numbers)[:stars]]


_SHARDED = "reshard_after_forward"


@rule("sharded", "{module}{kind} is no longer given to fully_shard, only those around", sure=True)
def no_longer_sharded(evidence: Evidence) -> Cause | None:
    """Parameters are gathered with those of the modules around, all of them together."""
    there = evidence.called_modules
    for change in evidence.about(Topic.LAYERS):
        new = facts.new_in(change.now, change.before)
        lost = [one for one in facts.lacking(change.before, change.now) if _SHARDED in one.settings]
        is_there = change.name in there and bool(new or not change.now)  # and not fewer of them
        if lost and is_there and not any(_SHARDED in one.settings for one in new):
            module = evidence.module(change.name, lost[0].numbers)
            kinds = [one.name for one in new if one.kind != lost[0].kind]
            kind = f" ({kinds[0]}, and was {lost[0].name.removeprefix('FSDP')})" if kinds else ""
            return cause("sharded", evidence.came(), module=module, kind=kind)
    return None


@rule("layer gone", "{layer} in {module} is gone", last=True)
def layer_gone(evidence: Evidence) -> Cause | None:
    """A pooling or a stride no longer makes what follows it smaller."""
    for pattern, (before, now) in changed_values(evidence, Topic.LAYERS):
        _, came = facts.exchanged(before, now)
        gone = [one for one in facts.new_in(before, now) if one.is_of_torch]
        if gone and not came:
            place = evidence.short(pattern.removesuffix(".*"))
            return cause("layer gone", evidence.came(), layer=gone[0].text, module=place)
    return None


@rule("new module", "{module} is {new}{instead}", sure=True)
def new_module(evidence: Evidence) -> Cause | None:
    """A part of the model was not there before."""
    best, counts = None, evidence.counts()
    for pattern, numbers in new_modules(evidence):
        rows = [row for row in evidence.came() if _is_in(row, pattern, numbers)]
        places = _places_of_more(evidence, pattern)
        places -= {row.place for row in evidence.came(*causes.KEPT)}
        rows += [row for row in evidence.came() if row.place in places and row not in rows]
        saved = [  # which is given to it, and was made as often before
            row
            for row in evidence.of_module(pattern)
            if row.what.role == Role.SAVED
            and not row.is_resized
            and row.what.source not in counts
            and row not in rows
        ]
        instead = "" if numbers else _in_the_place_of(evidence, pattern)
        saves = total(saved) > total(rows)
        own = (one.what for one in evidence.alive.groups if within(pattern, one.what.module))
        has_own = any(one.role in (Role.PARAMETER, Role.BUFFER) for one in own)
        if not (saves or "." in pattern or has_own):
            continue  # a function, such as a loss, may have become one: what it calls says more
        if saves:
            instead += f", and saves the output of {shown_by(saved).what.source} for its backward"
        path = evidence.short(module_paths.unfold(pattern, numbers))
        stars = numbers.count("/") + 1
        known = (one for one in evidence.known_groups if within(pattern, one.what.module))
        there = ("/".join(one.numbers.split("/")[:stars]) for one in known)
        is_known = any(not numbers or are_among(numbers, one) for one in there)
        new = "called, and was not" if is_known else "new"
        if not has_own and (part := _part_of_known(evidence, pattern)):
            path, new, instead = evidence.short(part), "called by itself", ""
        found = cause("new module", [*rows, *saved], module=path, new=new, instead=instead)
        if found is not None and found.row is not None and (saves or not found.row.what.line):
            found = causes.placed_in(pattern, found)
        best = causes.largest((best, found))
    return best


def _part_of_known(evidence: Evidence, pattern: str) -> str:
    """Return the part of a model that is called without what is around it, "" if it is none."""
    known, present = evidence.then(Topic.LAYERS), evidence.present(Topic.LAYERS)
    root = pattern.partition(".")[0]
    inside = {path.removeprefix(root): present[path] for path in present if within(pattern, path)}
    first = next(iter(inside), "")
    parts = (path.removesuffix(first) for path in known if first and path.endswith(first))
    same = (one for one in parts if all(known.get(one + path) == inside[path] for path in inside))
    return next(same, "")


def _places_of_more(evidence: Evidence, pattern: str) -> set[tuple[str, str]]:
    """Return the places of operators called more often, in new modules or with their outputs."""
    found: set[tuple[str, str]] = set()
    for name in evidence.more_called:
        places = [*evidence.ran.places(name)]
        modules = {place.module for place in places}
        if "" in modules:  # a loss of what a module makes
            modules |= evidence.makers_before(name)
        if any(within(pattern, module) for module in modules):
            found.update((module_paths.fold(place.module)[0], place.line) for place in places)
    return found


def _in_the_place_of(evidence: Evidence, pattern: str) -> str:
    """Return in words which modules are gone where a new one is, "" if none."""
    around, own = pattern.rpartition(".")[0], _kinds(evidence.present(Topic.LAYERS), pattern)
    left = {path for name in evidence.present(Topic.LAYERS) for path in prefixes(name)}
    gone = dict.fromkeys(
        path
        for change in evidence.about(Topic.LAYERS)
        if not change.now
        for path in prefixes(change.name)
        if path not in left
        and (path.rpartition(".")[0] == around or own == _kinds(evidence.then(Topic.LAYERS), path))
    )
    given = evidence.then(Topic.GIVEN).items()

    def most_given(path: str) -> int:
        inside = (one for name, own in given if within(path, name) for one in own)
        return max((prod(one.shape) for one in inside), default=0)

    most = sorted(gone, key=most_given, reverse=True)  # that whose shape is told
    otherwise = _otherwise_in(evidence, pattern, most) + _given_more(evidence, pattern, most)
    return f", in the place of {first_of(map(evidence.short, most))}{otherwise}" if gone else ""


def _given_more(evidence: Evidence, pattern: str, gone: Sequence[str]) -> str:
    """Return in words that a new module is given more than what is gone, "" if it is not."""
    sides = (evidence.then(Topic.GIVEN), gone), (evidence.present(Topic.GIVEN), [pattern])
    before, now = (
        [one for path in given if any(within(own, path) for own in of) for one in given[path]]
        for given, of in sides
    )
    was, own = (max(one, key=lambda one: prod(one.shape), default=None) for one in (before, now))
    if was is None or own is None or prod(own.shape) <= prod(was.shape):
        return ""
    return f", and is given {own.text}, where {was.text} was given before"


def _otherwise_in(evidence: Evidence, pattern: str, gone: Sequence[str]) -> str:
    """Return in words how layers of a new module differ from those of as many widths in its place,
    "" if that is not known, or they do not.
    """
    changes = evidence.about(Topic.LAYERS)
    left = (c for c in changes if not c.now and any(within(one, c.name) for one in gone))
    own = [one for change in changes if within(pattern, change.name) for one in change.now]
    before = [one for change in left for one in change.before]
    for was in (one for one in before if one.is_of_torch and one.widths):
        alike = [one for one in own if (one.kind, one.widths) == (was.kind, was.widths)]
        if alike and all(_without_bias(one) != _without_bias(was) for one in alike):
            texts = differing_settings(alike[0], was), differing_settings(was, alike[0])
            return ", with {} instead of {}".format(*texts) if all(texts) else ""
    return ""


def _without_bias(layer: Layer) -> dict[str, Any]:
    return {name: value for name, value in layer.settings.items() if name != "bias"}


def _kinds(layers: Mapping[str, tuple[Layer, ...]], path: str) -> set[str]:
    return {one.kind for one in layers.get(path, ())}


@rule("given", "{module} is given {now}, and was given {before}{since}")
def given_more(evidence: Evidence) -> Cause | None:
    """A layer works on more than it did: every position instead of one, a longer sequence."""
    inputs = evidence.about(Topic.INPUTS)
    if any(change.before and change.now for change in inputs) or layer_gone(evidence):
        return None  # which says why
    larger = _given_larger(evidence)
    if not larger:
        return None
    shapes = {one.shape for given in larger.values() for one in given.now}  # a layer may save them
    first, given = next(iter(larger.items()))  # in the order of their calls
    shape = given.now[0]
    most = max(prod(one.now[0].shape) / max(prod(one.before.shape), 1) for one in larger.values())
    if not evidence.can_explain(most):
        return None
    own = [row for row in evidence.came() if any(within(one, row.what.module) for one in larger)]
    around = {path for one in larger for path in ("", *prefixes(one))}
    rows = own + [
        row
        for row in evidence.came(*causes.MADE, *_PASSING)
        if row.what.module in around - {*larger}
        and (row.what.role in _PASSING or row.what.shape in shapes)
        and row not in own
    ]
    if not rows:
        return None
    index = _index_of(evidence, first, shape)
    read = evidence.ran.allocation(index).origin if index >= 0 else None
    made = read if read is not None and read.operator and read.line else None
    now = f"{shape.text} of {made.operator}" if made else shape.text
    module = evidence.module(first, shape.numbers)
    values = {"now": now, "before": given.before.text, "since": ""}
    placed = [row for row in own if within(first, row.what.module)]
    origin = None if placed else made
    new = [size for size, was in zip(shape.shape, given.before.shape, strict=False) if size != was]
    is_one = len(new) == 1 and len(shape.shape) == len(given.before.shape)
    source = evidence.first_with(new[0]) if is_one else None
    if source is not None and source.origin != made:
        origin, values["since"] = source.origin, f": {source.origin.operator} makes {source.tensor}"
    more = evidence.more_called  # for other causes
    calm = [row for row in placed if row.what.source not in more]
    shown = shown_by(calm or placed or own or rows)
    found = cause("given", rows, shown, origin, module=module, **values)
    return found and replace(found, larger=most)


class _Given(NamedTuple):
    """What layers of a pattern are given that were given less."""

    now: list[Sized]
    before: Sized
    numbers: str
    """Those of the modules that are given any of them."""
    same: list[Sized]
    """What others of the pattern are given, as before."""


def _given_larger(evidence: Evidence) -> dict[str, _Given]:
    """Return by pattern the larger inputs that layers are given, in the order of their calls."""
    found: dict[str, _Given] = {}
    for pattern, (before, now) in changed_values(evidence, Topic.GIVEN):
        gone, came = facts.exchanged(before, now)
        if came and gone and prod(came[0].shape) > prod(gone[0].shape):
            numbers, same = join_numbers([one.numbers for one in came]), [*{*before} & {*now}]
            found[pattern] = _Given(came, gone[0], numbers, same)
    return found


def _index_of(evidence: Evidence, module: str, given: Sized) -> int:
    """Return the index of what a layer is given now, -1 where that is not known."""
    for index in evidence.ran.read_in(module, read_numbers(given.numbers)):
        read = evidence.ran.allocation(index)
        if read.shape == given.shape and not given.kind and read.kind is not Kind.PARAMETER:
            return index
    return -1


def _is_in(row: difference.Row, pattern: str, numbers: str) -> bool:
    """Tell whether a row is about modules of these numbers alone, or in them."""
    if not within(pattern, row.what.module):
        return False
    own = read_numbers(row.numbers)[: pattern.count("*")]
    wanted = read_numbers(numbers)
    if not wanted or len(own) != len(wanted):
        return not wanted
    around = zip(own[:-1], wanted[:-1], strict=True)  # of which all may be meant, an empty set
    return bool(own[-1]) and own[-1] <= wanted[-1] and all(one <= other for one, other in around)
