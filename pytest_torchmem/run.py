"""One pytest run as the controller sees it: results in, snapshot files and reports out.

Workers only read snapshots and send their records on the tests' reports; whatever is written is
written here, once, when the run ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.record import Outcome, Record, record_from_plain
from pytest_torchmem.settings import Settings
from pytest_torchmem.snapshot.format import Key, SnapshotError
from pytest_torchmem.snapshot.plan import FilePlan, plan_file
from pytest_torchmem.snapshot.store import locked, read, remove, write


@dataclass(slots=True)
class Attempt:
    """One attempt at one test; a rerun is another attempt, and the last one counts."""

    records: list[dict[str, Any]] = field(default_factory=list)
    outcome: str = "unfinished"
    failed_by_check: bool = False
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """A record, and what became of its test."""

    record: Record
    passed: bool
    failed_by_check: bool


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run came to; everything that reports show."""

    checks: tuple[Check, ...] = ()
    plans: tuple[FilePlan, ...] = ()
    obsolete: tuple[tuple[str, Key], ...] = ()
    """Entries whose test or name is gone, with their file, where they were not removed."""
    problems: tuple[str, ...] = ()
    proposal: tuple[str, ...] = ()
    """The files written for people to take over from CI."""

    @property
    def records(self) -> list[Record]:
        """The records of all checks."""
        return [check.record for check in self.checks]


