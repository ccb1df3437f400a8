"""What facts say of layers, read: ``Conv2d(3, 32, stride=(2, 2)) @0-3`` and others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from math import prod
from typing import NamedTuple

from pytest_torchmem.diagnosis.causes import Evidence
from pytest_torchmem.profile.facts import LAYERS
from pytest_torchmem.profile.module_paths import (
    are_among,
    join_numbers,
    only_in,
    prefixes,
    read_numbers,
)

_LONG = 40
"""Letters of a layer beyond which another class is told by its name alone."""
_WIDTHS = ("", "in_features", "out_features")
_OUTSIDE_OF_BRACKETS = re.compile(r", (?![^(\[]*[)\]])")


def class_of(text: str) -> str:
    """Return the class of a layer: ``Name(settings)`` of torch, or ``Name: settings``."""
    return text.partition("(")[0].partition(":")[0]


def widths_of(text: str) -> list[str]:
    """Return how many numbers a layer takes and makes: ``Conv2d(3, 32, …)``, ``in_features=3``."""
    parts = (part.rpartition("=") for part in settings_of(text))
    return [size for name, _, size in parts if size.isdecimal() and name in _WIDTHS]


def element_count(shape: str) -> int:
    """Return how many numbers a shape such as ``[4, 64]`` or ``packed [90, 8]`` has."""
    sizes = shape.removeprefix("packed ").strip("[]").split(",")
    return prod(int(size) for size in sizes if size.strip())


def changed_texts(
    evidence: Evidence, topic: str, *, also_new: bool = False
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield what changed of a topic that the snapshot has, by name."""
    for change in evidence.about(topic) if LAYERS in evidence.before.facts else ():
        if change.now and (change.before or also_new):
            yield change.name, (change.before, change.now)


def layers_of(fact: str) -> dict[str, str]:
    """Return the layers of a fact, and the numbers of the modules that are each."""
    parts = (part.rpartition(" @") for part in fact.split(" | "))
    return {text or last: last if text else "" for text, _, last in parts}


def exchanged(before: str, now: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the layers of a fact that are no longer what they were, and what they are now, each
    with its numbers: also where others of the pattern were that already, or are that still.
    """
    old, new = layers_of(before), layers_of(now)
    gone = {text: numbers for text, numbers in old.items() if text not in new}
    came = {text: numbers for text, numbers in new.items() if text not in old}
    if join_numbers(old.values()) != join_numbers(new.values()):
        return gone, came  # one is gone or new, and those after it have moved up or down
    return gone or _left(old, new), came or _left(new, old)


def _left(own: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return the layers of which others have fewer, with the numbers of those."""
    fewer = (text for text in own if text in others and not are_among(own[text], others[text]))
    return {text: only_in(own[text], others[text]) for text in fewer}


def numbers_of(fact: str) -> str:
    """Return the numbers of a pattern's modules where all of them are alike."""
    found = list(layers_of(fact).values())
    return found[0] if len(found) == 1 else ""


def differing_settings(text: str, other: str) -> str:
    """Return a layer with those of its settings alone that another of its class has not."""
    name = class_of(text)
    if name != class_of(other):
        return text if len(text) + len(other) <= 2 * _LONG else name
    own, others = settings_of(text), settings_of(other)
    unnamed = [part for part in own if "=" not in part]
    kept = set(own) - set(others)
    if unnamed != [part for part in others if "=" not in part]:
        kept.update(unnamed)  # which of them it is, their places alone say
    return f"{name}({', '.join(part for part in own if part in kept)})"


def settings_of(text: str) -> list[str]:
    """Return the settings of a layer, each as ``name=value`` or, where it has no name, a value."""
    inside = text[len(class_of(text)) :].removeprefix("(").removeprefix(": ")
    return _OUTSIDE_OF_BRACKETS.split(inside.removesuffix(")") if text.endswith(")") else inside)


class LayerChange(NamedTuple):
    """How layers of a pattern changed that changed alike."""

    now: str
    """What they have that they had not: their class, and the settings that differ."""
    before: str
    text: str
    """One of them as a whole."""
    was: str
    numbers: str

    @property
    def is_same_class(self) -> bool:
        """Whether they are still of the class that they were of."""
        return class_of(self.text) == class_of(self.was)

    @property
    def is_of_torch(self) -> bool:
        """Whether a layer of torch, or another class, is what changed, and no attribute."""
        return self.text.endswith(")") or not self.is_same_class

    @property
    def is_set_otherwise(self) -> bool:
        """Whether settings changed, and not the widths alone.

        Which numbers of a program's own modules are widths is not known: a switch is none.
        """
        if not self.is_same_class:
            return False
        own, others = settings_of(self.text), settings_of(self.was)
        parts = [part for part in (*own, *others) if part not in own or part not in others]
        settings = [part.rpartition("=") for part in parts]
        if not self.text.endswith(")"):
            settings = [(name, "", value) for name, _, value in settings if not _is_number(value)]
        return any(name not in _WIDTHS for name, _, _ in settings)


def changes_between(before: str, now: str) -> list[LayerChange]:
    """Return how the layers of a pattern changed, by two facts.

    Layers that differ in width may have changed in the same setting: a switch of some stages.
    """
    gone, came = exchanged(before, now)
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for text, numbers in came.items() if gone else ():
        own = read_numbers(numbers)
        there = (one for one, others in gone.items() if _meet(own, read_numbers(others)))
        was = next(there, next(iter(gone)))
        change = differing_settings(text, was), differing_settings(was, text)
        found.setdefault(change, []).append((text, was, numbers))
    changes = []
    for change, alike in found.items():
        first, was, numbers = alike[0]
        if len(alike) > 1:
            numbers = join_numbers(one for _, _, one in alike)
        changes.append(LayerChange(*change, first, was, numbers))
    return changes


def is_switched(evidence: Evidence, patterns: Collection[str]) -> bool:
    """Tell whether one of these layers is a module of the program's own."""
    layers = evidence.now.facts.get(LAYERS, {})
    return any(not layers.get(one, ")").endswith(")") and ": " in layers[one] for one in patterns)


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdecimal()


def _meet(numbers: list[set[int]], others: list[set[int]]) -> bool:
    return all(one & other for one, other in zip(numbers, others, strict=False))


def set_otherwise(evidence: Evidence) -> set[str]:
    """Return the patterns of layers whose settings changed, and not their widths alone."""
    return {
        pattern
        for pattern, (before, now) in changed_texts(evidence, LAYERS)
        if any(change.is_set_otherwise for change in changes_between(before, now))
    }


def new_modules(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the outermost modules that are new, each as a pattern and the numbers in it."""
    known = evidence.before.facts.get(LAYERS, {})
    parents = {path for name in known for path in prefixes(name)}
    for name, (before, now) in changed_texts(evidence, LAYERS, also_new=True):
        if not before and known.get(name.rpartition(".")[0]) == now:
            continue  # it stood there itself, and has been wrapped
        if not before:
            yield next((path for path in prefixes(name) if path not in parents), name), ""
            continue
        own, other = numbers_of(now), numbers_of(before)
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
