"""What was alive at the peaks of a profile, in groups of equal allocations: counts, never samples.

A group is what a person would say in one breath: «12 × bfloat16[4, 12, 512, 512], saved for
backward, aten::_safe_softmax in GPT.blocks.*.attn, model.py:23». Modules that differ only in their
numbers are one group. A snapshot keeps the groups that matter, and of the others the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_torchmem.figures import END, HOST, PEAKS, RETAINED
from pytest_torchmem.profile.module_paths import Numbers, fold, write_numbers
from pytest_torchmem.profile.timeline import Allocation, Lifetimes, Phase, Role, Timeline

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile

MOMENTS = (*PEAKS, RETAINED, END, HOST)
"""The figures of which the contents are known."""
MOST_GROUPS = 100
_SMALLEST_SHARE = 0.001
"""Of what is alive at a moment: a tenth of what the built-in tolerance lets pass."""
_ROLES = {role.value: place for place, role in enumerate(Role)}


class What(NamedTuple):
    """What the allocations of a group have in common."""

    role: str
    module: str
    """The pattern of the module's path."""
    source: str
    """The operator, or what a parameter, a buffer, an input or a library is called."""
    dtype: str
    shape: tuple[int, ...]
    line: str
    nbytes: int
    """Of one allocation."""

    @property
    def tensor(self) -> str:
        """Type and shape, "" for what is no tensor."""
        return f"{self.dtype}{list(self.shape)}" if self.dtype else ""


@dataclass(frozen=True, slots=True)
class Group:
    """Equal allocations, and how many of them are alive at each moment."""

    what: What
    counts: Mapping[str, int]
    """By moment, without those of which none is alive."""
    numbers: str = ""
    """Which modules of the pattern have some, as ``write_numbers`` writes it."""
    first: int = field(default=0, compare=False)
    """When the first of them was made, as a number that grows; snapshots do not keep it."""

    def nbytes(self, moment: str) -> int:
        return self.what.nbytes * self.counts.get(moment, 0)


@dataclass(frozen=True, slots=True)
class Alive:
    """The groups that were alive at each moment, and the bytes of what was left out."""

    groups: tuple[Group, ...] = ()
    rest: Mapping[str, int] = field(default_factory=dict)
    moments: tuple[str, ...] = ()

    def total(self, moment: str) -> int:
        return sum(group.nbytes(moment) for group in self.groups) + self.rest.get(moment, 0)

    def floor(self, moment: str) -> int:
        """Return up to how many bytes of one group may be among what was left out."""
        rest, total = self.rest.get(moment, 0), self._own(moment)
        smallest = int(_SMALLEST_SHARE * total)
        if len(self.groups) >= MOST_GROUPS:
            sizes = (group.nbytes(moment) for group in self.groups if moment in group.counts)
            smallest = max(smallest, min(sizes, default=rest))
        return min(rest, smallest)

    def with_moment(self, moment: str, same: str) -> Alive:
        """Return this with a further moment at which the same was alive as at another one."""
        groups = tuple(
            replace(group, counts={**group.counts, moment: group.counts[same]})
            if same in group.counts
            else group
            for group in self.groups
        )
        rest = {**self.rest, moment: self.rest[same]} if same in self.rest else self.rest
        return replace(self, groups=groups, rest=rest, moments=(*self.moments, moment))

    def _own(self, moment: str) -> int:
        """Return what was alive without the buffers of libraries, which may be most of it."""
        library = (one for one in self.groups if one.what.role == Role.LIBRARY)
        return self.total(moment) - sum(group.nbytes(moment) for group in library)

    def shortened(self) -> Alive:
        """Return the groups that a snapshot keeps, in the order in which it does."""
        totals = {moment: self._own(moment) or 1 for moment in self.moments}

        def share(group: Group) -> float:
            if group.what.role == Role.LIBRARY:
                return 1.0  # tolerances are taken without it
            return max(
                (group.nbytes(moment) / totals[moment] for moment in group.counts), default=0.0
            )

        weighed = sorted(self.groups, key=lambda group: (-share(group), *_order(group)))
        kept = [group for group in weighed[:MOST_GROUPS] if share(group) >= _SMALLEST_SHARE]
        left = weighed[len(kept) :]
        rest = {
            moment: nbytes
            for moment in self.moments
            if (nbytes := self.rest.get(moment, 0) + sum(group.nbytes(moment) for group in left))
        }
        return replace(self, groups=tuple(sorted(kept, key=_order)), rest=rest)


