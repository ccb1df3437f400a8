"""What a snapshot keeps of a profile to explain its peaks, and what grew since.

Modules that differ only in their numbers (``layers.0.mlp``, ``layers.1.mlp``) are taken together as
``layers.*.mlp``: a deep model has as few lines as a shallow one, and another depth is one change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_torchmem.figures import PEAKS
from pytest_torchmem.snapshots.compare import Comparison, Verdict
from pytest_torchmem.snapshots.format import Explanation

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.profile.timeline import Allocation

LARGEST = 6
REST = "(rest)"
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


@dataclass(frozen=True, slots=True)
class Growth:
    """A group of allocations that is larger than it was, and the line that makes most of it."""

    peak: str
    what: str
    name: str
    before: int
    now: int
    detail: str
    """The other side of it: for a module its largest operator, for an operator its module."""
    line: str


def peak_contents(profile: MemoryProfile) -> dict[str, list[Allocation]]:
    """Return what was alive at each phase's peak, and at the overall one where no phase has it."""
    timeline = profile.timeline
    peaks = timeline.peaks() if timeline.phases else {}
    wanted = {
        f"{phase.value}_peak": at
        for phase, (_, at) in peaks.items()
        if profile.figures().get(f"{phase.value}_peak") is not None
    }
    highest = max(peaks.values(), default=(0, 0), key=lambda found: found[0])
    if peaks and highest[1] not in wanted.values():
        phases = [peaks[phase] for phase in peaks if f"{phase.value}_peak" in wanted]
        if highest[0] > max((nbytes for nbytes, _ in phases), default=-1):
            wanted["peak"] = highest[1]
    return {name: timeline.live_at(at) for name, at in wanted.items()}


def explain(contents: Mapping[str, Sequence[Allocation]]) -> dict[str, Explanation]:
    """Return for each peak the bytes of the largest modules and operators, and of the rest."""
    return {
        peak: Explanation(
            modules=_largest(_totals(allocations, modules_of(allocations))),
            operators=_largest(_totals(allocations, map(operator_of, allocations))),
        )
        for peak, allocations in contents.items()
    }


def grown_peak(comparison: Comparison) -> str:
    """Return the peak whose growth is worth explaining: the largest, of a phase if it is one.

    The overall peak is one of the phases' peaks, so it is left out where that phase is there.
    """
    grown = sorted(
        comparison.having(Verdict.GREW), key=lambda change: (change.before or 0) - (change.now or 0)
    )
    phases = {change.now for change in grown if change.figure != "peak"}
    peaks = [change for change in grown if change.figure in PEAKS]
    own = (c.figure for c in peaks if c.figure != "peak" or c.now not in phases)
    return next(own, "")


def what_grew(
    peak: str, before: Explanation | None, now: Sequence[Allocation], most: int = 3
) -> list[Growth]:
    """Return the modules and operators that grew most at a ``peak``, or are largest now.

    Where the snapshot has no explanation of this peak everything counts as new. A group that the
    snapshot has under its rest cannot be told from a new one; it counts with the bytes it has
    beyond the smallest group that the snapshot names.
    """
    modules, operators = modules_of(now), [operator_of(allocation) for allocation in now]
    found: list[Growth] = []
    for what, groups, others in (
        ("module", modules, operators),
        ("operator", operators, modules),
    ):
        table = getattr(before, f"{what}s") if before is not None else {}
        floor = min((size for name, size in table.items() if name != REST), default=0)
        floor = min(floor, table.get(REST, 0))
        grown = [
            (nbytes - table.get(name, min(floor, nbytes)), name, nbytes)
            for name, nbytes in _totals(now, groups).items()
        ]
        for step, name, nbytes in sorted(grown, key=lambda item: (-item[0], item[1]))[:most]:
            if step > 0:
                inside = [index for index, group in enumerate(groups) if group == name]
                group = [now[index] for index in inside]
                detail = _first(_totals(group, [others[index] for index in inside]))
                placed = [a for a in group if a.origin.line]
                line = _first(_totals(placed, [a.origin.line for a in placed]))
                found.append(Growth(peak, what, name, nbytes - step, nbytes, detail, line))
    return found


def modules_of(allocations: Sequence[Allocation]) -> list[str]:
    """Return the module that each allocation is counted under, its numbers taken together."""
    return [
        _NUMBER.sub("*", allocation.origin.module) or f"({allocation.kind.value})"
        for allocation in allocations
    ]


def operator_of(allocation: Allocation) -> str:
    """Return the operator that made an allocation, or its kind: parameters have none."""
    return allocation.origin.operator or f"({allocation.kind.value})"


def _first(totals: Mapping[str, int]) -> str:
    return min(totals, key=lambda name: (-totals[name], name), default="")


def _totals(allocations: Iterable[Allocation], groups: Iterable[str]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for allocation, group in zip(allocations, groups, strict=True):
        totals[group] = totals.get(group, 0) + allocation.nbytes
    return totals


def _largest(totals: Mapping[str, int]) -> dict[str, int]:
    """Return the largest groups, and the rest as one; equal ones are ordered by name."""
    names = sorted(totals, key=lambda name: (-totals[name], name))
    kept = {name: totals[name] for name in names[:LARGEST] if totals[name]}
    rest = sum(totals[name] for name in names[LARGEST:])
    return {**kept, REST: rest} if rest else kept
