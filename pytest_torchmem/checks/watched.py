"""A failed check's step, traced once more for what its profile does not hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_torchmem.checks.request import Target
from pytest_torchmem.diagnosis.causes import Watched
from pytest_torchmem.diagnosis.diagnose import Diagnosis
from pytest_torchmem.figures import END
from pytest_torchmem.profile.lifetimes import Lifetimes, Role, live_indices
from pytest_torchmem.snapshots.alive import What, positions_of, what_of
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.steps import StepGrowth
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.profile.timeline import Timeline
    from pytest_torchmem.tracing.watch import Watch

_ATTENTION = "attention"
_KEPT = (
    "held",
    "held between",
    "earlier steps",
    "gradients kept",
    "left",
    "lives longer",
    "graph kept",
    "backwards",
)
_MADE = (Role.HELD, Role.EARLIER, Role.OTHER, Role.SAVED, Role.ACTIVATION)
_OF_MODELS = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT)
_ROLES = tuple(role.value for role in _MADE)
_ROLES_AT_END = tuple(role.value for role in (*_OF_MODELS, *_MADE))
_HELD = Role.HELD.value
_MOST = 50


def watched(
    target: Target, key: Key, world: World | None, profile: MemoryProfile, found: Diagnosis
) -> Watched | None:
    """Trace ``target`` again, if that tells more of what was found; what goes wrong in that is no
    finding of the check.
    """
    rules = {cause.rule for cause in found.causes}
    row = found.leading_row
    kept = bool(rules.intersection(_KEPT)) or (row is not None and row.what.role == _HELD)
    if not kept and _ATTENTION not in rules:
        return None
    whats, at = _kept_at(profile, found) if kept else ({}, 0)
    watch = _watch(target, key, world, profile.timeline, whats, at, _ATTENTION in rules)
    if watch is None:
        return None
    holders: dict[What, str] = {}
    for index in sorted(watch.holders):
        holders.setdefault(whats[index], watch.holders[index])
    reasons = {line: reason for line, reason in watch.attention.items() if reason}
    savers = {whats[index]: saver for index, saver in watch.savers.items()}
    return Watched(reasons, holders, savers, kept)


def holder_of_step(
    target: Target, key: Key, world: World | None, profile: MemoryProfile, found: StepGrowth
) -> str:
    """Trace ``target`` again and return what refers to the largest tensor that a step left alive,
    such as ``the list trainer.losses``; empty where that cannot be told.
    """
    timeline = profile.timeline
    largest = sorted(found.made, key=lambda index: -timeline.allocations[index].nbytes)[:_MOST]
    watch = _watch(target, key, world, timeline, largest, found.end) if largest else None
    holders = watch.holders if watch is not None else {}
    return next((holders[index] for index in largest if index in holders), "")


def _watch(
    target: Target,
    key: Key,
    world: World | None,
    timeline: Timeline,
    indices: Iterable[int],
    at: int,
    attention: bool = False,
) -> Watch | None:
    """Trace ``target`` again, and see what refers to allocations after the first ``at`` events.

    Looked at is before what is made next, at the end where nothing is.
    """
    from pytest_torchmem.tracing.watch import watching

    wanted = {index: timeline.allocations[index].nbytes for index in indices}
    before = next((event - 1 for event in timeline.events[at:] if event > 0), -1)
    try:
        with watching(key.device, wanted, before, attention=attention) as watch:
            target.trace(key.device, key.gpu or None, world, memory="unlimited")
    except Exception:  # the first trace is the one that counts
        return None
    return watch


def _kept_at(profile: MemoryProfile, found: Diagnosis) -> tuple[dict[int, What], int]:
    """Return the allocations that came and that something refers to, and the events before what
    was made last at the moment, which is what made it the largest.
    """
    timeline, moment = profile.timeline, found.difference.moment
    gradients = any(cause.rule == "gradients kept" for cause in found.causes)
    roles = _ROLES_AT_END if moment == END or gradients else _ROLES
    came = {row.now for row in found.difference.came if row.now and row.now.role in roles}
    at = positions_of(profile).get(moment)
    if at is None or not came:
        return {}, 0
    lifetimes = Lifetimes.of(timeline)
    step = lifetimes.step_at(timeline, at)
    whats: dict[int, What] = {}
    for index in live_indices(timeline, [at])[at]:
        allocation = timeline.allocations[index]
        what = what_of(allocation, lifetimes.role(index, allocation, step))[0]
        if what in came and len(whats) < _MOST:
            whats[index] = what
    return whats, max(at - 1, 0)
