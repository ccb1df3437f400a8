"""What a run came to, as the reports show it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pytest_torchmem.checks.result import Record
from pytest_torchmem.checks.settings import Settings
from pytest_torchmem.snapshots.calibration_store import CalibrationPlan
from pytest_torchmem.snapshots.changes import FilePlan
from pytest_torchmem.snapshots.format import Key


@dataclass(frozen=True, slots=True)
class Check:
    """A record, and what became of its test."""

    record: Record
    passed: bool
    failed_by_check: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to; everything that reports show."""

    settings: Settings
    root: Path
    """pytest's root directory."""
    checks: tuple[Check, ...] = ()
    plans: tuple[FilePlan, ...] = ()
    obsolete: tuple[tuple[str, Key], ...] = ()
    """Entries whose test or name is gone, with their file, where they were not removed."""
    problems: tuple[str, ...] = ()
    proposal: tuple[str, ...] = ()
    """The files written for people to take over from CI."""
    orphans: frozenset[str] = frozenset()
    """The files whose test module is gone."""
    hints: tuple[str, ...] = ()
    """What looks renamed and could not be decided."""
    calibrations: tuple[CalibrationPlan, ...] = ()
    """Calibration files as an update made them, or in a dry run would make them."""

    @property
    def records(self) -> list[Record]:
        """The records of all checks."""
        return [check.record for check in self.checks]

    def file_of(self, plan: FilePlan | CalibrationPlan) -> str:
        """Return the file of a plan, relative to the root with ``/``."""
        return Path(os.path.relpath(plan.stored.path, self.root)).as_posix()
