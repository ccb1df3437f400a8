"""The checks of one attempt at one test: facts of pytest in, failures out."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pickle import dumps
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchmem.checks import MARKER
from pytest_torchmem.checks.check import Context, DeviceCheck, stored_for
from pytest_torchmem.checks.request import (
    Budget,
    CheckedTest,
    CheckTarget,
    Request,
    gpu_name,
    make_request,
)
from pytest_torchmem.checks.result import CheckResult, Outcome
from pytest_torchmem.errors import NoCudaError, PassEnded, UsageError
from pytest_torchmem.plugin import failure
from pytest_torchmem.plugin.collection import Collection, test_id
from pytest_torchmem.plugin.failure import UNUSED, add_attached, attach, why_skipped
from pytest_torchmem.plugin.settings import budget_of
from pytest_torchmem.plugin.start import node_id
from pytest_torchmem.reports.summary import Check, properties
from pytest_torchmem.snapshots.format import Key
from pytest_torchmem.snapshots.location import relative
from pytest_torchmem.targets.world import World

if TYPE_CHECKING:
    from pytest_torchmem.plugin.standing import StandingGpus
    from pytest_torchmem.profile.profile import MemoryProfile


RAISED = "caught what a check raised, so that nothing was checked"
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class Checker:
    def __init__(
        self,
        item: pytest.Item,
        context: Context,
        collection: Collection,
        standing: StandingGpus,
        lost: list[str],
        others: failure.OtherProcesses,
    ) -> None:
        self.item = item
        self.standing = standing
        self.context = context
        self.checked = False
        """Something was recorded, if only why nothing was checked."""
        self.traced = False
        """The test has made a trace of its own, which nothing judges."""
        self.in_body = False
        """A trace of the whole body is under way."""
        self._collection = collection
        self._unsent: list[Check] = []
        self._names: dict[str, set[World | None]] = {}
        self.devices: set[str] = set()
        """Those on which something was judged."""
        self._failures: list[BaseException] = []
        """What checks raised and no report has shown yet."""
        self._running = 0
        self._told_of_running = False
        self._over = False
        self._lost = lost
        self._others = others
        self._process = os.getpid()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record a check that fails, even where the test catches it, or that outlives its test.

        It may run on a thread of the test's, whose exceptions nobody sees.
        """
        self._others.refuse(self._process)
        self._running += 1
        try:
            yield
        except (failure.MemoryCheckFailed, UsageError, pytest.fail.Exception) as error:
            failure.number_in_order(error)
            self._failures.append(error)
            raise
        finally:
            self._running -= 1
            if self._over:
                self._lost.append(
                    f"{node_id(self.item)}: torchmem.check ended when the test was over, so its "
                    "result is not in any report. Wait in the test for the thread that calls it"
                )

    def settle(self, error: BaseException | None, *, over: bool) -> None:
        """Raise for what nobody else does, at the end of a phase that ``error`` ended, if anything.

        That is a check that failed and whose failure was caught, and one that still runs on another
        thread. After the last phase nothing can be told of any more in a report: it is ``over``.
        """
        self._over |= over
        failures, self._failures = self.swallowed(), [f for f in self._failures if f is error]
        elsewhere = self._others.called()
        if isinstance(error, pytest.exit.Exception) and (failures or elsewhere):
            # pytest makes no report of a test that ends the run.
            self._lost.append(f"{node_id(self.item)}: a check of it failed, and it ended the run")
        if error is not None and not isinstance(error, pytest.skip.Exception):
            return  # it does not pass
        if elsewhere:
            raise failure.MemoryCheckFailed(failure.NOT_HERE, self.first_line)
        if self._running and not self._told_of_running:
            self._told_of_running = True
            why = (
                "not checked: torchmem.check still runs on another thread. Wait in the test for "
                "its end, and pass on what it raises: ThreadPoolExecutor.submit(...).result()"
            )
            raise failure.MemoryCheckFailed(why, self.first_line)
        if failures:
            first = failures[0]
            headline = getattr(first, "headline", str(first).partition("\n")[0])
            why = f"the test went on after a check of it had failed: {headline}"
            advice = (
                "A test must not catch what torchmem.check raises, nor call it where it is lost. "
                "Where it is to fail, say so: with pytest.raises(AssertionError)"
            )
            raise failure.MemoryCheckFailed(f"{why}\n\n{advice}\n\n{first}", self.first_line, why)

    def swallowed(self) -> list[BaseException]:
        """Return the failures that were raised, and that nobody had expected."""
        return [one for one in self._failures if not failure.is_expected(one)]

    @cached_property
    def budget(self) -> Budget:
        return budget_of(self.item)

    def check(
        self, target: CheckTarget, *, on_cuda: str = "", **arguments: Any
    ) -> dict[str, MemoryProfile]:
        """Trace ``target`` on every device, judge it, and raise once for all failures.

        ``on_cuda`` names what of the test is on cuda already, and so cannot be traced on the CPU.
        """
        request = make_request(
            self._checked_test(), self.context.settings, self.budget, **arguments
        )
        if on_cuda and not request.devices_named:
            request = self._on_cuda_alone(request, on_cuda)
        worlds = self.standing.traced_now(self.item, request.worlds)
        self.standing.refuse_other_worlds(self.item, worlds)
        request = self._stored_under_a_name(request)
        profiles: dict[str, MemoryProfile] = {}
        traced: list[MemoryProfile | None] = []
        results: list[CheckResult] = []
        for device, world in product(request.devices, worlds):
            result, profile = self._check_on(device, world, request, target)
            if result is None:
                continue
            results.append(result)
            traced.append(profile)
            if profile is not None:
                rank = f" rank {result.key.rank}" if len(request.worlds) > 1 else ""
                profiles[f"{device}{rank}"] = profile
        # A test may well leave one of the configured devices alone, but not all of them.
        idle_may_pass = not request.devices_named and any(p.peak for p in profiles.values())
        self.devices.update(request.devices)
        idle = all(
            one.outcome is Outcome.NOT_CHECKED and one.figures.get("peak") == 0 for one in results
        )
        if idle and self._may_be_idle(request):
            from pytest_torchmem.reports.text import plain_message

            notice = "allocated nothing, so nothing was checked"
            for one in results:
                found, text = one.unchecked(), plain_message(one)
                self._keep(Check(node_id(self.item), self._location(), found, text, notice=notice))
                notice = ""  # one for all devices
            return profiles
        known = self._known_to_snapshot(request)
        checks = [
            self._reported(result, idle_may_pass=idle_may_pass and result.key not in known)
            for result in results
        ]
        for check, profile in zip(checks, traced, strict=True):
            self._keep(check)
            self._picture(check, profile)
        failures = [check for check in checks if check.result.failed]
        if failures:
            last_line = self.first_line if self.in_body else ""
            raise self._failure(failures, last_line)
        return profiles

    def _failure(self, failures: Sequence[Check], last_line: str) -> failure.MemoryCheckFailed:
        from pytest_torchmem.reports.text import MOST_LINES, headlines, together

        most = MOST_LINES - 2  # pytest adds an empty line and the place
        verbose = self.context.settings.verbose
        text = together(failures, self.context.told, verbose=verbose, most=most)
        return failure.MemoryCheckFailed(text, last_line, headlines(failures), failures)

    def one_failure(self, errors: Sequence[failure.MemoryCheckFailed]) -> failure.MemoryCheckFailed:
        """Merge the failures of several ranks into one."""
        first, *others = errors
        if not others:
            return first
        self._failures = [one for one in self._failures if one not in errors]
        checks = [check for error in errors for check in error.checks]
        if not all(error.checks for error in errors):
            text = "\n\n".join(dict.fromkeys(error.msg for error in errors))
            return failure.MemoryCheckFailed(text, headline=first.headline)
        return self._failure(checks, first.last_line).with_traceback(first.__traceback__)

    def note_skip(self, call: pytest.CallInfo[None]) -> None:
        """Record a test as never checked that was skipped, before its first check or whole."""
        settled = self.checked or self.context.settings.disabled
        if not settled and (skip := why_skipped(self.item, call)) is not None:
            self.not_checked(f"never checked: {skip[0]}", notice=skip[1])

    def pass_on(self, error: BaseException) -> None:
        """Raise what ends a pass of a check that runs: a subtest catches all, and reports it."""
        if (self.in_body or self._running) and isinstance(error, PassEnded):
            raise error

    def send_along(
        self, report: pytest.TestReport, call: pytest.CallInfo[None], *, explained: bool
    ) -> None:
        """Let a report carry the checks of its phase, and forget them.

        They are of builtin types: pytest-xdist sends nothing else to the controller. Unless
        ``explained``, what would explain the figures of checks that pass is left out.
        """
        error = call.excinfo.value if call.excinfo is not None else None
        settled = self.checked or self.traced or self.context.settings.disabled
        if call.when == "call" and report.passed and not settled:
            # The test asks for the fixture itself, and used it for nothing.
            function = getattr(self.item, "function", None)
            if function is not None and "torchmem" in inspect.signature(function).parameters:
                self.not_checked("never checked: nothing called torchmem.check", notice=UNUSED)
        self._failures = [one for one in self._failures if one is not error]
        checks, self._unsent = self._unsent, []
        if not checks:
            return
        by_check = isinstance(error, failure.MemoryCheckFailed)
        sent = [replace(check, result=check.result.light(explained=explained)) for check in checks]
        carried = {"checks": dumps(sent), "failed_by_check": by_check}
        report.torchmem = carried  # type: ignore[attr-defined]
        add_attached(self.item, report)
        crash = getattr(report.longrepr, "reprcrash", None)
        if isinstance(error, failure.MemoryCheckFailed) and crash is not None:
            # pytest's short summary and JUnit show the headline, which begins with the number: the
            # summary cuts lines at the terminal's width. pytest prints all of this message there in
            # CI and with ``-vv`` (``_get_line_with_reprcrash_message`` in ``_pytest/terminal.py``).
            # The section of the failure is made of ``reprtraceback``, which keeps the whole.
            crash.message = error.headline

    def not_checked(
        self, why: str, key: Key | None = None, notice: str = "", *, broke_off: bool = False
    ) -> None:
        """Record that nothing was checked, and why; ``notice`` is told at the end of the run."""
        result = CheckResult(key or Key(test_id(self.item))).unchecked()
        nodeid, where = node_id(self.item), self._location()
        self._keep(Check(nodeid, where, result, why, notice=notice, broke_off=broke_off))

    def trace_options(
        self, device: str, gpu: str | None, world: World | None = None
    ) -> dict[str, Any]:
        """Return what a trace on ``device`` is given where the test says nothing else."""
        values = self.budget.values or self.context.settings.values
        given: dict[str, Any] = {"device": device, "gpu": gpu, "values": values}
        if world is not None:
            given |= {"world_size": world.size, "rank": world.rank}
        if device == "cuda":
            allocator = self.context.settings.allocator
            calibration = self.context.calibrations.of(self.item.path)
            given |= {"allocator": allocator} if allocator else {}
            modelled = gpu or gpu_name(self.context.settings, self.budget, None)
            given["cudnn"] = self.context.calibrations.cudnn(self.item.path, modelled)
            given |= {"gpus": self.budget.gpus} if self.budget.gpus is not None else {}
            given |= {"calibration": calibration} if calibration is not None else {}
        return given

    @property
    def first_line(self) -> str:
        return f"{self.place}: MemoryCheckFailed"

    @property
    def place(self) -> str:
        path, line = self._first_line()
        return f"{path}:{line}"

    def _check_on(
        self, device: str, world: World | None, request: Request, target: CheckTarget
    ) -> tuple[CheckResult | None, MemoryProfile | None]:
        """Check on one device; of a program that runs on cuda alone nothing comes of the CPU."""
        gpu = request.gpu if device == "cuda" else ""
        size, rank = (world.size, world.rank) if world is not None else (0, 0)
        key = Key(request.test.id, request.name, device, gpu, "", size, rank)
        try:
            return DeviceCheck(key, request, target, self.context, world).run()
        except NoCudaError as error:
            chosen = request.devices_named or "cuda" not in request.devices
            if chosen or key in self._known_to_snapshot(request):
                self.not_checked(f"not checked: {error}", key)
                raise pytest.fail.Exception(str(error), pytrace=False) from None
            self.not_checked(
                f"not checked: {error}", key, "checked on cuda alone, which the program asks for"
            )
            return None, None
        except BaseException as error:
            why = f"not checked: {type(error).__name__} was raised"
            self.not_checked(why, key, RAISED, broke_off=True)
            raise

    def _on_cuda_alone(self, request: Request, on_cuda: str) -> Request:
        """Leave out the CPU, on which what a fixture made is not."""
        if "cuda" not in request.devices:
            why = f"not checked: already on cuda, which is not among the devices: {on_cuda}"
            self.not_checked(why, notice="not checked, because their fixtures are on cuda")
            pytest.skip(why)
        if "cpu" in request.devices:
            key = Key(request.test.id, request.name, "cpu", "")
            why = f"not checked on cpu: already on cuda: {on_cuda}"
            self.not_checked(why, key, "checked on cuda alone, where the fixtures are")
        return replace(request, devices=("cuda",))

    def _may_be_idle(self, request: Request) -> bool:
        """Whether a test need not allocate anything: its marker is that of a class or module.

        It has to where a snapshot says that it did. On cuda alone the device may be forgotten.
        """
        if not self.in_body or "cpu" not in request.devices:
            return False
        if any(node is self.item for node, _ in self.item.iter_markers_with_node(MARKER)):
            return False
        return not self._known_to_snapshot(request)

    def _known_to_snapshot(self, request: Request) -> set[Key]:
        """Return the keys of a test that its snapshot has figures for: there it ran before."""
        stored = stored_for(request, self.context)
        known = stored.entries if stored is not None else ()
        return {replace(key, torch_series="") for key in known if key.test == request.test.id}

    def _reported(self, result: CheckResult, *, idle_may_pass: bool) -> Check:
        text = what_to_do = notice = ""
        if result.findings:
            from pytest_torchmem.reports.text import advice, plain_message

            text = plain_message(result)
            path = relative(self.item.path, self.item.config.invocation_params.dir)
            what_to_do = advice(result, failure.update_command(path, test_id(self.item)))
        if idle_may_pass and result.figures.get("peak") == 0:
            result, notice = result.unchecked(), f"allocated nothing on {result.key.where}"
            text = f"not checked: {notice}"
        return Check(node_id(self.item), self._location(), result, text, what_to_do, notice)

    def _keep(self, check: Check) -> None:
        self.checked = True
        self._unsent.append(check)
        self.item.user_properties.extend(found := properties(check))
        attach(self.item, check, found)

    def _picture(self, check: Check, profile: MemoryProfile | None) -> None:
        """Write the page of a check that failed, where pages are asked for."""
        directory = self.context.settings.html_path
        if directory is None or profile is None or not check.result.failed:
            return
        from pytest_torchmem.reports.files import write_page

        try:
            write_page(directory, check, profile)
        except OSError as error:
            warning = pytest.PytestWarning(f"torchmem: a page cannot be written: {error}")
            self.item.warn(warning)

    def _checked_test(self) -> CheckedTest:
        item = self.item
        update = self.context.settings.update
        if update and item.get_closest_marker("xfail") is not None:
            # pytest evaluates conditions here and nowhere public.
            from _pytest.skipping import evaluate_xfail_marks

            # Of a test that is expected to fail the failure is what is wanted, so it fails in an
            # update as it does without one.
            update = update if evaluate_xfail_marks(item) is None else frozenset()

        return CheckedTest(
            id=test_id(item),
            module=item.path,
            root=item.config.rootpath,
            accepts=update,
            is_gone=lambda test: self._collection.is_gone(item, test),
            orphans=self._collection.orphans,
            functions=tuple(_functions_of(item)),
            on_profile=partial(item.ihook.pytest_torchmem_profile, item=item),
            on_comparison=partial(item.ihook.pytest_torchmem_compare, item=item),
        )

    def _stored_under_a_name(self, request: Request) -> Request:
        """Return a request that is stored if a later run finds it by the test's id and its name;
        raises ``UsageError`` for a snapshot that none would.
        """
        name, now = request.name, {self.standing.run_as(self.item)}
        if not now.isdisjoint(self._names.get(name, ())):
            again = f"with the name {name!r}" if name else "without a name"
            raise UsageError(
                f"{self.item.nodeid} calls torchmem.check twice {again}. Each check of a test "
                'needs its own name, which its snapshot is stored under: check(..., name="large '
                'batch")'
            )
        self._names.setdefault(name, set()).update(now)
        test = test_id(self.item)
        is_ambiguous = test in self._collection.ambiguous(self.item)
        has_address = _ADDRESS.search(test) is not None
        if not request.uses_snapshot:
            return replace(request, is_stored=not (is_ambiguous or has_address))
        if is_ambiguous:
            raise UsageError(
                f"two tests of this module have the id {test}, so a snapshot cannot tell them "
                "apart. Give their parameters ids: pytest.param(..., id=...)"
            )
        if has_address:
            self.item.warn(
                pytest.PytestWarning(
                    f"torchmem: the id {test} contains the address of an object, which changes "
                    "from run to run, so the next run will not find its snapshot. Give the "
                    "parameter an id: pytest.param(..., id=...)"
                )
            )
        return request

    def _location(self) -> tuple[str, int]:
        """Return the innermost line of the test's own file that is running, else its first."""
        path, line = self._first_line()
        frame, own = sys._getframe(), str(self.item.path)
        while frame is not None and frame.f_code.co_filename != own:
            frame = frame.f_back  # type: ignore[assignment]
        return path, line if frame is None or self.in_body else frame.f_lineno

    def _first_line(self) -> tuple[str, int]:
        line = (self.item.location[1] or 0) + 1
        return relative(self.item.path, self.item.config.rootpath), line


def _functions_of(item: pytest.Item) -> Iterator[Any]:
    """Yield a test's function and those of its fixtures, its parameters, and what its class has
    that runs before it or that it names.
    """
    function, kind = getattr(item, "function", None), getattr(item, "cls", None)
    names = (*_SET_UP, *getattr(getattr(function, "__code__", None), "co_names", ()))
    yield from (function, *(inspect.getattr_static(kind, name, None) for name in names))
    yield from getattr(getattr(item, "callspec", None), "params", {}).values()
    found = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})  # nowhere public
    yield from (one.func for definitions in found.values() for one in definitions)


_SET_UP = ("setUp", "setUpClass", "setup_class", "setup_method")
