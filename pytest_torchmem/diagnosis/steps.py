"""What is alive at the end of a step and was not before it: memory that grows from step to step.

A step ends where the forward of the next begins, so that gradients which are set to none in between
do not count. The first one makes what later ones need, such as an optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pytest_torchmem.diagnosis.difference import MomentDifference, difference_between
from pytest_torchmem.profile.timeline import Phase, Timeline
from pytest_torchmem.snapshots.alive import alive_at

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile

FEWEST = 3
"""Steps without which nothing can be said: the first and the last have one end that counts."""
_MOMENT = "end"


@dataclass(frozen=True, slots=True)
class StepGrowth:
    """By how much memory grew in each step but the first and the last."""

    steps: int
    """How many steps there were."""
    grown: tuple[int, ...] = ()
    """In bytes, step by step."""
    difference: MomentDifference | None = None
    """What is there after the step that grew most, and was not before it."""
    made: tuple[int, ...] = ()
    """Indices of what this step made and left alive."""
    end: int = 0
    """The events before its end."""

    @property
    def most(self) -> int:
        """The bytes by which memory grew in one step."""
        return max(self.grown, default=0)


def step_growth(profile: MemoryProfile) -> StepGrowth:
    """Return by how much memory grows between the steps of a profile."""
    timeline = profile.timeline
    starts = starts_of_steps(timeline)
    if len(starts) < FEWEST:
        return StepGrowth(len(starts))
    live = [0, *timeline.live_bytes()]
    ends = [live[start] for start in starts[1:]]
    grown = tuple(now - before for before, now in pairwise(ends))
    worst = max(range(len(grown)), key=lambda index: grown[index])
    before, now = (
        alive_at(profile, {_MOMENT: starts[1 + worst + index]}, by_step=False) for index in (0, 1)
    )
    begin, end = starts[1 + worst], starts[2 + worst]
    made = {event: None for event in timeline.events[begin:end] if event > 0}
    for event in timeline.events[begin:end]:
        made.pop(-event, None)
    return StepGrowth(
        len(starts),
        grown,
        difference_between(before, now, _MOMENT),
        tuple(event - 1 for event in made),
        end,
    )


def starts_of_steps(timeline: Timeline) -> list[int]:
    """Return where the forward of each step begins."""
    starts: dict[int, int] = {}
    for (start, _, phase), step in zip(timeline.spans(), timeline.steps(), strict=True):
        if phase is Phase.FORWARD:
            starts.setdefault(step, start)
    return list(starts.values())
