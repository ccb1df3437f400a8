"""Whether figures keep to a budget, and what a GPU has left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_torchmem.checks.request import Budget, Limit
from pytest_torchmem.figures import ALLOCATOR_PEAKS, RESERVED
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.units import format_size


@dataclass(frozen=True, slots=True)
class Overrun:
    """A limit that was not kept; ``value`` is ``None`` where the phase did not run."""

    limit: Limit
    value: int | None


def limits_of(budget: Budget, gpu: str) -> tuple[Limit, ...]:
    """Return the limits of ``budget`` on ``gpu``, or on the CPU, which has no caching allocator.

    A GPU that is named alone limits what is reserved on it.
    """
    if not gpu:
        return tuple(one for one in budget.limits if one.figure not in ALLOCATOR_PEAKS)
    if budget.limits or budget.gpu is None:
        return budget.limits
    room = _room(gpu)
    return (Limit(RESERVED, room, f"{format_size(room)} (what {gpu} has for tensors)"),)


def overruns(limits: tuple[Limit, ...], figures: Mapping[str, int]) -> list[Overrun]:
    """Return the limits that ``figures`` do not keep.

    A limit on a phase that did not run is not kept: nothing was checked.
    """
    found = []
    for limit in limits:
        value = figures.get(limit.figure)
        if value is None and limit.figure in ALLOCATOR_PEAKS:
            value = figures.get("peak")
        if value is None or value > limit.nbytes:
            found.append(Overrun(limit, value))
    return found


def headroom(gpu: str, figures: Mapping[str, int]) -> int:
    """Return the bytes that ``gpu`` has left when most is reserved."""
    return _room(gpu) - figures.get(RESERVED, figures.get("peak", 0))


def _room(gpu: str) -> int:
    """Return the bytes that ``gpu`` has for tensors."""
    found = find_gpu(gpu)
    return found.memory - found.context
