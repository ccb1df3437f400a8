"""One pytest run as the controller sees it: results in, snapshot files and reports out.

Workers only read snapshots and send their records on the tests' reports; whatever is written is
written here, once, when the run ends.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pickle import loads
from typing import Any

import pytest

from pytest_torchmem import __version__
from pytest_torchmem.checks.gpu import update_calibrations
from pytest_torchmem.checks.request import Settings
from pytest_torchmem.checks.result import Outcome
from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.plugin.failure import UNUSED
from pytest_torchmem.plugin.start import let_fail
from pytest_torchmem.plugin.update import Gone, Update, find_gone
from pytest_torchmem.reports.files import build, write_reports
from pytest_torchmem.reports.growth import explained
from pytest_torchmem.reports.summary import Check, Summary
from pytest_torchmem.snapshots.calibration import CalibrationPlan
from pytest_torchmem.snapshots.files import write
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.location import has_module
from pytest_torchmem.snapshots.store import FilePlan, plan_file, read
from pytest_torchmem.snapshots.tolerance import for_path

_ACCEPTABLE = (Outcome.GREW, Outcome.MISSING, Outcome.SHRANK, Outcome.MEASURED_GREW)
"""Failures that an update would accept."""
_PARTIAL = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf")


@dataclass(slots=True)
class Attempt:
    """One attempt at one test; a rerun is another attempt, and the last one counts."""

    checks: list[Check] = field(default_factory=list)
    outcome: str = "unfinished"
    failed_by_check: bool = False
    finished: bool = False
    undecided: bool = False
    """A check of it came to no result, although the test may have passed."""

    def take(self, report: pytest.TestReport) -> None:
        """Take in one phase, or one subtest."""
        carried = getattr(report, "torchmem", None)
        if carried is not None:
            checks: list[Check] = loads(carried["checks"])
            self.checks += checks
            self.undecided |= any(check.broke_off or check.notice == UNUSED for check in checks)
            self.failed_by_check |= carried["failed_by_check"]
        is_subtest = hasattr(report, "context")
        if report.outcome not in ("passed", "skipped"):
            self.outcome = "failed"
        elif self.outcome != "failed" and not is_subtest:
            if report.outcome == "skipped":
                self.outcome = "skipped"
            elif hasattr(report, "wasxfail"):
                self.outcome = "passed unexpectedly"
            elif self.outcome == "unfinished" and report.when == "call":
                self.outcome = "passed"  # --setup-only ends without a call of the test
        self.finished |= report.when == "teardown"


class Run:
    """Gathers what the tests report, and concludes when they are done."""

    def __init__(
        self, config: pytest.Config, settings: Settings, lost: Sequence[str], *, worker_died: bool
    ) -> None:
        self.config = config
        self._lost = lost
        self.settings = settings
        self.summary = Summary(settings, config.rootpath)
        self._attempts: dict[str, dict[str, Attempt]] = {}
        """By test and worker."""
        self._subtests: dict[tuple[str, str], list[pytest.TestReport]] = {}
        """Reports of subtests, by test and worker, until it is known which attempt they are of."""
        self._modules: dict[str, dict[str, Any]] = {}
        self._orphans: set[str] | None = None
        self._unwritten: set[str] = set()
        self._selected: dict[str, str] = {}
        """The tests that were to run: their node ids in reports, and their own."""
        self._calibrations: dict[str, list[str]] = {}
        self._worker_died = worker_died

    def reported(self, report: pytest.TestReport) -> None:
        """Take in one phase of one test, or one subtest.

        Those of an attempt come before its call's; a plugin that reports a test when it is over
        (pytest-rerunfailures) lets them come even before its setup.
        """
        nodeid = self._selected.get(report.nodeid, report.nodeid)
        worker = getattr(report, "worker_id", "")
        if hasattr(report, "context"):
            self._subtests.setdefault((nodeid, worker), []).append(report)
            return
        attempts = self._attempts.setdefault(nodeid, {})
        if worker not in attempts or report.when == "setup":
            attempts[worker] = Attempt()
        for one in (*self._subtests.pop((nodeid, worker), ()), report):
            attempts[worker].take(one)

    def collected(self, found: dict[str, list[Any]]) -> None:
        for module in found.get("modules", ()):
            known = self._modules.setdefault(module["nodeid"], module)
            known["whole"] = known["whole"] and module["whole"]
            known["selective"] = known["selective"] or module["selective"]
        orphans = set(found.get("orphans", ()))
        self._orphans = orphans if self._orphans is None else self._orphans & orphans
        self._unwritten.update(found.get("unwritten", ()))
        self._selected.update(found.get("selected", ()))
        self._calibrations.update(dict(found.get("calibrations", ())))

    def conclude(self, session: pytest.Session) -> None:
        """Work out what to write, write it, and let the run fail for what no test could."""
        for (test, worker), reports in self._subtests.items():  # of tests that were broken off
            attempt = self._attempts.setdefault(test, {}).setdefault(worker, Attempt())
            for report in reports:
                attempt.take(report)
        checks = list(self._checks())
        gone = self._find_gone(checks)
        clean = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        # The exit status alone does not tell: pytest.exit(returncode=0) ends a run anywhere.
        over = all(self._outcome(test) != "unfinished" for test in self._selected.values())
        clean = clean and over and not session.shouldstop
        updated = self._update(checks, gone, clean)
        calibrations: list[CalibrationPlan] = []
        if self.settings.update:
            updated.run()
            calibrations = self._update_calibrations(checks)
        removed = {
            (self.summary.file_of(plan), key)
            for plan in updated.plans
            if not plan.problem
            for key in (*plan.removed, *(old for old, _ in (*plan.renamed, *plan.moved)))
        }
        unwritten = {self.summary.file_of(plan) for plan in updated.plans if plan.problem}
        plans: list[FilePlan[Any, Any]] = [*updated.plans, *calibrations]
        problems = [plan.problem for plan in plans if plan.problem]
        proposal, more = self._propose(checks)
        checks = [
            replace(check, unwritten=check.result.accepted and snapshot.file in unwritten)
            if (snapshot := check.result.snapshot) is not None
            else check
            for check in checks
        ]
        summary = replace(
            self.summary,
            checks=tuple(checks),
            plans=tuple(updated.plans),
            obsolete=tuple(p for p in gone.listed() if p not in removed or self.settings.dry_run),
            problems=tuple(dict.fromkeys((*self._lost, *gone.problems, *problems, *more))),
            proposal=tuple(proposal),
            orphans=frozenset(gone.orphans),
            hints=(*gone.hints(), *updated.hints, *self._unused_rules(session, checks)),
            calibrations=tuple(calibrations),
        )
        plain = build(summary, __version__)
        self.config.hook.pytest_torchmem_report(config=self.config, report=plain)
        failed = (f"a report cannot be written: {e}" for e in write_reports(summary, plain))
        self.summary = summary = replace(summary, problems=(*summary.problems, *failed))
        if (
            (self.settings.fails_on_obsolete and summary.obsolete)
            or (self.settings.strict and any(c.broke_off and c.passed for c in checks))
            or summary.problems
            or (self.settings.dry_run and any(plan.changes_file for plan in summary.every_plan))
        ):
            let_fail(session)

    def _checks(self) -> Iterable[Check]:
        for nodeid, by_worker in self._attempts.items():
            outcome, attempts = self._outcome(nodeid), by_worker.values()
            passed = outcome == "passed"
            # Not one that is expected to fail: no update writes what it does.
            by_check = outcome == "failed" and any(one.failed_by_check for one in attempts)
            seen = set()
            for check in (check for attempt in attempts for check in attempt.checks):
                what = (check.result.key, check.result.outcome)
                if what not in seen:
                    seen.add(what)
                    yield replace(check, passed=passed, failed_by_check=by_check)

    def _outcome(self, nodeid: str) -> str:
        attempts = self._attempts.get(nodeid, {}).values()
        outcomes = {attempt.outcome if attempt.finished else "unfinished" for attempt in attempts}
        for outcome in ("failed", "unfinished", "passed unexpectedly", "skipped"):
            if outcome in outcomes:
                return outcome
        return "passed" if outcomes else "unfinished"

    def _is_unchecked(self, nodeid: str) -> bool:
        attempts = self._attempts.get(nodeid, {}).values()
        checks = [check for attempt in attempts for check in attempt.checks]
        results = (check.result.outcome is not Outcome.NOT_CHECKED for check in checks)
        broke_off = any(check.broke_off for check in checks)
        return self._outcome(nodeid) == "passed" and not broke_off and not any(results)

    def _decision(self, nodeid: str) -> str:
        """Return what became of a test; one of which a check broke off is no better than skipped.

        Its entries are not gone, and it may have been given another name.
        """
        outcome, attempts = self._outcome(nodeid), self._attempts.get(nodeid, {}).values()
        undecided = outcome == "passed" and any(attempt.undecided for attempt in attempts)
        return "skipped" if undecided else outcome

    def _find_gone(self, checks: Iterable[Check]) -> Gone:
        """Return what belongs to tests that are gone; nothing where a worker died."""
        if self._worker_died or self.settings.disabled:
            return Gone()
        seen: dict[str, set[Key]] = {}
        for check in checks:
            snapshot = check.result.snapshot
            if snapshot is not None:
                seen.setdefault(snapshot.file, set()).add(snapshot.entry.key)
        return find_gone(
            self.config.rootpath,
            self.settings,
            self._modules.values(),
            sorted(self._orphans or ()),
            sorted(self._unwritten),
            self._decision,
            self._is_unchecked,
            seen,
        )

    def _unused_rules(self, session: pytest.Session, checks: Iterable[Check]) -> Iterable[str]:
        """Yield where the ini file names a path that no memory test has, in a run of all."""
        config, ended = self.config, session.shouldfail or session.exitstatus > 1
        partial = [config.getoption(name, None) for name in _PARTIAL]
        partial += [ended, self._worker_died, config.option.continue_on_collection_errors]
        partial.append(config.args_source.name == "ARGS")
        if any(partial) or config.invocation_params.dir != config.rootpath:
            return
        paths = {check.location[0] for check in checks}
        for rule in (*self.settings.ini_tolerance, *self.settings.budget):
            if rule.path and not any(for_path([rule], path)[0] for path in paths):
                yield f"unused: {rule.source}: no memory test has such a path"

    def _update(self, checks: Iterable[Check], gone: Gone, clean: bool) -> Update:
        accepted: dict[str, dict[Key, Entry]] = {}
        root, files = self.config.rootpath, set()
        for check in checks:
            snapshot = check.result.snapshot
            files |= {snapshot.file} if snapshot is not None else set()
            if check.passed and check.result.accepted and snapshot is not None:
                accepted.setdefault(snapshot.file, {})[snapshot.entry.key] = explained(snapshot)
        for file in files if "changed" in self.settings.update else ():
            with suppress(SnapshotError):  # a plan settles a conflict, or says what it lacks
                if read(root / file).conflicted:
                    accepted.setdefault(file, {})
        tests = {module["file"]: module["memory_tests"] for module in self._modules.values()}
        return Update(root, self.settings, accepted, gone, tests, clean)

    def _update_calibrations(self, checks: Iterable[Check]) -> list[CalibrationPlan]:
        found = [
            check.result.calibration
            for check in checks
            if check.passed and check.result.calibration is not None
        ]
        complete = {
            file: tests
            for file, tests in self._calibrations.items()
            if all(self._outcome(test) == "passed" for test in tests)
        }
        if self._worker_died or self.settings.disabled or self.settings.narrowed:
            complete = {}
        return update_calibrations(self.config.rootpath, self.settings, found, complete)

    def _propose(self, checks: Iterable[Check]) -> tuple[list[str], list[str]]:
        """Write what an update would make of the checks that failed; return files and problems."""
        directory = self.settings.proposal_path
        files: list[str] = []
        problems: list[str] = []
        if directory is None or self.settings.update:
            return files, problems
        entries: dict[str, list[Entry]] = {}
        for check in checks:
            result = check.result
            acceptable = check.failed_by_check and result.failed and result.outcome in _ACCEPTABLE
            if acceptable and result.snapshot is not None:
                entries.setdefault(result.snapshot.file, []).append(explained(result.snapshot))
        for file, members in sorted(entries.items()):
            # The module may lie outside of the root, where the proposal has no place for its file.
            if file.startswith("../"):
                continue
            if has_module(directory / file):  # the next run would compare with what nobody accepted
                problems.append(
                    f"{directory / file} is the snapshot file of a test module, so no proposal is "
                    "written there: name another directory (--torchmem-proposal)"
                )
                continue
            try:
                stored = read(self.config.rootpath / file)
                plan = plan_file(stored, members, ())
                if plan.text is not None and plan.changes_file:
                    write(directory / file, plan.text)
                    files.append(file)
            except SnapshotError as error:
                problems.append(str(error))
            except OSError as error:
                problems.append(f"{directory / file} cannot be written: {error}")
        return files, problems