def alive_of(profile: MemoryProfile) -> Alive:
    """Return what was alive at the moments of a profile, everything in its group."""
    positions, host = positions_of(profile), profile.host_timeline
    found = alive_at(profile.timeline, positions) if positions else Alive()
    if profile.host_peak is None:
        return found
    there = alive_at(host, {HOST: host.peak()[1]})
    known = {(group.what, group.numbers): group for group in found.groups}
    for group in there.groups:
        same = known.get((group.what, group.numbers), group)
        known[group.what, group.numbers] = replace(same, counts={**same.counts, **group.counts})
    groups = tuple(sorted(known.values(), key=_order))
    return Alive(groups, {}, (*found.moments, HOST))


def alive_at(timeline: Timeline, positions: Mapping[str, int], *, by_step: bool = True) -> Alive:
    """Return what was alive after so many events, by the names of these moments.

    Unless ``by_step``, what an earlier step made is what it was to that step.
    """
    lifetimes = Lifetimes.of(timeline)
    live = timeline.live_indices(positions.values())
    counts: dict[What, dict[str, int]] = {}
    numbers: dict[What, set[Numbers]] = {}
    kinds: dict[tuple[int, int], What] = {}
    first: dict[What, int] = {}
    for moment, position in positions.items():
        step = lifetimes.step_at(timeline, position) if by_step else 0
        for index in live[position]:
            what = kinds.get((index, step))
            if what is None:
                allocation = timeline.allocations[index]
                what, own = what_of(allocation, lifetimes.role(index, allocation, step))
                kinds[index, step] = what
                first[what] = min(first.get(what, index), index)
                if own:
                    numbers.setdefault(what, set()).add(own)
            found = counts.setdefault(what, {})
            found[moment] = found.get(moment, 0) + 1
    groups = (
        Group(what, found, write_numbers(numbers.get(what, ())), first[what])
        for what, found in counts.items()
    )
    return Alive(tuple(sorted(groups, key=_order)), {}, tuple(positions))


def positions_of(profile: MemoryProfile) -> dict[str, int]:
    """Return how many events there were at each moment of a profile, in the order of ``MOMENTS``.

    The overall peak is left out where a phase's peak is the same moment.
    """
    timeline, figures = profile.timeline, profile.figures()
    if not timeline.phases:
        return {}
    peaks = timeline.peaks()
    found = {f"{phase.value}_peak": at for phase, (_, at) in peaks.items()}
    found = {name: at for name, at in found.items() if name in figures}
    highest, at = max(peaks.values(), key=lambda peak: peak[0])
    phases = [peaks[phase][0] for phase in peaks if f"{phase.value}_peak" in found]
    if highest > max(phases, default=-1):
        found["peak"] = at
    if RETAINED in figures:
        live = timeline.live()
        ends = [stop for _, stop, phase in timeline.spans() if phase is Phase.FORWARD]
        found[RETAINED] = max(ends, key=lambda stop: live[stop], default=0)
    found[END] = len(timeline.events)
    return {moment: found[moment] for moment in MOMENTS if moment in found}


def contents_of(profile: MemoryProfile) -> dict[str, list[Allocation]]:
    positions = {name: at for name, at in positions_of(profile).items() if name in PEAKS}
    return {name: profile.timeline.live_at(at) for name, at in positions.items()}


def what_of(allocation: Allocation, role: Role) -> tuple[What, Numbers]:
    """Return the group of an allocation, and the numbers of its module."""
    origin = allocation.origin
    pattern, numbers = fold(origin.module)
    source = origin.operator
    if role in (Role.LIBRARY, Role.INPUT):
        source = allocation.label or source
    elif role in (Role.PARAMETER, Role.BUFFER):
        source = allocation.label.rpartition(".")[2] or source
    if role is Role.LIBRARY:
        pattern, numbers = "", ()
    what = What(
        role.value,
        pattern,
        source,
        allocation.dtype,
        allocation.shape,
        "" if role is Role.LIBRARY else origin.line,
        allocation.nbytes,
    )
    return what, numbers


def _order(group: Group) -> tuple[object, ...]:
    what = group.what
    return (_ROLES.get(what.role, len(_ROLES)), *what, group.numbers)
