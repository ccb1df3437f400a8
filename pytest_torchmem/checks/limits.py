"""Whether figures keep to a budget, and what a GPU has left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_torchmem.checks.request import Budget, Limit
from pytest_torchmem.figures import ALLOCATOR_PEAKS, HOST, PEAK, RESERVED
from pytest_torchmem.snapshots.alive import Alive, alive_of
from pytest_torchmem.snapshots.tolerance import Level, for_path
from pytest_torchmem.targets.gpus import find_gpu
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.difference import Row
    from pytest_torchmem.profile.profile import MemoryProfile

_MOST_CALLS = 10_000
"""Of a step that is traced again with changes: a failure is to come within seconds."""
_MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Overrun:
    """A limit that was not kept; ``value`` is ``None`` where the phase did not run."""

    limit: Limit
    value: int | None


@dataclass(frozen=True, slots=True)
class Less:
    """A change of the step that lowers a peak, traced."""

    change: str
    saved: int
    flops: int
    """The operations that it costs, and ``of`` all those of the step."""
    of: int


@dataclass(frozen=True, slots=True)
class PeakContents:
    """The allocations at a peak over the limit, and changes that would lower it."""

    figure: str
    nbytes: int
    excess: int
    """The bytes that would have to go."""
    rows: Sequence[Row]
    less: Less | None = None


def contents(profile: MemoryProfile, figure: str, most: int) -> PeakContents | None:
    """Return what is alive at a figure's moment, ``None`` where unknown; ``most`` is the limit."""
    figures, alive = profile.figures(), alive_of(profile)
    same = (one for one in alive.moments if figures[one] == figures[PEAK])
    moment = figure if figure in alive.moments else next(same, None)
    if moment is None:
        return None
    from pytest_torchmem.diagnosis.difference import difference_between

    nothing = Alive((), {}, (moment,))
    rows = difference_between(nothing, alive, moment, 0).rows
    nbytes = figures.get(figure, figures[PEAK])
    return PeakContents(figure, nbytes, nbytes - most, rows, _less(profile, figure, nbytes - most))


def _less(profile: MemoryProfile, figure: str, excess: int) -> Less | None:
    """Return the modules to checkpoint: enough at the fewest operations, or else saving most."""
    calls = profile.calls or ()
    if profile.advised is None or len(calls) > _MOST_CALLS:
        return None
    before, of = profile.figures().get(figure, 0), sum(call.work.flops for call in calls)
    try:
        suggested = profile.advised(profile, None, _MOST_CHANGES)
    except Exception:  # the step as it is is what counts
        return None
    found = [
        Less(one.change, before - one.profile.figures().get(figure, before), one.flops, of)
        for one in suggested
    ]
    enough = [one for one in found if one.saved >= excess]
    best = min(enough, key=lambda one: one.flops, default=None)
    best = best or max(found, key=lambda one: one.saved, default=None)
    return best if best is not None and best.saved > 0 else None


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


def default_limits(
    rules: Level, path: str, device: str, figures: Mapping[str, int], own: Iterable[Limit]
) -> Iterator[Limit]:
    """Yield the limits of every test for figures that there are and that a test does not limit."""
    limited = {limit.figure for limit in own}
    for level in for_path(rules, path):
        for rule in sorted(level, key=lambda rule: rule.device is None):
            figure = rule.figure or PEAK
            if figure in figures and figure not in limited and rule.fits(device, figure):
                limited.add(figure)
                yield Limit(figure, rule.tolerance.allowance(0), str(rule))


def overruns(limits: tuple[Limit, ...], figures: Mapping[str, int]) -> list[Overrun]:
    """Return the limits that ``figures`` do not keep.

    A limit on a phase that did not run is not kept: nothing was checked. On the CPU, that of the
    peak is for all of the host's memory, whatever it is that allocates it.
    """
    found, on_cpu = [], RESERVED not in figures
    for limit in limits:
        if limit.figure == PEAK and on_cpu and HOST in figures:
            limit = replace(limit, figure=HOST)
        value = figures.get(limit.figure)
        if value is None and limit.figure == HOST:
            value = figures.get(PEAK) if on_cpu else 0
        if value is None and limit.figure in ALLOCATOR_PEAKS:
            value = figures.get(PEAK)
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
