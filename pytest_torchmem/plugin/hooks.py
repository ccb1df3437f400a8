"""The pytest plugin: hooks, and nothing else.

pytest imports this module at every start, so it imports nothing that a run without memory tests
does not need.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchmem import __version__
from pytest_torchmem.checks import MARKER, SELECTED_BY, SIGNATURE, STAND_IN
from pytest_torchmem.plugin import hookspec, leave_this_package_alone, start
from pytest_torchmem.printable import printable
from pytest_torchmem.snapshots.location import DIRECTORY

if TYPE_CHECKING:
    from pytest_torchmem.checks.check import Context
    from pytest_torchmem.checks.gpu import Confirmations
    from pytest_torchmem.checks.request import Settings
    from pytest_torchmem.plugin.checker import Checker
    from pytest_torchmem.plugin.collection import Collection
    from pytest_torchmem.plugin.failure import OtherProcesses
    from pytest_torchmem.plugin.fixture import Torchmem
    from pytest_torchmem.plugin.standing import StandingGpus
    from pytest_torchmem.tracing.layers import StandingGpu

_NAME = "torchmem-run"
_CHECKER: pytest.StashKey[Checker] = pytest.StashKey()
_REPORTED = "torchmem_reported"
_CONFIRMED = "torchmem_confirmed"


def pytest_addoption(parser: pytest.Parser) -> None:
    leave_this_package_alone()  # in a second run of this process
    start.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspec)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Let the first ``conftest.py`` files see the GPU of ``--torchmem-fake-cuda``."""
    name = start.written_early(early_config, "torchmem_fake_cuda")
    if not name:
        return (yield)
    from pytest_torchmem.errors import UsageError
    from pytest_torchmem.plugin.standing import gpu_of

    try:
        gpu = gpu_of(early_config, name)
    except UsageError:  # settings say so, when all GPUs are known
        return (yield)
    with gpu.on():
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    text = "limits, such as '2 GiB', on the memory that a PyTorch test needs"
    config.addinivalue_line("markers", f"{SIGNATURE}: {text}")
    selects = f"{SELECTED_BY}: every memory test has it; select them with -m {SELECTED_BY}"
    config.addinivalue_line("markers", selects)
    config.pluginmanager.register(_RunHooks(config), _NAME)


@pytest.fixture
def torchmem(request: pytest.FixtureRequest) -> Torchmem:
    """Memory checks: ``torchmem.check(model, inputs)`` and ``torchmem.trace(model, inputs)``."""
    from pytest_torchmem.plugin.fixture import Torchmem

    hooks: _RunHooks = request.config.pluginmanager.getplugin(_NAME)
    return Torchmem(hooks.checker(request.node))


