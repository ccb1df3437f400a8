"""What differs between a base and a head, grouped for people: the rows of every comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_torchmem.reports.growth import leading_change
from pytest_torchmem.snapshots.compare import Change, Comparison, Verdict, compare, main_change
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.tolerance import Level, parse_rules

if TYPE_CHECKING:
    from pytest_torchmem.diagnosis.diagnose import Diagnosis, Told


class DifferenceKind(str, Enum):
    """The kinds of differences, in the order in which people want to see them."""

    FAILED = "Failed"
    GREW = "Grew beyond the tolerance"
    SHRANK = "Shrank beyond the tolerance"
    WITHIN = "Changed within the tolerance"
    NEW = "New"
    GONE = "Gone"
    SAME = "Unchanged"


@dataclass(frozen=True, slots=True)
class Difference:
    """One check on one device, in the base and in the head."""

    test: str
    """The test as people find it: file and test id."""
    name: str
    device: str
    group: DifferenceKind
    changes: tuple[Change, ...] = ()
    figures: Mapping[str, int] | None = None
    """The figures of a check that only one side has."""
    note: str = ""
    diagnosis: Diagnosis | None = None
    """What grew and why, where both sides say what was alive."""

    @property
    def title(self) -> str:
        """The test, and the name of the check if it has one."""
        return f"{self.test} · {self.name}" if self.name else self.test

    @property
    def main(self) -> Change | None:
        """The change that stands for all: one that broke its tolerance, or the largest."""
        broken = {
            DifferenceKind.GREW: (Verdict.GREW, Verdict.NOT_RUN),
            DifferenceKind.SHRANK: (Verdict.SHRANK,),
        }
        verdicts = broken.get(self.group)
        changes = [c for c in self.changes if verdicts is None or c.verdict in verdicts]
        if self.group is DifferenceKind.GREW:
            return leading_change(changes, self.diagnosis)
        return main_change(changes)

    @property
    def step(self) -> int:
        """The bytes by which it changed, by the change that stands for all."""
        main = self.main
        if main is None or main.before is None or main.now is None:
            return 0
        return main.now - main.before


Entries = Mapping[tuple[str, Key], Entry]
"""Entries by test file, relative to the root, and key."""


def differences(
    base: Entries,
    head: Entries,
    option: Level,
    told: Mapping[tuple[str, Key], Told] = MappingProxyType({}),
) -> list[Difference]:
    """Return what differs between the entries of two revisions or reports, worst first.

    An entry's own tolerance, as the head has it, wins over ``option``, as it does in a test run.
    ``told`` is what the head's run said.
    """
    from pytest_torchmem.diagnosis.diagnose import diagnose

    found = []
    for file, key in sorted({**base, **head}):
        before, now = base.get((file, key)), head.get((file, key))
        where = f"{file}::{key.test}" if file else key.test
        if before is None or now is None:
            entry = now or before
            assert entry is not None
            group = DifferenceKind.NEW if before is None else DifferenceKind.GONE
            found.append(_one(where, key, group, figures=entry.figures))
            continue
        own = parse_rules(now.tolerance, "the entry's own tolerance")
        comparison = compare(before, now, [own, option])
        notes = notes_on(comparison)
        if now.reason and now.reason != before.reason:
            notes.append(now.reason)
        group = group_of(comparison)
        moment = comparison.grown_moment if before.alive and now.alive else ""
        one = _one(where, key, group, comparison.changes, now.figures, "; ".join(notes))
        known = told.get((file, key))
        why = diagnose(before, now, moment, told=known) if moment else None
        found.append(replace(one, diagnosis=why))
    return in_order(found)


def notes_on(comparison: Comparison) -> list[str]:
    """Return what else is different: the workload, torch."""
    notes = ["different workload"] if comparison.workload_changed else []
    if comparison.torch_changed:
        notes.append(f"torch {comparison.torch_before} → {comparison.torch_now}")
    return notes


def group_of(comparison: Comparison) -> DifferenceKind:
    """Return the group of an entry by how its figures changed."""
    if comparison.grew:
        return DifferenceKind.GREW
    if comparison.shrank:
        return DifferenceKind.SHRANK
    return DifferenceKind.WITHIN if comparison.having(Verdict.WITHIN) else DifferenceKind.SAME


def in_order(found: Iterable[Difference]) -> list[Difference]:
    """Return differences by group, and in each the largest change first."""
    groups = list(DifferenceKind)
    return sorted(found, key=lambda d: (groups.index(d.group), -abs(d.step), d.test, d.device))


def failing(difference: Difference) -> bool:
    """Tell whether a gate must not let ``difference`` through."""
    return difference.group in (DifferenceKind.FAILED, DifferenceKind.GREW)


def grouped(found: Sequence[Difference]) -> dict[DifferenceKind, list[Difference]]:
    """Return differences by group, in order, without empty groups."""
    return {
        group: members
        for group in DifferenceKind
        if (members := [difference for difference in found if difference.group is group])
    }


def _one(
    test: str,
    key: Key,
    group: DifferenceKind,
    changes: tuple[Change, ...] = (),
    figures: Mapping[str, int] | None = None,
    note: str = "",
) -> Difference:
    device = f"{key.where}, torch {key.torch_series}" if key.torch_series else key.where
    return Difference(test, key.name, device, group, changes, figures, note)
