"""A profile against its snapshot and its budget, and what an update may accept."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_torchmem.checks import gpu as measuring
from pytest_torchmem.checks.calibrations import Calibrations
from pytest_torchmem.checks.request import Budget, limits_of, overruns
from pytest_torchmem.checks.result import Outcome, RealRun, Record
from pytest_torchmem.checks.settings import Settings
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.plugin.collection import Collection, test_id
from pytest_torchmem.reports import text as messages
from pytest_torchmem.snapshots.changes import moves, renames
from pytest_torchmem.snapshots.compare import Comparison, beyond, compare, with_entry
from pytest_torchmem.snapshots.explain import explain, peak_contents, what_grew
from pytest_torchmem.snapshots.format import Entry
from pytest_torchmem.snapshots.location import orphans_in, snapshot_path
from pytest_torchmem.snapshots.store import Stored, read
from pytest_torchmem.snapshots.tolerance import Level

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


@dataclass(frozen=True, slots=True)
class Context:
    """What all the checks of one process share."""

    settings: Settings
    collection: Collection
    files: dict[Path, Stored]
    calibrations: Calibrations

    def stored(self, path: Path) -> Stored:
        """Return a snapshot file as it was when this process first asked for it."""
        if path not in self.files:
            self.files[path] = read(path)
        return self.files[path]


class Judge:
    """Judges the checks of one test."""

    def __init__(self, item: pytest.Item, context: Context, budget: Budget) -> None:
        self._item = item
        self._context = context
        self._settings = context.settings
        self._budget = budget

    def stored(self) -> Stored:
        """Return the test module's snapshot file, before anything is traced in vain."""
        test = test_id(self._item)
        if test in self._context.collection.ambiguous(self._item):
            raise UsageError(
                f"two tests of this module have the id {test}, and a snapshot could not tell "
                "them apart. Give their parameters ids: pytest.param(..., id=...)"
            )
        stored = self._context.stored(snapshot_path(self._item.path))
        if stored.conflicted and not self.accepts("changed"):
            raise UsageError(stored.conflict_message)
        if _ADDRESS.search(test):
            self._item.warn(
                pytest.PytestWarning(
                    f"torchmem: the id {test} holds an object's address, which differs from "
                    "run to run, so its snapshot will not be found again. Give the parameter an "
                    "id: pytest.param(..., id=...)"
                )
            )
        return stored

    def against_snapshot(
        self,
        record: Record,
        profile: MemoryProfile,
        stored: Stored,
        tolerances: Sequence[Level],
        real: RealRun | None,
    ) -> Record:
        """Return ``record`` as the snapshot has it judged; ``real`` is its run on a real GPU."""
        if profile.host not in (None, "reference"):
            raise UsageError(
                f"host={profile.host!r} gives this machine's own figures, and a snapshot has to "
                "pass on others. Leave host= out, or set a limit with the marker memory_budget"
            )
        key = record.key
        if self._settings.split_by_torch:
            key = replace(key, torch_series=series(record.torch))
        contents = peak_contents(profile)
        now = Entry(
            key,
            record.torch,
            profile.workload,
            profile.figures(),
            explain(contents),
            measured=real.entry if real is not None else {},
        )
        record = replace(record, key=key, file=relative(self._item, stored.path), entry=now)
        before = stored.entry(key)
        if before is None and key in stored.contested:
            return replace(record, outcome=Outcome.UPDATED, accepted=True)
        if before is None:
            return self._missing(record, stored)
        comparison = self._compared(before, now, with_entry(tolerances, before, 2))
        record = record.with_comparison(comparison)
        if self._accepts_measurement(before, now):
            most = self._settings.update_max
            above = beyond(comparison, most) if most is not None else ()
            if most is not None and real is not None and not above:
                above = measuring.above_cap(record, before, real, most)
            if not above:
                return replace(record, outcome=Outcome.UPDATED, accepted=True)
            text = messages.above_cap(record, above, str(most))
            return replace(record, outcome=Outcome.GREW, failed=True, message=text)
        if comparison.grew:
            grew = tuple(
                {"peak": change.figure, **asdict(growth)}
                for change in messages.explained(comparison)
                for growth in what_grew(
                    before.explained.get(change.figure), contents.get(change.figure, ())
                )
            )
            record = replace(record, outcome=Outcome.GREW, failed=True, grew=grew)
            text = messages.grew(record, comparison)
            return replace(
                record, message=text, advice=f"If this is intended: {update_command(self._item)}"
            )
        if comparison.shrank:
            strict = self._settings.strict
            text, advice = (
                messages.shrank(record, comparison),
                f"To lock it in: {update_command(self._item)}",
            )
            record = replace(record, outcome=Outcome.SHRANK, failed=strict, message=text)
            return replace(record, advice=advice)
        return record

    def _missing(self, record: Record, stored: Stored) -> Record:
        if self.accepts("new"):
            return replace(record, outcome=Outcome.NEW, accepted=True)
        assert record.entry is not None
        gone = self._context.collection.gone(self._item, stored.snapshot.entries)
        found = renames([stored.snapshot.entries[key] for key in gone], [record.entry])
        text = messages.missing(record, found[0][0] if found else None, self._moved_from(record))
        record = replace(record, outcome=Outcome.MISSING, failed=True, message=text)
        return replace(record, advice=f"To create it: {update_command(self._item)}")

    def _moved_from(self, record: Record) -> str:
        """Return the snapshot file of a module that is gone and had this very check, or ""."""
        assert record.entry is not None
        orphans = []
        for path in orphans_in(self._item.path.parent):
            try:
                entries = self._context.stored(path).snapshot.entries.values()
            except SnapshotError:
                continue
            orphans += [(relative(self._item, path), entry) for entry in entries]
        found = moves(orphans, [("", record.entry)], certain=False)
        return next(iter(found))[0] if found else ""

    def _compared(self, before: Entry, now: Entry, levels: Sequence[Level]) -> Comparison:
        comparison = compare(before, now, levels)
        changed = self._item.ihook.pytest_torchmem_compare(
            item=self._item, before=before, now=now, comparison=comparison
        )
        return comparison if changed is None else changed

    def against_budget(
        self, record: Record, profile: MemoryProfile, gpu: str | None, real: RealRun | None
    ) -> Record:
        """Return ``record`` as the budget has it judged; ``gpu`` is the one that it is for."""
        record = replace(record, limits=limits_of(self._budget, gpu))
        over = overruns(self._budget, profile.figures(), gpu)
        text = messages.over_budget(record, over, peak_contents(profile)) if over else ""
        if not over and real is not None and real.measurement.gpu == gpu:
            # A limit is for the bytes of one GPU; another one's say nothing about it.
            figures = real.measurement.figures
            over = overruns(self._budget, figures, gpu) if figures else []
            text = messages.over_budget(record, over, {}, f"measured on {gpu}, ") if over else ""
        if not over:
            return record
        message = "\n\n".join(part for part in (record.message, text) if part)
        ran = any(overrun.value is not None for overrun in over)
        return replace(
            record,
            outcome=Outcome.OVER_BUDGET if ran else Outcome.NOT_CHECKED,
            failed=True,
            accepted=False,
            message=message,
        )

    def accepts(self, mode: str) -> bool:
        """Whether an update takes what this test does now. Of a test that is expected to fail the
        failure is what is wanted, so it fails in an update as it does without one.
        """
        return mode in self._settings.update and not _expected_to_fail(self._item)

    def _accepts_measurement(self, before: Entry, now: Entry) -> bool:
        """Whether an update writes ``now`` in the place of ``before``."""
        if before.same_measurement(now):
            return False
        another_gpu = before.same_trace(now) and not set(before.measured) & set(now.measured)
        return self.accepts("changed") or (another_gpu and self.accepts("new"))


def relative(item: pytest.Item, path: Path) -> str:
    """Return ``path`` relative to the root, with ``/``."""
    return Path(os.path.relpath(path, item.config.rootpath)).as_posix()


def update_command(item: pytest.Item) -> str:
    """Return the command, for where pytest was started, that accepts what ``item`` does now."""
    import shlex

    config = item.config
    path = os.path.relpath(item.path, config.invocation_params.dir)
    return f"pytest --torchmem-update {shlex.quote(f'{Path(path).as_posix()}::{test_id(item)}')}"


def series(version: str) -> str:
    """Return the minor series of a version: "2.13" of "2.13.1"."""
    return ".".join(version.split(".")[:2])


def _expected_to_fail(item: pytest.Item) -> bool:
    if item.get_closest_marker("xfail") is None:
        return False
    # pytest evaluates conditions here and nowhere public.
    from _pytest.skipping import evaluate_xfail_marks

    return evaluate_xfail_marks(item) is not None