class _RunHooks:
    """The hooks of one run, in the controller, in a worker, or in a run without workers.

    It has methods where properties would do: pytest 8.0 reads every attribute of a plugin when it
    is registered, to look for fixtures (``_pytest/fixtures.py``, ``parsefactories``), and would
    work them out before anything is collected.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.is_worker = hasattr(config, "workerinput")
        self._settings: Settings | None = None
        self._registrations = hookspec.PluginRegistrations(config)
        self._collection: Collection | None = None
        self._context: Context | None = None
        self._collect_reports: list[pytest.CollectReport] = []
        self._seen: dict[str, start.SeenFile] = {}
        self._collected: list[pytest.Item] = []
        self._selected: list[pytest.Item] = []
        self._reports: list[pytest.TestReport] = []
        self._found: list[dict[str, list[Any]]] = []
        self._worker_died = False
        self._standing: StandingGpus | None = None
        self._others: OtherProcesses | None = None
        self._confirmations: Confirmations | None = None
        self._serves = False
        """This process measures for another one, with the stand-in."""
        self._shown: list[tuple[str, dict[str, bool]]] = []
        """The lines at the end of the run, and how they are marked."""
        self._lost: list[str] = []
        """Checks whose result came too late for the report of any test."""
        start.refuse_unknown_keys(config)
        if start.something_is_set(config):
            self.settings()  # what cannot be understood ends the run before it begins
            if self.settings().fake_cuda:
                self._stand_for_suite()
            if self.settings().measure == STAND_IN:
                self._find_confirmations()

    def settings(self) -> Settings:
        """What options and ini file say, read when first asked for."""
        if self._settings is None:
            from pytest_torchmem.plugin.settings import read_settings

            self._registrations.gpus()
            self._settings = read_settings(self.config)
        return self._settings

    def standing(self, suite: StandingGpu | None = None) -> StandingGpus:
        """The fake GPUs that fixtures see: that of the whole ``suite``, if it has one."""
        if self._standing is None:
            from pytest_torchmem.plugin.standing import StandingGpus

            self._standing = StandingGpus(
                self.settings(), lambda item, failed: self.checker(item).one_failure(failed), suite
            )
            self.config.pluginmanager.register(self._standing)
        return self._standing

    def _stand_for_suite(self) -> None:
        from pytest_torchmem.errors import UsageError
        from pytest_torchmem.plugin.standing import SuiteHooks, gpu_of

        try:
            gpu = gpu_of(self.config, self.settings().fake_cuda)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        self.config.pluginmanager.register(SuiteHooks(gpu))
        self.standing(gpu)

    def _find_confirmations(self) -> None:
        """Let checks find what was measured with the stand-in, or be measured in this process."""
        from pytest_torchmem.checks.gpu import Confirmations
        from pytest_torchmem.plugin.stand_in import ServingHooks, served_confirmations

        served = served_confirmations()
        if served is not None:
            self._confirmations, self._serves = served, True
            self._settings = replace(self.settings(), update=frozenset())
            self.config.pluginmanager.register(ServingHooks(self.config, served))
        elif self.is_worker:
            directory = self.config.workerinput[_CONFIRMED]  # type: ignore[attr-defined]
            self._confirmations = Confirmations(Path(directory))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Measure with the stand-in, before workers begin."""
        asked = self._settings is not None and self._settings.measure == STAND_IN
        if not asked or self._confirmations is not None or self.config.option.collectonly:
            return
        from pytest_torchmem.errors import UsageError
        from pytest_torchmem.plugin.stand_in import measure_beside

        try:
            self._confirmations = measure_beside(self.config, self.settings().gpu)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None

    def collection(self) -> Collection:
        """What this process collected, worked out when first asked for."""
        if self._collection is None:
            from pytest_torchmem.plugin.collection import Collection

            self._collection = Collection(
                self.config,
                self._collect_reports,
                self._seen,
                self._collected,
                self._selected,
                self.settings().proposal_path,
            )
        return self._collection

    def checker(self, item: pytest.Item) -> Checker:
        """Return what runs the checks of the present attempt at ``item``."""
        if _CHECKER not in item.stash:
            from pytest_torchmem.checks.check import Context
            from pytest_torchmem.checks.gpu import Calibrations
            from pytest_torchmem.plugin.checker import Checker
            from pytest_torchmem.plugin.failure import OtherProcesses, follow_expectations

            if self._context is None:
                settings = self.settings()
                self._context = Context(settings, Calibrations(settings), self._confirmations)
            if self._others is None:
                self._others, patch = OtherProcesses(), pytest.MonkeyPatch()
                self.config.add_cleanup(patch.undo)
                follow_expectations(patch)
            item.stash[_CHECKER] = Checker(
                item, self._context, self.collection(), self.standing(), self._lost, self._others
            )
        return item.stash[_CHECKER]

    def pytest_report_header(self) -> str:
        return start.header(__version__, self._settings)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Notice all of a module, also where a part is asked for; refuse unreadable markers."""
        seen = start.SeenFile(collector) if isinstance(collector, pytest.File) else None
        report = yield
        if any(
            MARKER in one.keywords for one in report.result or () if isinstance(one, pytest.Item)
        ):
            from pytest_torchmem.plugin.settings import refuse_unreadable

            self._registrations.gpus()
            refuse_unreadable(report)
        if report.passed and seen is not None:
            seen.members = list(report.result)
            self._seen[collector.nodeid] = seen
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._collect_reports.append(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Notice every test before any plugin deselects some."""
        self._collected = list(items)
        for item in items:
            if start.checks_memory(item):
                item.add_marker(SELECTED_BY)
        if self.is_worker:
            for item in items:
                start.note_id(item)
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Notice what is left to run; a worker tells the controller."""
        self._selected = list(session.items)
        if not self.config.option.collectonly and any(map(start.checks_memory, session.items)):
            self.standing()
        if self.is_worker:
            self.config.workeroutput["torchmem"] = self._find()  # type: ignore[attr-defined]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Add what plugins know of GPUs and operators, before any test can trace."""
        if not session.config.option.collectonly:
            self._registrations.gpus()
            self._registrations.operators()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Forget an earlier attempt at this test: a rerun starts anew."""
        if "pyfakefs" in sys.modules:
            start.import_before(item)
        if any(mark.args or mark.kwargs for mark in item.iter_markers(SELECTED_BY)):
            # It would look like a limit, and nothing would be checked.
            why = f"the marker {SELECTED_BY} takes no arguments: limits are those of {SIGNATURE}"
            pytest.fail(why, pytrace=False)
        if _CHECKER in item.stash:
            from pytest_torchmem.reports.summary import PREFIX

            del item.stash[_CHECKER]
            others = (one for one in item.user_properties if not one[0].startswith(PREFIX))
            item.user_properties[:] = [*others]

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Judge a test that has the marker, in its call phase, as if it had asserted it itself."""
        with self._settling(item):
            if item.get_closest_marker(MARKER) is None:
                return (yield)
            from pytest_torchmem.plugin.fixture import judged

            with judged(item, self.checker(item)):
                return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        """Let a check that a fixture made afterwards count as well."""
        with self._settling(item, over=True):
            return (yield)

    @contextmanager
    def _settling(self, item: pytest.Item, *, over: bool = False) -> Generator[None]:
        """Fail a phase in which a check failed that nobody came to see."""
        ended: BaseException | None = None
        try:
            yield
        except BaseException as error:
            ended = error
            raise
        finally:
            if _CHECKER in item.stash:
                item.stash[_CHECKER].settle(ended, over=over)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the records of this phase along with its report."""
        if call.excinfo is not None:
            start.hide_own_frames()
            if _CHECKER in item.stash:
                item.stash[_CHECKER].pass_on(call.excinfo.value)
        report = yield
        try:
            if report.skipped and start.checks_memory(item):
                self.checker(item).note_skip(call)
            if _CHECKER in item.stash:
                explained = self._reports_everything()
                item.stash[_CHECKER].send_along(report, call, explained=explained)
        except Exception as error:  # raised here, it would end the run
            report.outcome, report.longrepr = "failed", start.not_reported(error)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep every report until the run ends: what is written depends on all of them."""
        if not self.is_worker:
            self._reports.append(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker whether somebody here reads the report."""
        node.workerinput[_REPORTED] = self._reports_everything()
        if self._confirmations is not None:
            node.workerinput[_CONFIRMED] = str(self._confirmations.directory)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take over what a worker collected, or notice that it died."""
        output = getattr(node, "workeroutput", None)
        if output is None or error:
            self._worker_died = True
        else:
            self._lost += output.get("torchmem_lost", ())
            self._found += [output["torchmem"]] if "torchmem" in output else []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write what is to be written, where there was anything to check."""
        if self.is_worker:
            self.config.workeroutput["torchmem_lost"] = self._lost  # type: ignore[attr-defined]
        if self.is_worker or self._serves or self.config.option.collectonly:
            return
        try:
            self._conclude(session)
        except (pytest.exit.Exception, pytest.UsageError):
            raise
        except Exception as error:  # raised here, pytest would end without its own summary
            self._shown = [(line, {"red": True}) for line in start.not_concluded(error).split("\n")]
            start.let_fail(session)

    def _conclude(self, session: pytest.Session) -> None:
        # The controller of workers collects nothing itself.
        everything = self._found or [self._find()]
        # A report that is asked for is written in any case: an older one must not be taken for it.
        asked = self._settings is not None and self._settings.writes_reports
        checked = any(hasattr(report, "torchmem") for report in self._reports)
        found_any = any(any(found.values()) for found in everything)
        if not (asked or checked or found_any or self._lost):
            return
        from pytest_torchmem.plugin.run import Run

        run = Run(self.config, self.settings(), self._lost, worker_died=self._worker_died)
        for found in everything:
            run.collected(found)
        for report in self._reports:
            run.reported(report)
        run.conclude(session)
        from pytest_torchmem.reports.terminal import lines

        shown = lines(run.summary, self.config.get_verbosity(SELECTED_BY))
        self._shown = [(printable(line), markup) for line, markup in shown]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the table of checks, and what was or should be written."""
        if self._shown:
            terminalreporter.section("memory (torchmem)", sep="=", bold=True)
        for line, markup in self._shown:
            terminalreporter.write_line(line, **markup)

    def _reports_everything(self) -> bool:
        """Whether the JSON report, which explains checks that pass as well, is written or read."""
        workerinput = getattr(self.config, "workerinput", {})
        return (
            (self._settings is not None and self._settings.json_path is not None)
            or bool(self.config.hook.pytest_torchmem_report.get_hookimpls())
            or bool(workerinput.get(_REPORTED))
        )

    def _find(self) -> dict[str, list[Any]]:
        directories = {item.path.parent for item in self._collected}
        for report in self._collect_reports:
            path = self.config.rootpath / report.nodeid.partition("::")[0]
            directories.update((path, path.parent))
        if not any((directory / DIRECTORY).is_dir() for directory in directories):
            return {}
        return self.collection().to_plain()
