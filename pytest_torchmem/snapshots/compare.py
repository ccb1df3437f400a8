"""What a snapshot would hold of a profile, and a profile's figures against those of an entry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_torchmem.figures import (
    ALLOCATED,
    ALLOCATOR_PEAKS,
    FIGURES,
    HOST,
    JUDGED,
    PEAK,
    PEAKS,
    PHASE_PEAKS,
    RESERVED,
    phase_of,
)
from pytest_torchmem.profile.facts import Facts, Topic, outline_of, with_largest
from pytest_torchmem.profile.timeline import Later, Role
from pytest_torchmem.snapshots.alive import MOMENTS, Alive, alive_of
from pytest_torchmem.snapshots.format import Entry, Key, Measured
from pytest_torchmem.snapshots.tolerance import BUILT_IN, Level, Tolerance, ToleranceRule, find_rule

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


def entry_of(
    key: Key,
    profile: "MemoryProfile",
    alive: Callable[[], Alive] | None = None,
    measured: Mapping[str, Measured] | None = None,
    code: Callable[[], Mapping[str, str]] = dict,
) -> Entry:
    """Return the entry of a profile; ``alive`` tells what was alive, if that may be known, and
    ``code`` the lines of the program.
    """

    def shortened() -> Alive | None:
        found = alive_of(profile) if alive is None else alive()
        return found.shortened() if found.moments else None

    def known() -> Facts:
        found = with_largest(profile.facts, profile.timeline, profile.calls or ())
        lines = code() if found else {}
        return {**found, Topic.CODE: lines} if lines else found

    later: Any = Later
    return Entry(
        key,
        torch=profile.torch_version.partition("+")[0],
        workload=profile.workload,
        figures=profile.figures(),
        alive=later(shortened),
        facts=later(known),
        timeline=later(partial(outline_of, profile.timeline)),
        measured=measured or {},
    )


class Verdict(str, Enum):
    """How a figure stands to its snapshot."""

    SAME = "same"
    WITHIN = "within tolerance"
    GREW = "grew"
    SHRANK = "shrank"
    NOT_RUN = "did not run"
    """The snapshot has this phase and the present run does not: nothing was compared."""
    NEW = "new"
    SHOWN = "shown"
    """A figure that is not judged."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, then and now; ``rule`` is the tolerance that it was judged by."""

    figure: str
    before: int | None
    now: int | None
    verdict: Verdict
    allowed: int = 0
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every figure of one entry, then and now."""

    changes: tuple[Change, ...]
    workload_changed: bool
    torch_before: str
    torch_now: str

    def having(self, *verdicts: Verdict) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict in verdicts)

    @property
    def grew(self) -> bool:
        """Whether a figure grew beyond its tolerance, or a phase of the snapshot did not run."""
        return bool(self.having(Verdict.GREW, Verdict.NOT_RUN))

    @property
    def shrank(self) -> bool:
        """Whether a figure shrank beyond its tolerance and none grew."""
        return not self.grew and bool(self.having(Verdict.SHRANK))

    @property
    def grown_moment(self) -> str:
        """The moment whose growth is worth explaining: the largest peak, of a phase if it is one,
        another moment where no peak grew, what is reserved where no tensors did; "" for nothing.

        The overall peak is one of the phases' peaks, so it is left out where that phase is there.
        """
        grown = sorted(self.having(Verdict.GREW), key=lambda c: (c.before or 0) - (c.now or 0))
        phases = {change.now for change in grown if change.figure != PEAK}
        moments = [change for change in grown if change.figure in (*MOMENTS, RESERVED)]
        own = [c.figure for c in moments if c.figure != PEAK or c.now not in phases]
        return min(own, key=lambda name: (name == RESERVED, name not in PEAKS), default="")

    @property
    def unjudged(self) -> tuple[Change, ...]:
        """The figures that are to be judged and that the snapshot does not have.

        The allocated peak may be missing: older ones were written without it.
        """
        judged = {*JUDGED} - {ALLOCATED}
        return tuple(change for change in self.having(Verdict.NEW) if change.figure in judged)

    @property
    def told(self) -> tuple[Change, ...]:
        """The changes that a person has to see.

        The allocated peak is the requested one with every size rounded up, and is left out unless
        it alone is beyond its tolerance.
        """
        peak = next((change.verdict for change in self.changes if change.figure == PEAK), None)
        alone = {Verdict.GREW, Verdict.SHRANK} - {peak}
        return tuple(c for c in self.changes if c.figure != ALLOCATED or c.verdict in alone)


def compare(before: Entry, now: Entry, levels: Sequence[Level]) -> Comparison:
    """Return how ``now`` stands to ``before`` under the tolerances ``levels``, closest first."""
    device = now.key.device
    changes = []
    for name in FIGURES:
        if name in before.figures or name in now.figures:
            rule = find_rule(levels, device, name)
            if name == "peak" and rule.figure is None:
                # The overall peak is that of a phase, whose own rule is then meant for it as well.
                rule = find_rule(levels, device, _highest_phase(now.figures))
            values = before.figures.get(name), now.figures.get(name)
            if name == HOST:  # which is left out where it is nothing
                values = values[0] or 0, values[1] or 0
            if name in ALLOCATOR_PEAKS and rule.figure is None:
                # What is allowed of the sizes themselves may be less than a block or a segment.
                rules = rule, find_rule([BUILT_IN], device, name)
                rule = max(rules, key=lambda one: one.tolerance.allowance(values[0] or 0))
            changes.append(_judge(name, *values, rule, _of_libraries(before, name)))
    return Comparison(
        changes=tuple(changes),
        workload_changed=before.workload != now.workload
        and "" not in (before.workload, now.workload),
        torch_before=before.torch,
        torch_now=now.torch,
    )


def beyond(comparison: Comparison, most: Tolerance) -> tuple[Change, ...]:
    return tuple(
        change
        for change in comparison.told
        if change.verdict in (Verdict.GREW, Verdict.WITHIN)
        and change.before is not None
        and change.now is not None
        and change.now - change.before > most.allowance(change.before)
    )


def main_change(changes: Sequence[Change]) -> Change | None:
    """Return the change that stands for all: the largest of a judged figure, else the peak's.

    Those of the allocator follow the others by whole blocks and segments, so they stand for them
    only alone.
    """
    changed = [change for change in changes if change.figure in JUDGED and _size(change) > 0]
    requested = [change for change in changed if change.figure not in ALLOCATOR_PEAKS]
    peaks = [change for change in changes if change.figure == PEAK]
    return max(requested or changed or peaks or changes[:1], key=_size, default=None)


def _size(change: Change) -> int:
    if change.before is None or change.now is None:
        return -1
    return abs(change.now - change.before)


def _highest_phase(figures: Mapping[str, int]) -> str:
    return max(PHASE_PEAKS, key=lambda name: figures.get(name, -1))


def _of_libraries(entry: Entry, figure: str) -> int:
    """Return the bytes of libraries' buffers in a figure: cuBLAS's are 8 MiB for each thread.

    What a relative tolerance is taken of is the model's own memory.
    """
    alive = entry.alive
    if alive is None or figure in ALLOCATOR_PEAKS:
        return 0
    if figure == "peak" and figure not in alive.moments:
        figure = _highest_phase(entry.figures)
    groups = (group for group in alive.groups if group.what.role == Role.LIBRARY)
    return sum(group.nbytes(figure) for group in groups)


def _judge(
    name: str, before: int | None, now: int | None, rule: ToleranceRule, apart: int
) -> Change:
    if now is None:
        return Change(name, before, now, Verdict.NOT_RUN if phase_of(name) else Verdict.SHOWN)
    if before is None:
        return Change(name, before, now, Verdict.NEW)
    if name not in JUDGED:
        return Change(name, before, now, Verdict.SHOWN)
    allowed = rule.tolerance.allowance(max(before - apart, 0))
    step, of = abs(now - before), ""
    if now == before:
        verdict = Verdict.SAME
    elif step <= allowed:
        verdict = Verdict.WITHIN
    else:
        verdict = Verdict.GREW if now > before else Verdict.SHRANK
        of = " without libraries' buffers" if step <= rule.tolerance.allowance(before) else ""
    told = ", ".join(filter(None, (f"{rule.tolerance}{of}", rule.source)))
    return Change(name, before, now, verdict, allowed, told)
