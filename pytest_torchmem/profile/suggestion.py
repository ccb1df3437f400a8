"""A change that would lower the memory of a step, and what a trace of the changed step gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Profile = TypeVar("Profile")


@dataclass(frozen=True, slots=True)
class Suggestion(Generic[Profile]):
    """One change of the step, and what a trace of the changed step gave."""

    change: str
    """What to do, in words."""
    saved: int
    """Bytes by which ``figure`` falls."""
    flops: int
    """Floating-point operations that the step then does more."""
    figure: str
    """``"peak"``, or ``"reserved_peak"`` for a change of the caching allocator."""
    profile: Profile
    """The profile of the changed step."""
