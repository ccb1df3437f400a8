"""Facts of older files, which were texts, as lists and objects: read for one release."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from pytest_torchmem.profile.facts import PACKED, Topic, settings_of

_LAYER = re.compile(r"(\w+)(?:\((.*)\)|: (.*))?")
_SHAPE = re.compile(r"(.*?) ?\[([\d, ]*)\]")


def upgraded_facts(facts: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Return facts of snapshots of schema 3, and reports of schema 2; raises ``ValueError``."""
    if any(not isinstance(text, str) for known in facts.values() for text in known.values()):
        raise ValueError("facts of this schema are texts")
    found: dict[str, dict[str, Any]] = {
        topic: {name: _UPGRADES.get(topic, str)(text) for name, text in known.items()}
        for topic, known in facts.items()
    }
    for name, text in found.pop("parameters", {}).items():
        is_tied = text.startswith("is ")
        value = text.removeprefix("is " if is_tied else "frozen").removeprefix(", ")
        found.setdefault(Topic.TIED if is_tied else Topic.FROZEN, {})[name] = value
    if Topic.OPERATORS in found:
        lists = found[Topic.OPERATORS]
        called = lists["forward"]
        others = [lists.get(name, {}) for name in ("not recorded", "in backward")]
        others = [called if one == {"all": 1} else one for one in others]
        found[Topic.OPERATORS] = {
            name: [number, *(one.get(name, 0) for one in others)] for name, number in called.items()
        }
    return found


def _parts(text: str) -> list[str]:
    return text.split(", ") if text else []


def _calls(text: str) -> list[Any]:
    number, *lines = _parts(text)
    return [int(number), lines]


def _modes(text: str) -> list[list[str]]:
    found = []
    for group in text.split("; "):
        words = _parts(group)
        numbers = words.pop() if words[-1][:1].isdigit() else ""
        for word in words:
            name = next((one for one in ("autocast", PACKED) if word.startswith(f"{one} ")), word)
            found.append([name, word[len(name) + 1 :], numbers])
    return sorted(found)


def _numbered(text: str) -> list[tuple[str, str]]:
    """Return the parts of ``ReLU() @0-3 | GELU() @4``, each with its numbers."""
    found = (part.rpartition(" @") for part in text.split(" | "))
    return [(own, last) if own else (last, "") for own, _, last in found]


def _layer(text: str, numbers: str) -> list[Any]:
    match = _LAYER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.40} is no layer")
    name, said, attributes = match.groups()
    return [name if said is None else f"nn.{name}", settings_of(said or attributes or ""), numbers]


def _shape(text: str) -> list[Any]:
    match = _SHAPE.fullmatch(text)
    kind, sizes = match.groups() if match is not None else (text, "")
    return [kind, [int(size) for size in sizes.split(",") if size.strip()]]


def _counts(text: str) -> dict[str, int]:
    if text in ("all", "none"):
        return {"all": 1} if text == "all" else {}
    parts = (part.rpartition(" ") for part in _parts(text))
    return {name: int(number) for name, _, number in parts}


_UPGRADES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys((Topic.ARGUMENTS, Topic.MODULES, Topic.OPTIMIZERS, Topic.STATES), _parts),
    **dict.fromkeys((Topic.BACKWARD, Topic.CALLS, Topic.COMPILED), _calls),
    **dict.fromkeys(
        (Topic.GIVEN, Topic.SIZES), lambda text: [[*_shape(own), at] for own, at in _numbered(text)]
    ),
    Topic.CONFIGURATION: settings_of,
    Topic.IN_PLACE: lambda text: int(text.partition(" ")[0]),
    Topic.INPUTS: lambda text: [_shape(one) for one in text.split("; ")],
    Topic.LAYERS: lambda text: [_layer(*one) for one in _numbered(text)],
    Topic.MODES: _modes,
    Topic.OPERATORS: _counts,
}
