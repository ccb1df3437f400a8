"""A step as it is, and traces of it with changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from pytest_torchmem.advice.changes import Change
from pytest_torchmem.advice.graph_changes import observing_graphs
from pytest_torchmem.advice.observed import Observed, observing
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.profile.suggestion import Suggestion

Found: TypeAlias = Suggestion[MemoryProfile]
Trace: TypeAlias = Callable[..., MemoryProfile]
"""``trace``, whose step is given already: called with the options that are others."""


class Trials:
    """Traces of a step with changes, against the profile of the step as it is."""

    def __init__(self, before: MemoryProfile, again: Trace) -> None:
        self._again = again
        self.observed = Observed()
        self.follows_python = before.level == "eager"
        """Whether the program's functions and modules are called; compiled ones are not."""
        with (observing if self.follows_python else observing_graphs)(self.observed):
            self.before = again()
        self._flops = operations(self.before)

    def of(self, change: Change) -> Found | None:
        """Trace the step with a change; ``None`` where the step does not bear it."""
        profile = None
        with suppress(RuntimeError, TypeError, ValueError, AssertionError), change.made():
            profile = self._again(**change.options)
        if profile is None:
            return None
        figure = change.figure
        saved = getattr(self.before, figure) - getattr(profile, figure)
        flops = operations(profile) - self._flops
        return Suggestion(change.text, saved, flops, figure, profile)


def operations(profile: MemoryProfile) -> int:
    """Return the floating-point operations of a step."""
    return sum(call.work.flops for call in profile.calls or ())