class Run:
    """Gathers what the tests report, and concludes when they are done."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.summary = Summary()
        self._attempts: dict[tuple[str, str], Attempt] = {}
        self._modules: dict[str, dict[str, Any]] = {}
        self._worker_died = False

    def reported(self, report: pytest.TestReport) -> None:
        """Take in one phase of one test."""
        key = (getattr(report, "worker_id", ""), report.nodeid)
        attempt = self._attempts.get(key)
        if attempt is None or report.when == "setup":
            attempt = self._attempts[key] = Attempt()
        carried = getattr(report, "torchmem", None)
        if carried is not None:
            attempt.records.extend(carried["records"])
            attempt.failed_by_check |= carried["failed_by_check"]
        is_subtest = hasattr(report, "context")
        if report.outcome not in ("passed", "skipped"):
            attempt.outcome = "failed"
        elif attempt.outcome != "failed" and not is_subtest:
            if report.outcome == "skipped":
                attempt.outcome = "skipped"
            elif hasattr(report, "wasxfail"):
                attempt.outcome = "passed unexpectedly"
            elif attempt.outcome == "unfinished":
                attempt.outcome = "passed"
        attempt.finished |= report.when == "teardown"

    def collected(self, modules: Iterable[dict[str, Any]]) -> None:
        """Take in the modules that a process collected."""
        for module in modules:
            known = self._modules.setdefault(module["nodeid"], module)
            known["whole"] = known["whole"] and module["whole"]

    def worker_down(self, died: bool) -> None:
        """Take note of a worker that is gone."""
        self._worker_died |= died

    def conclude(self, session: pytest.Session) -> None:
        """Work out what to write, write it, and let the run fail for what no test could."""
        checks = tuple(self._checks())
        obsolete, problems = self._obsolete(checks)
        plans: list[FilePlan] = []
        if self.settings.update:
            plans, more = self._update(checks, obsolete)
            problems += more
        removed = {
            (plan_path(self.config, plan), key)
            for plan in plans
            if not plan.problem
            for key in (*plan.removed, *(old for old, _ in plan.renamed))
        }
        proposal, more = self._propose(checks)
        problems += more
        left = [(file, key) for file, keys in obsolete.items() for key in keys]
        self.summary = Summary(
            checks,
            tuple(plans),
            tuple(pair for pair in left if pair not in removed or self.settings.dry_run),
            tuple(dict.fromkeys(problems)),
            tuple(proposal),
        )
        self._report()
        self._set_exit_status(session)

    def _checks(self) -> Iterable[Check]:
        """Return every check; where several workers ran one test, it passed if it passed in all."""
        by_test: dict[str, list[Attempt]] = {}
        for (_, nodeid), attempt in self._attempts.items():
            by_test.setdefault(nodeid, []).append(attempt)
        for attempts in by_test.values():
            passed = self._outcome(attempts) == "passed"
            by_check = any(attempt.failed_by_check for attempt in attempts)
            seen = set()
            for attempt in attempts:
                for plain in attempt.records:
                    record = record_from_plain(plain)
                    if (record.key, record.outcome) not in seen:
                        seen.add((record.key, record.outcome))
                        yield Check(record, passed, by_check)

    @staticmethod
    def _outcome(attempts: Iterable[Attempt]) -> str:
        outcomes = {attempt.outcome if attempt.finished else "unfinished" for attempt in attempts}
        for outcome in ("failed", "unfinished", "passed unexpectedly", "skipped"):
            if outcome in outcomes:
                return outcome
        return "passed" if outcomes else "unfinished"

    def _obsolete(self, checks: Iterable[Check]) -> tuple[dict[str, list[Key]], list[str]]:
        """Return the entries whose test or name is gone, by file, and files that cannot be read."""
        found: dict[str, list[Key]] = {}
        problems: list[str] = []
        if self._worker_died or self.settings.disabled:
            return found, problems
        by_test: dict[str, list[Attempt]] = {}
        for (_, nodeid), attempt in self._attempts.items():
            by_test.setdefault(nodeid, []).append(attempt)
        seen: dict[str, set[Key]] = {}
        series: set[str] = set()
        for check in checks:
            if check.record.entry is not None:
                seen.setdefault(check.record.file, set()).add(check.record.key)
                series.add(check.record.key.torch_series)
        for module in self._modules.values():
            outcomes = {
                test: self._outcome(by_test.get(f"{module['nodeid']}::{test}", ()))
                for test in module["tests"]
            }
            if not module["whole"] or not set(outcomes.values()) <= {"passed", "skipped"}:
                continue
            try:
                stored = read(self.config.rootpath / module["file"])
            except SnapshotError as error:
                problems.append(str(error))
                continue
            keys = [
                key
                for key in (*stored.snapshot.entries, *stored.contested)
                if key not in seen.get(module["file"], ())
                and self._is_gone(key, outcomes.get(key.test), series)
            ]
            if keys:
                found[module["file"]] = sorted(keys)
        return found, problems

    def _is_gone(self, key: Key, outcome: str | None, series: set[str]) -> bool:
        """Tell whether an entry that no check asked for is obsolete; ``outcome`` is its test's."""
        if key.torch_series and self.settings.split_by_torch and key.torch_series not in series:
            return False
        if outcome is None:
            return True
        # Devices that this run was told to leave out are not gone.
        return outcome == "passed" and not self.settings.narrowed

    def _update(
        self, checks: Iterable[Check], obsolete: dict[str, list[Key]]
    ) -> tuple[list[FilePlan], list[str]]:
        accepted: dict[str, dict[Key, Record]] = {}
        for check in checks:
            record = check.record
            if check.passed and record.accepted and record.entry is not None:
                accepted.setdefault(record.file, {})[record.key] = record
        removable = obsolete if "obsolete" in self.settings.update else {}
        plans, problems = [], []
        for file in sorted({*accepted, *removable}):
            path = self.config.rootpath / file
            entries = [
                record.entry
                for record in accepted.get(file, {}).values()
                if record.entry is not None
            ]
            try:
                with locked(path):
                    plan = plan_file(read(path), entries, removable.get(file, ()))
                    if plan.changes_file and self.settings.writes:
                        _apply(plan)
            except SnapshotError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{path} cannot be written: {error.strerror or error}")
            else:
                plans.append(plan)
                problems += [plan.problem] if plan.problem else []
        return plans, problems

    def _propose(self, checks: Iterable[Check]) -> tuple[list[str], list[str]]:
        """Write what an update would have made of the checks that failed.

        Returns the files, and what was in the way of others.
        """
        directory = self.settings.proposal_path
        files: list[str] = []
        problems: list[str] = []
        if directory is None or self.settings.update:
            return files, problems
        entries: dict[str, list[Record]] = {}
        for check in checks:
            record = check.record
            acceptable = record.outcome in (Outcome.GREW, Outcome.MISSING, Outcome.SHRANK)
            if record.failed and check.failed_by_check and record.entry is not None and acceptable:
                entries.setdefault(record.file, []).append(record)
        for file, records in sorted(entries.items()):
            # The module may lie outside of the root, where the proposal has no place for its file.
            if file.startswith("../"):
                continue
            try:
                stored = read(self.config.rootpath / file)
                plan = plan_file(stored, [record.entry for record in records if record.entry], ())
                if plan.text is not None and plan.changes_file:
                    write(directory / file, plan.text)
                    files.append(file)
            except SnapshotError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{directory / file} cannot be written: {error}")
        return files, problems

    def _set_exit_status(self, session: pytest.Session) -> None:
        summary, settings = self.summary, self.settings
        fails = (
            (settings.strict and bool(summary.obsolete))
            or bool(summary.problems)
            or (settings.dry_run and any(plan.changes_file for plan in summary.plans))
        )
        if fails and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _report(self) -> None:
        from pytest_torchmem.report.files import write_reports

        try:
            write_reports(self)
        except OSError as error:
            problem = f"a report cannot be written: {error}"
            self.summary = replace(self.summary, problems=(*self.summary.problems, problem))


def plan_path(config: pytest.Config, plan: FilePlan) -> str:
    """Return the file of a plan, relative to the root."""
    import os

    return Path(os.path.relpath(plan.stored.path, config.rootpath)).as_posix()


def _apply(plan: FilePlan) -> None:
    if plan.text is None:
        remove(plan.stored.path)
    else:
        write(plan.stored.path, plan.text)
