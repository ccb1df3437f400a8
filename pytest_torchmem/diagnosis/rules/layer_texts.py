"""What facts say of layers, and how they changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from pytest_torchmem.diagnosis.causes import Evidence
from pytest_torchmem.profile.facts import (
    LAYERS,
    Layer,
    Scalar,
    exchanged,
    parts_of,
)
from pytest_torchmem.profile.module_paths import join_numbers, only_in, prefixes, read_numbers

_LONG = 40
"""Letters of a layer beyond which another class is told by its name alone."""
_WIDTHS = ("in_features", "out_features")


def widths_of(layer: Layer) -> list[Scalar]:
    """Return how many numbers a layer takes and makes: ``Conv2d(3, 32, …)``, ``in_features=3``."""
    return [size for name, size in layer.settings.items() if _is_width(name) and type(size) is int]


def _is_width(name: str) -> bool:
    return name.isdecimal() or name in _WIDTHS


def changed_values(
    evidence: Evidence, topic: str, *, also_new: bool = False
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield what changed of a topic that the snapshot has, by name."""
    for change in evidence.about(topic) if LAYERS in evidence.before.facts else ():
        if change.now and (change.before or also_new):
            yield change.name, (change.before, change.now)


def differing_settings(own: Layer, other: Layer) -> str:
    """Return a layer as text with those of its settings alone that another has not."""
    if own.kind != other.kind:
        return own.text if len(own.text) + len(other.text) <= 2 * _LONG else own.name
    differ = {name for name, value in own.settings.items() if _differs(name, value, other)}
    if any(name.isdecimal() for name in {*differ, *(other.settings.keys() - own.settings.keys())}):
        differ |= {name for name in own.settings if name.isdecimal()}  # their places say which
    kept = {name: value for name, value in own.settings.items() if name in differ}
    return f"{own.name}({', '.join(parts_of(kept))})"


def _differs(name: str, value: Scalar, other: Layer) -> bool:
    return name not in other.settings or other.settings[name] != value


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
        """Whether they are still of the class that they were of."""
        return self.layer.kind == self.was.kind

    @property
    def is_of_torch(self) -> bool:
        """Whether a layer of torch, or another class, is what changed, and no attribute."""
        return self.layer.is_of_torch or not self.is_same_class

    @property
    def is_set_otherwise(self) -> bool:
        """Whether settings changed, and not the widths alone.

        Which numbers of a program's own modules are widths is not known: a switch is none.
        """
        if not self.is_same_class:
            return False
        sides = (self.layer, self.was), (self.was, self.layer)
        return any(
            not _is_width(name) and (self.layer.is_of_torch or type(value) not in (int, float))
            for own, other in sides
            for name, value in own.settings.items()
            if _differs(name, value, other)
        )


def changes_between(before: tuple[Layer, ...], now: tuple[Layer, ...]) -> list[LayerChange]:
    """Return how the layers of a pattern changed, by two facts.

    Layers that differ in width may have changed in the same setting: a switch of some stages.
    """
    gone, came = exchanged(before, now)
    found: dict[tuple[str, str], list[tuple[Layer, Layer]]] = {}
    for layer in came if gone else ():
        own = read_numbers(layer.numbers)
        there = (one for one in gone if _meet(own, read_numbers(one.numbers)))
        was = next(there, gone[0])
        change = differing_settings(layer, was), differing_settings(was, layer)
        found.setdefault(change, []).append((layer, was))
    return [
        LayerChange(
            *change,
            *alike[0],
            join_numbers(one.numbers for one, _ in alike) if alike[1:] else alike[0][0].numbers,
        )
        for change, alike in found.items()
    ]


def is_switched(evidence: Evidence, patterns: Collection[str]) -> bool:
    """Tell whether one of these layers is a module of the program's own."""
    layers = evidence.now.facts.get(LAYERS, {})
    rows = (row for one in patterns for row in layers.get(one, ()))
    return any(row.settings and not row.is_of_torch for row in rows)


def _meet(numbers: list[set[int]], others: list[set[int]]) -> bool:
    return all(one & other for one, other in zip(numbers, others, strict=False))


def set_otherwise(evidence: Evidence) -> set[str]:
    """Return the patterns of layers whose settings changed, and not their widths alone."""
    return {
        pattern
        for pattern, (before, now) in changed_values(evidence, LAYERS)
        if any(change.is_set_otherwise for change in changes_between(before, now))
    }


def new_modules(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the outermost modules that are new, each as a pattern and the numbers in it."""
    known = evidence.before.facts.get(LAYERS, {})
    parents = {path for name in known for path in prefixes(name)}
    for name, (before, now) in changed_values(evidence, LAYERS, also_new=True):
        if not before and known.get(name.rpartition(".")[0]) == now:
            continue  # it stood there itself, and has been wrapped
        if not before:
            yield next((path for path in prefixes(name) if path not in parents), name), ""
            continue
        # Where modules of a pattern are not all alike, which of them are new is not told.
        own, other = (rows[0].numbers if not rows[1:] else "" for rows in (now, before))
        if own == other or "*" not in name:
            continue
        added = only_in(own, other)
        changed = [a != b for a, b in zip(own.split("/"), other.split("/"), strict=False)]
        if added == own or changed.count(True) != 1:
            continue
        star = changed.index(True) + 1
        parts = name.split(".")
        stars = [place for place, part in enumerate(parts) if part == "*"]
        yield ".".join(parts[: stars[star - 1] + 1]), "/".join(added.split("/")[:star])
