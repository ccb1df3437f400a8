"""A timeline as plain JSON types, and back: every text once, and one list for each column."""

import re
from collections.abc import Callable, Sequence
from itertools import starmap
from types import NoneType
from typing import Any, TypeVar

from pytest_torchmem.figures import FIGURES
from pytest_torchmem.printable import printable_lines
from pytest_torchmem.profile.timeline import (
    Allocation,
    Confidence,
    Kind,
    Origin,
    Phase,
    Timeline,
)

_Value = TypeVar("_Value")


class _Numbered:
    """Values in the order in which they first came, each by its number."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list[Any]:
        return list(self.numbers)


_NUMBER = (int, NoneType)
_TEXT = (str, NoneType)
_PLAIN: dict[str, Any] = {
    "device": re.compile(r"(cpu|cuda)(:\d+)?"),
    **dict.fromkeys(("gpu", "host", "torch_version", "workload", "values"), _TEXT),
    **dict.fromkeys((*FIGURES, "world_size", "rank"), _NUMBER),
    "warnings": [str],
    "unknown_workspaces": [str],
    "calibrated_workspaces": [str],
    "library_workspaces": [str],
    "allocator_peaks": {str: {str: int}},
    "facts": dict,
    "others": [dict],
}
"""What a saved profile holds beside its timeline, by name; ``str`` stands for any name."""


def check_plain(plain: Any, spec: Any = _PLAIN, where: str = "it") -> None:
    """Raise ``ValueError`` for what ``save`` does not write: other types, negative numbers, text
    that would move a terminal's cursor.
    """
    kind: Any = spec
    if isinstance(spec, tuple):
        kind = type(plain) if type(plain) in spec else spec[0]
    elif not isinstance(spec, type):
        kind = str if isinstance(spec, re.Pattern) else type(spec)
    if (
        type(plain) is not kind
        or (kind is int and plain < 0)
        or (kind is str and escaped(plain) != plain)
        or (isinstance(spec, re.Pattern) and not spec.fullmatch(plain))
    ):
        raise ValueError(f"{where} is {plain!r:.40}")
    if isinstance(spec, list):
        for number, value in enumerate(plain):
            check_plain(value, spec[0], f"{where}[{number}]")
    elif isinstance(spec, dict) and str in spec:
        for name, value in plain.items():
            check_plain(name, str, f"a name in {where}")
            check_plain(value, spec[str], f"{where}[{name!r:.40}]")
    elif isinstance(spec, dict):
        for name in spec.keys() & plain.keys():
            check_plain(plain[name], spec[name], str(name))


def escaped(plain: Any) -> Any:
    """Return JSON types with every text as ``printable_lines`` has it."""
    if isinstance(plain, str):
        return printable_lines(plain)
    if isinstance(plain, list):
        return list(map(escaped, plain))
    if isinstance(plain, dict):
        return {escaped(name): escaped(value) for name, value in plain.items()}
    return plain


def plain_timeline(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as JSON types; ``read_timeline`` reads it."""
    origins, shapes, texts = _Numbered(), _Numbered(), _Numbered()
    allocations = timeline.allocations
    return {
        "nbytes": [found.nbytes for found in allocations],
        "kind": [texts(found.kind.value) for found in allocations],
        "origin": [origins(found.origin) for found in allocations],
        "shape": [shapes(found.shape) for found in allocations],
        "dtype": [texts(found.dtype) for found in allocations],
        "label": [texts(found.label) for found in allocations],
        "confidence": [texts(found.confidence.value) for found in allocations],
        "origins": [
            [
                *map(texts, (found.phase.value, found.module, found.operator, found.line)),
                int(found.recomputed),
            ]
            for found in origins.values()
        ],
        "shapes": [list(shape) for shape in shapes.values()],
        "events": list(timeline.events),
        "phases": [[position, phase.value] for position, phase in timeline.phases],
        "module_calls": list(timeline.module_calls),
        "texts": escaped(texts.values()),
    }


def read_timeline(plain: Any) -> Timeline:
    """Return the timeline that ``plain_timeline`` wrote.

    Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``IndexError`` for anything else.
    """
    check_plain(plain["texts"], [str], "a text")
    check_plain(plain["shapes"], [[int]], "a shape")
    texts, shapes = plain["texts"], [tuple(shape) for shape in plain["shapes"]]
    origins = [
        Origin(Phase(texts[phase]), texts[module], texts[operator], texts[line], again == 1)
        for phase, module, operator, line, again in plain["origins"]
    ]
    read: dict[str, tuple[list[Any], Callable[[Any], Any]]] = {
        "kind": (texts, Kind),
        "origin": (origins, _itself),
        "shape": (shapes, _itself),
        "dtype": (texts, _itself),
        "label": (texts, _itself),
        "confidence": (texts, Confidence),
    }
    columns: dict[str, list[Any]] = {name: _integers(plain[name]) for name in Allocation._fields}
    columns |= {name: _looked_up(columns[name], *found) for name, found in read.items()}
    if min(columns["nbytes"], default=0) < 0:
        raise ValueError("a size of it is negative")
    allocations = tuple(starmap(Allocation, zip(*columns.values(), strict=True)))
    events = tuple(_integers(plain["events"]))
    _check(events, len(allocations))
    phases = tuple((_as(int, position), Phase(phase)) for position, phase in plain["phases"])
    positions = [position for position, _ in phases]
    if positions != sorted(positions) or not set(positions) <= set(range(len(events) + 1)):
        raise ValueError("its phases are not in order")
    calls = tuple(_integers(plain.get("module_calls", [])))
    if sorted(calls) != list(calls) or not set(calls) <= set(range(len(events) + 1)):
        raise ValueError("its calls of a module are not in order")
    return Timeline(allocations, events, phases, calls)


def _check(events: Sequence[int], made: int) -> None:
    """Raise ``ValueError`` where something is freed that is not alive, or made twice."""
    if len(events) and not -made <= min(events) <= max(events) <= made:
        raise ValueError("its events have numbers that none of its allocations has")
    state = bytearray(made + 1)
    for event in events:
        if event > 0 and not state[event]:
            state[event] = 1
        elif event < 0 and state[-event] == 1:
            state[-event] = 2
        else:
            raise ValueError(f"its event {event} cannot be")


def _looked_up(
    numbers: list[int], values: list[_Value], make: Callable[[_Value], Any]
) -> list[Any]:
    """Return what is made of the values that the numbers are the places of."""
    used = {*numbers}
    if used and min(used) < 0:
        raise IndexError(f"it has no value {min(used)}")
    made = {number: make(values[number]) for number in used}
    return list(map(made.__getitem__, numbers))


def _itself(value: _Value) -> _Value:
    return value


def _integers(values: Any) -> list[int]:
    """Return a list of integers. Raises ``TypeError`` for anything else, of which most is a list of
    others, and which no column of millions is to be looked at for by a function of Python.
    """
    if not isinstance(values, list) or not {*map(type, values)} <= {int}:
        raise TypeError("a list of it has not only integers")
    return values


def _as(kind: type[_Value], value: Any) -> _Value:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is not what stands here")
    return value
