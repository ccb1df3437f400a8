"""A failed check's step, traced once more for what its profile does not hold."""

from __future__ import annotations

from pytest_torchmem.checks.request import Target
from pytest_torchmem.diagnosis.causes import Watched
from pytest_torchmem.profile.lifetimes import Lifetimes
from pytest_torchmem.snapshots.alive import What, what_of
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.targets.world import World

RULES = ("attention", "held", "earlier steps")
"""The causes that say more when the step is watched."""


def watched(target: Target, key: Key, world: World | None) -> Watched:
    """Trace ``target`` again; what went wrong in that is no finding of the check."""
    from pytest_torchmem.tracing.watch import watching

    try:
        with watching(key.device) as watch:
            profile = target.trace(key.device, None, world)
    except Exception:  # the first trace is the one that counts
        return Watched()
    timeline = profile.timeline
    lifetimes = Lifetimes.of(timeline)
    step = lifetimes.step_at(timeline, len(timeline.events))
    holders: dict[What, str] = {}
    for index, holder in watch.holders.items():
        if index < len(timeline.allocations):
            allocation = timeline.allocations[index]
            what = what_of(allocation, lifetimes.role(index, allocation, step))[0]
            holders.setdefault(what, holder)
    reasons = {line: reason for line, reason in watch.attention.items() if reason}
    return Watched(reasons, holders)
