"""What a benchmark compares: one step, and the named units that make such steps."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Sample:
    """One step, by its position among its unit's samples."""

    index: int
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """What ``trace`` and ``measure`` take by name: ``loss_fn``, ``optimizer``, ``backward``."""
    detail: str = ""


class Unit(Protocol):
    """A name for several samples that are made together; it is sent to the worker process."""

    @property
    def case(self) -> str:
        """Return the unit's name within a run."""


@dataclass(frozen=True, slots=True)
class Named:
    """A unit that its name says all of."""

    case: str


def named(names: Iterable[str], pattern: str) -> list[Named]:
    """Return the units whose name has a match of the regular expression ``pattern``."""
    search = re.compile(pattern).search
    return [Named(name) for name in names if search(name)]


Source = Callable[[Any, int], Iterator[Sample]]
"""Makes the samples of a unit, or as many of them as the second argument says (0 for all)."""


class NothingToDifferentiate(Exception):
    """A loss function's answer where the output holds nothing that a backward could begin at."""
