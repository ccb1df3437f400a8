"""What an allocation is to the step by how long it lives: saved for the backward, or temporary.

Everything is read from the order of events: what a forward makes and the backward frees was saved
for it; what outlives the backward is held by the program.
"""

from dataclasses import dataclass
from enum import Enum

from pytest_torchmem.profile.timeline import Allocation, Kind, Phase, Timeline


class Role(str, Enum):
    """What an allocation is to the step, in the words of reports."""

    __hash__ = str.__hash__

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    SAVED = "saved for backward"
    """Made in the forward and freed by the backward."""
    ACTIVATION = "activation"
    """Made in the forward and freed in it."""
    HELD = "held by the program"
    """Made in the forward and not freed by the backward."""
    EARLIER = "from an earlier step"
    """Made in the forward of a step, and still alive in a later one."""
    RECOMPUTED = "recomputed"
    """Made in the backward by a checkpoint."""
    GRADIENT = "gradient"
    """Made in the backward and not freed in it, as those of parameters."""
    GRADIENT_TEMPORARY = "temporary gradient"
    """Made in the backward and freed in it."""
    OPTIMIZER_STATE = "optimizer state"
    OPTIMIZER_TEMPORARY = "optimizer temporary"
    """Made in an optimizer's step and freed in it."""
    WORKSPACE = "workspace"
    LIBRARY = "library buffer"
    """A library's workspace that stays, such as that of cuBLAS."""
    OTHER = "other"


_BY_KIND = {
    Kind.PARAMETER: Role.PARAMETER,
    Kind.BUFFER: Role.BUFFER,
    Kind.INPUT: Role.INPUT,
    Kind.WORKSPACE: Role.WORKSPACE,
}


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """When the allocations of a timeline were made and freed, as places in its ``spans()``."""

    phases: tuple[Phase, ...]
    """The phase of each span."""
    steps: tuple[int, ...]
    """The step of each span."""
    made: tuple[int, ...]
    """By the allocation's index; -1 for what was never made."""
    freed: tuple[int, ...]
    """-1 for what is alive at the end."""

    @classmethod
    def of(cls, timeline: Timeline) -> "Lifetimes":
        """Return the lifetimes of a timeline's allocations."""
        count = len(timeline.allocations)
        made, freed = [-1] * count, [-1] * count
        phases: list[Phase] = []
        events = timeline.events
        for place, (start, stop, phase) in enumerate(timeline.spans()):
            phases.append(phase)
            for event in events[start:stop]:
                if event > 0:
                    made[event - 1] = place
                else:
                    freed[-event - 1] = place
        return cls(tuple(phases), tuple(timeline.steps()), tuple(made), tuple(freed))

    def role(self, index: int, allocation: Allocation, step: int | None = None) -> Role:
        """Return what the allocation of an ``index`` is to the step, seen from ``step``."""
        kind = allocation.kind
        if kind is Kind.WORKSPACE and allocation.label:
            return Role.LIBRARY
        known = _BY_KIND.get(kind)
        made, freed = self.made[index], self.freed[index]
        if known is not None or made < 0:
            return known or Role.OTHER
        then = self.phases[made]
        if kind is Kind.OPTIMIZER_STATE and then is not Phase.OPTIMIZER:  # it was loaded
            return Role.OPTIMIZER_STATE
        end = self.phases[freed] if freed >= 0 else None
        if then is Phase.BACKWARD and allocation.origin.recomputed:
            return Role.RECOMPUTED
        if then is Phase.FORWARD:
            if step is not None and self.steps[made] < step:
                return Role.EARLIER
            if end is Phase.FORWARD and self.steps[freed] == self.steps[made]:
                return Role.ACTIVATION
            return Role.SAVED if end is Phase.BACKWARD else Role.HELD
        if then is Phase.BACKWARD:
            return Role.GRADIENT_TEMPORARY if freed == made else Role.GRADIENT
        if then is Phase.OPTIMIZER:
            return Role.OPTIMIZER_TEMPORARY if freed == made else Role.OPTIMIZER_STATE
        return Role.OTHER

    def step_at(self, timeline: Timeline, position: int) -> int:
        """Return the step that the event before ``position`` belongs to."""
        for place, (start, stop, _) in enumerate(timeline.spans()):
            if start < position <= stop or (position == 0 and place == 0):
                return self.steps[place]
        return self.steps[-1] if self.steps else 0
