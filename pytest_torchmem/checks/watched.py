"""A failed check's step, traced once more for what its profile does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_torchmem.checks.request import Target
from pytest_torchmem.diagnosis.causes import Watched
from pytest_torchmem.diagnosis.diagnose import Diagnosis
from pytest_torchmem.profile.lifetimes import Lifetimes, Role, live_indices
from pytest_torchmem.snapshots.alive import What, positions_of, what_of
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile

_ATTENTION = "attention"
_KEPT = ("held", "held between", "earlier steps", "lives longer", "graph kept", "backwards")
_ROLES = tuple(
    role.value for role in (Role.HELD, Role.EARLIER, Role.OTHER, Role.SAVED, Role.ACTIVATION)
)
_MOST = 50


def watched(
    target: Target, key: Key, world: World | None, profile: MemoryProfile, found: Diagnosis
) -> Watched | None:
    """Trace ``target`` again, if that tells more of what was found; what goes wrong in that is no
    finding of the check.
    """
    rules = {cause.rule for cause in found.causes}
    kept = rules.intersection(_KEPT)
    if not kept and _ATTENTION not in rules:
        return None
    from pytest_torchmem.tracing.watch import watching

    whats, before = _kept_at(profile, found) if kept else ({}, -1)
    wanted = {index: profile.timeline.allocations[index].nbytes for index in whats}
    try:
        with watching(key.device, wanted, before, attention=_ATTENTION in rules) as watch:
            target.trace(key.device, None, world)
    except Exception:  # the first trace is the one that counts
        return None
    holders: dict[What, str] = {}
    for index in sorted(watch.holders):
        holders.setdefault(whats[index], watch.holders[index])
    reasons = {line: reason for line, reason in watch.attention.items() if reason}
    return Watched(reasons, holders)


def _kept_at(profile: MemoryProfile, found: Diagnosis) -> tuple[dict[int, What], int]:
    """Return the allocations that came and that something refers to, and which was made last.

    Where nothing was made at the moment the latter is what was made next, -1 where nothing was.
    """
    timeline, moment = profile.timeline, found.difference.moment
    came = {row.now for row in found.difference.came if row.now and row.now.role in _ROLES}
    at = positions_of(profile).get(moment)
    if at is None or not came:
        return {}, -1
    lifetimes = Lifetimes.of(timeline)
    step = lifetimes.step_at(timeline, at)
    whats: dict[int, What] = {}
    for index in live_indices(timeline, [at])[at]:
        allocation = timeline.allocations[index]
        what = what_of(allocation, lifetimes.role(index, allocation, step))[0]
        if what in came and len(whats) < _MOST:
            whats[index] = what
    events = timeline.events[max(at - 1, 0) :]
    return whats, next((event - 1 for event in events if event > 0), -1)
