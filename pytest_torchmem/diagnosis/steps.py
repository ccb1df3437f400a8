"""What is alive at the end of a step and was not before it: memory that grows from step to step.

A step ends where the forward of the next begins, so that gradients which are set to none in between
do not count. Where no module's forward tells steps apart, it ends with an optimizer's step, without
one with a backward, and without that where the same module is called again. The first step makes
what later ones need, such as an optimizer's state.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

from pytest_torchmem.diagnosis.difference import MomentDifference, difference_between
from pytest_torchmem.profile.timeline import Phase, Timeline
from pytest_torchmem.snapshots.alive import alive_at

FEWEST = 3
"""Steps without which nothing can be said: the first and the last have one end that counts."""
_MOMENT = "end"


@dataclass(frozen=True, slots=True)
class StepGrowth:
    """By how much memory grew in each step but the first and the last."""

    steps: int
    """How many steps there were."""
    counted: str = ""
    """What they were told apart by, such as "steps of an optimizer"."""
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


def step_growth(timeline: Timeline) -> StepGrowth:
    """Return by how much memory grows between the steps of a timeline."""
    steps, counted, ends = ends_of_steps(timeline)
    if steps < FEWEST:
        return StepGrowth(steps, counted)
    live = timeline.live()
    grown = _kept([live[end] for end in ends])
    worst = max(range(len(grown)), key=lambda index: grown[index])
    begin, end = ends[worst : worst + 2]
    before, now = (alive_at(timeline, {_MOMENT: at}, by_step=False) for at in (begin, end))
    live_at = timeline.live_indices((begin, end))
    earlier = {*live_at[begin]}
    return StepGrowth(
        steps,
        counted,
        grown,
        difference_between(before, now, _MOMENT),
        tuple(index for index in live_at[end] if index not in earlier),
        end,
    )


def _kept(live: list[int]) -> tuple[int, ...]:
    """Return by how much memory grew from each end of a step to the next, and never shrank again.

    Steps may take turns, as those of a generator and a discriminator do.
    """
    least = list(accumulate(reversed(live), min))[::-1]
    kept = tuple(now - before for before, now in pairwise(least))
    return kept[:-1] if len(kept) > 2 else kept


def ends_of_steps(timeline: Timeline) -> tuple[int, str, list[int]]:
    """Return how many steps there are, what tells them apart, and where they end.

    Where the forward of the next step tells, the last one has no end.
    """
    starts = starts_of_steps(timeline)
    found = [(len(starts), "forwards", starts[1:])]
    for phase, name in (
        (Phase.OPTIMIZER, "steps of an optimizer"),
        (Phase.BACKWARD, "backwards"),
    ):
        stops = [stop for _, stop, one in timeline.spans() if one is phase]
        # What is last goes on to the end of the program, where everything is freed.
        found.append((len(stops), name, [stop for stop in stops if stop < len(timeline.events)]))
    calls = list(timeline.module_calls)
    found.append((len(calls), "calls of a module", calls[1:]))
    enough = [one for one in found if one[0] >= FEWEST]
    return enough[0] if enough else max(found, key=lambda one: one[0])


def starts_of_steps(timeline: Timeline) -> list[int]:
    """Return where the forward of each step begins."""
    starts: dict[int, int] = {}
    for (start, _, phase), step in zip(timeline.spans(), timeline.steps(), strict=True):
        if phase is Phase.FORWARD:
            starts.setdefault(step, start)
    return list(starts.values())
