"""What facts say of layers, read: ``Conv2d(3, 32, stride=(2, 2)) @0-3`` and others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from pytest_torchmem.diagnosis.causes import Evidence
from pytest_torchmem.profile.facts import LAYERS

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
    """Return how many numbers a shape such as ``[4, 64]`` has."""
    return prod(int(size) for size in shape.strip("[]").split(",") if size.strip())


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
    if kept.intersection(unnamed):  # which of them it is, their places alone say
        kept.update(unnamed)
    return f"{name}({', '.join(part for part in own if part in kept)})"


def settings_of(text: str) -> list[str]:
    """Return the settings of a layer, each as ``name=value`` or, where it has no name, a value."""
    inside = text[len(class_of(text)) :].removeprefix("(").removeprefix(": ")
    return _OUTSIDE_OF_BRACKETS.split(inside.removesuffix(")") if text.endswith(")") else inside)


def set_otherwise(evidence: Evidence) -> set[str]:
    """Return the patterns of torch's layers whose settings changed, and not their widths alone."""
    found = set()
    for pattern, (before, now) in changed_texts(evidence, LAYERS):
        old, new = layers_of(before), layers_of(now)
        gone = [text for text in old if text not in new and text.endswith(")")]
        came = [text for text in new if text not in old and text.endswith(")")]
        if not gone or not came or class_of(gone[0]) != class_of(came[0]):
            continue
        parts = set(settings_of(came[0])) ^ set(settings_of(gone[0]))
        if any(part.rpartition("=")[0] not in _WIDTHS for part in parts):
            found.add(pattern)
    return found
