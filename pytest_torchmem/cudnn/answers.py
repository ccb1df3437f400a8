"""What cuDNN answers: the plan that would run, or every candidate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A plan of cuDNN: what it takes, in bytes, and which engine it is of."""

    workspace: int
    engine: int
    notes: tuple[str, ...] = ()
    """cuDNN's numerical notes, such as ``"tensor core"``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Plans in cuDNN's order, the one that runs first; all of them only of a benchmark.

    Without plans cuDNN has no engine for the question, or did not survive it; ``why`` says so.
    """

    plans: tuple[ExecutionPlan, ...] = ()
    why: str = ""
    is_failure: bool = False
    """Whether cuDNN could not be asked, or did not survive it, so that nothing is known."""

    @property
    def workspace(self) -> int | None:
        """The bytes that the allocator is asked for: of a benchmark, those of the largest."""
        return max((plan.workspace for plan in self.plans), default=None)
