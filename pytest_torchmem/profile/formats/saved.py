"""A timeline as plain JSON types, and back: every text once, and one list for each column."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

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
        "texts": texts.values(),
    }


def read_timeline(plain: Any) -> Timeline:
    """Return the timeline that ``plain_timeline`` wrote.

    Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``IndexError`` for anything else.
    """
    texts = [_as(str, text) for text in plain["texts"]]
    shapes = [tuple(_as(int, size) for size in shape) for shape in plain["shapes"]]
    origins = [
        Origin(Phase(texts[phase]), texts[module], texts[operator], texts[line], again == 1)
        for phase, module, operator, line, again in plain["origins"]
    ]
    allocations = tuple(
        Allocation(
            _as(int, nbytes),
            Kind(texts[kind]),
            origins[origin],
            shapes[shape],
            texts[dtype],
            texts[label],
            Confidence(texts[confidence]),
        )
        for nbytes, kind, origin, shape, dtype, label, confidence in zip(
            *(plain[name] for name in _COLUMNS), strict=True
        )
    )
    events = tuple(_as(int, event) for event in plain["events"])
    _check(events, len(allocations))
    phases = tuple((_as(int, position), Phase(phase)) for position, phase in plain["phases"])
    positions = [position for position, _ in phases]
    if positions != sorted(positions) or not set(positions) <= set(range(len(events) + 1)):
        raise ValueError("its phases are not in order")
    return Timeline(allocations, events, phases)


_COLUMNS = ("nbytes", "kind", "origin", "shape", "dtype", "label", "confidence")


def _check(events: Iterable[int], made: int) -> None:
    """Raise ``ValueError`` where something is freed that is not alive, or made twice."""
    live: set[int] = set()
    seen: set[int] = set()
    for event in events:
        if event > 0 and event <= made and event not in seen:
            seen.add(event)
            live.add(event)
        elif event < 0 and -event in live:
            live.remove(-event)
        else:
            raise ValueError(f"its event {event} cannot be")


def _as(kind: type[_Value], value: Any) -> _Value:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r:.40} is not what stands here")
    return value
