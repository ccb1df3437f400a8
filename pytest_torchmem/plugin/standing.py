"""Where pytest sees a fake GPU: while fixtures of memory tests are set up, or in all of a suite.

A fixture of a memory test that puts a model on cuda puts it on a GPU that stands from its set-up to
its teardown; the trace of the test counts what is there. Another test sees the machine as it is. So
a fixture that both kinds of tests use, and that depends on the GPU, is torn down and set up again
between them, as pytest does where its parameter is another.

With ``--torchmem-fake-cuda`` every test sees the GPU, and so does what is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_torchmem.checks import MARKER, VALUES_MODES
from pytest_torchmem.checks.request import Settings, Worlds, gpu_name, parse_choice
from pytest_torchmem.errors import UsageError, add_note
from pytest_torchmem.plugin.failure import MemoryCheckFailed
from pytest_torchmem.plugin.settings import budget_of
from pytest_torchmem.plugin.start import checks_memory, written_early
from pytest_torchmem.plugin.worlds import (
    StandingWorlds,
    VariablesRead,
    asks_for_world,
    find_torch,
    is_of_unittest,
    names_cuda,
    no_world,
    not_told,
    sees_anything,
    variables_noted,
)
from pytest_torchmem.printable import printable
from pytest_torchmem.targets.gpus import find_gpu, gpu_names
from pytest_torchmem.targets.world import World
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.interception.ledger import StorageRecord
    from pytest_torchmem.tracing.layers import StandingGpu


_Fixture = pytest.FixtureDef[Any]
_NAMES_CPU = (
    "the marker of the test names cpu alone, so its fixtures see no fake GPU. If one puts "
    'something on cuda, name that: memory_budget(..., device="cuda")'
)
#: What torch.cuda._lazy_init raises without CUDA, or without a GPU (torch/cuda/__init__.py, and
#: throwing functions of torch/csrc/cuda/Module.cpp and c10/cuda/CUDAFunctions.cpp), and
#: ``init_process_group`` (distributed_c10d.py, ProcessGroupNCCL.cpp).
_NO_CUDA = (
    "Torch not compiled with CUDA",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Distributed package doesn't have NCCL built in",
    "ProcessGroupNCCL is only supported with GPUs",
)


class Seen(NamedTuple):
    """The fake GPU that something sees."""

    gpu: str
    """Its name in the catalogue."""
    gpus: int = 1
    number: int = 0
    """Which of them is current from the beginning: in a world that of the process."""


_SEEN: pytest.StashKey[Seen | None] = pytest.StashKey()
_FOR_CPU = Seen("")
"""Instead of a GPU: the test's markers name none of its devices."""


@dataclass(slots=True, eq=False)
class SetUp:
    fixture: _Fixture
    request: pytest.FixtureRequest
    gpu: Seen | None
    """The fake GPU that it saw; ``None``: the machine as it is."""
    depends: bool = False
    """It would be another where there is another GPU, or none."""
    on_cuda: bool = False
    """It put tensors on the GPU, or is its name."""
    records: list[StorageRecord] = field(default_factory=list)
    """What it put there."""
    world: World | None = None
    in_world: bool = False
    """It would be another in another world, or none."""
    holds_reducer: bool = False
    """It is a model in ``DistributedDataParallel``, which can be traced once."""
    traced: bool = False
    """A check of a test that uses it was made since."""
    asked_in_vain: str = ""
    """The line that asked which process it is in, where that was not known."""


class StandingGpus:
    """The fake GPUs of one run, the fixtures that saw them, and the hooks by which they do."""

    def __init__(
        self,
        settings: Settings,
        merged: Callable[[pytest.Item, Sequence[MemoryCheckFailed]], MemoryCheckFailed],
        suite: StandingGpu | None = None,
    ) -> None:
        self._settings = settings
        self._merged = merged
        """Makes one failure of those of several ranks."""
        self._suite = suite
        self._gpus: dict[Seen, StandingGpu] = {}
        self._set_up: dict[int, SetUp] = {}
        self._tests: dict[tuple[str, Seen], tuple[int, ...]] = {}
        """How much had been made on a GPU before a test, by the test's id."""
        self._one_by_one: pytest.Item | None = None
        """The test that is run as one of its processes after the other."""
        self._real: bool | None = None
        self._worlds = StandingWorlds(settings)

    # -- who sees which GPU ------------------------------------------------------------------------

    def seen_by(self, item: pytest.Item) -> Seen | None:
        """Return the fake GPU that a test's fixtures see, which is that of the process."""
        if self._suite is not None:
            return Seen(self._suite.gpu)
        seen = self._seen_by(item)
        if seen is None or seen == _FOR_CPU:
            return None
        world = self._worlds.of(item)
        return Seen(seen.gpu, world.per_node, world.local_rank) if world is not None else seen

    def _is_for_cpu(self, item: pytest.Item) -> bool:
        """Tell whether a test's fixtures see no GPU because its markers name devices without."""
        return self._suite is None and self._seen_by(item) == _FOR_CPU

    def _seen_by(self, item: pytest.Item) -> Seen | None:
        if _SEEN not in item.stash:
            item.stash[_SEEN] = self._gpu_of(item)
        return item.stash[_SEEN]

    def _gpu_of(self, item: pytest.Item) -> Seen | None:
        if self._settings.disabled or not checks_memory(item) or not sees_anything(item):
            return None
        if self._fixtures_are_real():
            return None
        try:
            budget = budget_of(item)
        except UsageError:  # the check says so
            return None
        if budget.devices is not None and "cuda" not in budget.devices:
            return _FOR_CPU  # its traces have no GPU: a fixture is to choose what they have
        return Seen(gpu_name(self._settings, budget, None), budget.gpus or 1)

    def standing(self, seen: Seen) -> StandingGpu:
        if self._suite is not None:
            return self._suite
        if seen not in self._gpus:
            from pytest_torchmem.tracing.layers import StandingGpu

            limited = self._settings.gpu_named or seen.gpu != self._settings.gpu
            self._gpus[seen] = StandingGpu(
                seen.gpu,
                allocator=self._settings.allocator,
                limited=limited,
                values=self._settings.values,
                gpus=seen.gpus,
                index=seen.number,
            )
        return self._gpus[seen]

    def seen(self, item: pytest.Item) -> AbstractContextManager[object]:
        gpu = self.seen_by(item)
        return self.standing(gpu).on() if gpu is not None else nullcontext()

    def _fixtures_are_real(self) -> bool:
        """Whether checks run on a real GPU, or not at all, as where there is no torch."""
        if self._real is None:
            self._real = find_torch() is None
            if not self._real and self._settings.measure != "never":
                from pytest_torchmem.torch_private.devices import has_gpu

                self._real = has_gpu()
        return self._real

    # -- one test ----------------------------------------------------------------------------------

    def _note_begin(self, item: pytest.Item) -> None:
        gpu = self.seen_by(item)
        if gpu is not None:
            self._tests.setdefault((item.nodeid, gpu), self.standing(gpu).booked)

    def _finish(self, item: pytest.Item, is_spent: Callable[[SetUp], bool]) -> bool:
        """Tear down what a test uses, and what would be another now; return if there was any."""
        gpu, world = self.seen_by(item), self._world_of(item)
        names = getattr(item, "fixturenames", ())
        done = False
        for found in tuple(self._set_up.values()):
            asked = found.fixture.argname in names or "request" in names
            other = found.depends and found.gpu != gpu
            other = other or (found.in_world and found.world != world)
            if asked and (other or is_spent(found)) and id(found.fixture) in self._set_up:
                found.fixture.finish(found.request)  # type: ignore[arg-type]
                done = True
        return done

    def end(self, item: pytest.Item) -> None:
        """Forget what is gone; tensors that nobody is to hold any more read as nan."""
        self._worlds.end(item)
        used = [seen for node, seen in self._tests if node == item.nodeid]
        for seen in used:
            del self._tests[item.nodeid, seen]
            standing = self.standing(seen)
            standing.cut()
            if (
                self._suite is None
                and standing.hollow()
                and not any(found.gpu == seen and found.depends for found in self._set_up.values())
            ):
                del self._gpus[seen]
                standing.close()

    # -- a test of several processes ---------------------------------------------------------------

    def processes(self, item: pytest.Item) -> tuple[World, ...]:
        """Return the processes that a test is run as; none where its fixtures are the same."""
        worlds = self._worlds.all_of(item)
        if len(worlds) < 2 or self._world_of(item) is None:
            return ()
        goes_by_rank = any(one.in_world or one.on_cuda for one in self._used_by(item))
        return worlds if goes_by_rank else ()

    def run_as(self, item: pytest.Item) -> World | None:
        """Return the process that a test is run as, ``None`` where it is run once for all."""
        return self._worlds.of(item) if self._one_by_one is item else None

    def traced_now(self, item: pytest.Item, worlds: Worlds) -> Worlds:
        """Return which of the processes of a check are to be traced now."""
        now = self.run_as(item)
        if now is None:
            return worlds
        own = [one for one in worlds if one and (one.size, one.rank) == (now.size, now.rank)]
        return tuple(own) or worlds

    def _become(self, item: pytest.Function, world: World) -> None:
        """Let a test be another of its processes, with fixtures of its own."""
        self._worlds.become(item, world)
        with self.seen(item):
            self._note_begin(item)
            self._finish(item, lambda found: False)
            _fill(item)

    @contextmanager
    def running(self, item: pytest.Item) -> Iterator[None]:
        """Let a test see the GPU that its fixtures put anything on; traces have their own.

        It is in the world in which they have made a process group.
        """
        sees = self._suite is not None or is_of_unittest(item) or self.on_cuda(item)
        with self.seen(item) if sees else nullcontext():
            world = self._world_of(item)
            with self._worlds.on(world if self._worlds.group(world)[0] else None):
                yield

    def renew(self, item: pytest.Item) -> bool:
        """Set up anew what can be traced once and was; return whether there was any."""
        if not isinstance(item, pytest.Function):
            return False
        with self.seen(item):
            renewed = self._finish(item, lambda found: found.holds_reducer and found.traced)
            if renewed:
                _fill(item)
        for found in self._used_by(item):
            found.traced = True
        return renewed

    def presented(self, item: pytest.Item) -> AbstractContextManager[object]:
        """Let a trace of the test's body count what is on the GPU before it."""
        if (gpu := self.seen_by(item)) is None:
            return nullcontext()
        return self.standing(gpu).presenting(self.present(item))

    def present(self, item: pytest.Item) -> list[StorageRecord]:
        """Return what the fixtures of a test put on the GPU, and what it did before its body."""
        gpu = self.seen_by(item)
        if gpu is None:
            return []
        found = self.standing(gpu).live(self._tests.get((item.nodeid, gpu), ()))
        known = {id(record) for record in found}
        for set_up in self._of(item):
            found += [record for record in set_up.records if id(record) not in known]
        return found

    def on_cuda(self, item: pytest.Item) -> str:
        """Return the names of what of a test is on cuda before its body runs, "" for nothing."""
        names = {set_up.fixture.argname for set_up in self._of(item) if set_up.on_cuda}
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        names |= {name for name, value in parameters.items() if names_cuda(value)}
        if names:
            return ", ".join(sorted(names))
        return "setUp" if is_of_unittest(item) and self.present(item) else ""

    def _world_of(self, item: pytest.Item) -> World | None:
        world = self._worlds.of(item)
        if self._suite is not None and world is not None:
            return world if world.local_rank == 0 else None  # its tests put everything on cuda:0
        return world if self._seen_by(item) is not None else None

    def refuse_other_worlds(self, item: pytest.Item, worlds: Sequence[World | None]) -> None:
        """Raise ``UsageError`` if a fixture goes by another process than these, which are traced.

        A program that is one process to its fixtures and another to its trace has figures of
        neither.
        """
        for found in self._used_by(item):
            name = found.fixture.argname
            for world in filter(None, worlds):
                if found.world is None and found.asked_in_vain:
                    raise UsageError(f"{found.asked_in_vain}: {not_told(name)}")
                there = found.world if found.in_world else None
                if there and (there.size, there.rank) != (world.size, world.rank):
                    raise UsageError(
                        f"the fixture {name!r} was set up as {there}, and the check is of {world}: "
                        f"name one world and all ranks, in the marker {MARKER} or in the options"
                    )

    def _of(self, item: pytest.Item) -> list[SetUp]:
        gpu = self.seen_by(item)
        return [found for found in self._used_by(item) if found.gpu == gpu]

    def _used_by(self, item: pytest.Item) -> list[SetUp]:
        """Return what is set up for a test, whichever GPU it saw."""
        names = getattr(item, "fixturenames", ())
        return [
            found
            for found in self._set_up.values()
            if found.fixture.argname in names or found.request.node is item
        ]

    # -- one fixture -------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: _Fixture, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        """Follow what a fixture does as it is set up, and let its teardown see the same GPU."""
        fixture, item = fixturedef, request._pyfuncitem
        gpu = self.seen_by(item)
        traced = checks_memory(item) and (gpu is not None or self._is_for_cpu(item))
        of_machine = gpu is None and not traced
        if of_machine and (fixture.scope == "function" or self._fixtures_are_real()):
            return (yield)
        from pytest_torchmem.fake_cuda.api.session import questions_noted

        world = self._world_of(item)
        found = self._set_up[id(fixture)] = SetUp(fixture, request, gpu, world=world)
        teardown = ExitStack()
        fixture.addfinalizer(teardown.close)  # of all finalizers the last
        standing = None if gpu is None else self.standing(gpu)
        before = () if standing is None else standing.booked
        group, times = self._worlds.group(world)
        failed, read = True, VariablesRead()
        try:
            with questions_noted() as asked, self._worlds.on(world), variables_noted() as read:
                value = yield
            failed = False
            return value
        except (KeyError, ValueError) as error:
            if not traced or not asks_for_world(error):
                raise
            instead = no_world(fixture, item, error)
            # The next test that uses the fixture gets what is kept.
            if fixture.cached_result is not None:
                fixture.cached_result = (None, fixture.cached_result[1], (instead, None))
            raise instead from None
        finally:
            if standing is not None:
                found.records = standing.live(before)
            result = (fixture.cached_result or (None,))[0]
            found.on_cuda = gpu is not None and (bool(found.records) or names_cuda(result))
            found.depends = failed or bool(asked) or found.on_cuda
            found.depends = found.depends or any(
                one.depends and one.fixture.argname in fixture.argnames
                for one in self._set_up.values()
                if one.gpu == gpu
            )
            made, times_now = self._worlds.group(world)
            made = None if made is group else made
            found.in_world = made is not None or bool(read.names) or times_now > times
            found.asked_in_vain = read.in_vain
            if found.in_world:
                from pytest_torchmem.interception.split_modules import holds_reducer

                found.holds_reducer = holds_reducer(result)
                teardown.callback(self._worlds.end_group, world, made)
                fixture.addfinalizer(lambda: teardown.enter_context(self._worlds.on(world)))
            if standing is not None and found.depends:
                fixture.addfinalizer(lambda: teardown.enter_context(standing.on()))

    def pytest_fixture_post_finalizer(self, fixturedef: _Fixture) -> None:
        self._set_up.pop(id(fixturedef), None)

    def pytest_unconfigure(self) -> None:
        self._worlds.close()
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()

    # -- the run of a test -------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Set up with the GPU; conditions of ``skipif`` that are texts are worked out with it.

        What the test shares with tests that see another GPU, or none, is torn down before.
        """
        with self.seen(item):
            self._worlds.begin(item)
            self._note_begin(item)
            self._finish(item, lambda found: found.holds_reducer and found.traced)
            try:
                return (yield)
            except (AssertionError, RuntimeError) as error:
                told = _NAMES_CPU in getattr(error, "__notes__", ())  # pytest keeps it for others
                if self._is_for_cpu(item) and str(error).startswith(_NO_CUDA) and not told:
                    add_note(error, _NAMES_CPU)
                raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        with self.running(item):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Print variables of a test that failed while tensors can say where they are."""
        with ExitStack() as stack:
            if call.excinfo is not None:
                with suppress(Exception):  # raised here, it would end the run
                    if self._suite is not None or self.seen_by(item) in self._gpus:
                        stack.enter_context(self.seen(item))
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Tear down with the GPU; without it where it cannot be switched on, and then fail.

        A fixture that is not torn down stays for the tests that follow, which pytest then refuses.
        """
        failure: Exception | None = None
        try:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self.seen(item))
                except Exception as error:
                    failure = error
                yield
        finally:
            self.end(item)
        if failure is not None:
            raise failure

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        """Run a test once as each of its processes, as launchers do, if its fixtures ask for that.

        Between two of them fixtures that go by the process are torn down and set up again.
        """
        if self._one_by_one is pyfuncitem:
            return (yield)
        worlds = self.processes(pyfuncitem)
        if not worlds:
            return (yield)
        failed: list[MemoryCheckFailed] = []
        result, self._one_by_one = None, pyfuncitem
        try:
            for world in worlds:
                try:
                    if world is worlds[0]:
                        result = yield
                        continue
                    self._become(pyfuncitem, world)
                    with self.running(pyfuncitem):
                        pyfuncitem.ihook.pytest_pyfunc_call(pyfuncitem=pyfuncitem)
                except MemoryCheckFailed as error:
                    failed.append(error)
                except Exception as error:
                    add_note(error, f"(the test ran as {world})")
                    raise
        finally:
            self._one_by_one = None
        if failed:
            raise self._merged(pyfuncitem, failed)
        return result


def _fill(item: pytest.Function) -> None:
    """Set up what a test uses and is not set up, and let it have that."""
    item._initrequest()  # pytest-rerunfailures does so, too
    item.setup()


_PEAK = "torchmem.allocated_peak"
_OUT_OF_MEMORY = "torchmem.out_of_memory"
"""Names of properties that reports of tests carry, JUnit's too."""
_MOST = 10
_SMALLEST = 3

_GPU: pytest.StashKey[StandingGpu] = pytest.StashKey()


def gpu_of(config: pytest.Config, name: str) -> StandingGpu:
    """Return the GPU that the suite sees, made when first asked for; it is gone after the run.

    Raises ``UsageError`` for one that is not known, or not yet: a ``conftest.py`` may add it.
    """
    if _GPU not in config.stash:
        found = find_gpu(name).name
        try:
            from pytest_torchmem.tracing.layers import StandingGpu
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise UsageError(
                "--torchmem-fake-cuda: torch is not installed in this environment"
            ) from None
        values = written_early(config, "torchmem_values") or VALUES_MODES[0]
        gpu = config.stash[_GPU] = StandingGpu(
            found,
            allocator=written_early(config, "torchmem_allocator"),
            limited=True,
            values=parse_choice(values, "torchmem_values", VALUES_MODES),
            of_suite=True,
        )
        config.add_cleanup(gpu.close)
    return config.stash[_GPU]


class SuiteHooks:
    """Where a suite sees the GPU: while modules are collected, and in every test."""

    def __init__(self, gpu: StandingGpu) -> None:
        self._gpu = gpu
        self._peaks: dict[str, int] = {}
        """The most that each test allocated, in all processes of a run."""
        self._too_large: dict[str, None] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        with self._gpu.on():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Switch on once for all phases of a test, reports of them included."""
        with self._gpu.on():
            self._gpu.begin_peak()
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Note what a test allocated where the controller of several processes finds it."""
        from torch import OutOfMemoryError

        if call.excinfo is not None and call.excinfo.errisinstance(OutOfMemoryError):
            item.user_properties.append((_OUT_OF_MEMORY, self._gpu.gpu))
        if call.when == "teardown":
            item.user_properties.append((_PEAK, self._gpu.allocated_peak))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            noted = dict(report.user_properties)
            self._peaks[report.nodeid] = max(int(str(noted.get(_PEAK, 0))), 0)
            if _OUT_OF_MEMORY in noted:
                self._too_large[report.nodeid] = None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show the largest tests, those that do not fit, and the GPUs on which all would."""
        peaks = sorted(self._peaks.items(), key=lambda test: -test[1])
        if not peaks or not peaks[0][1]:
            return
        terminalreporter.section(f"largest tests on cuda ({self._gpu.gpu}), allocated bytes")
        for test, nbytes in peaks[:_MOST]:
            if nbytes:
                terminalreporter.write_line(f"{format_size(nbytes):>10}  {printable(test)}")
        for test in self._too_large:
            terminalreporter.write_line(f"out of memory: {printable(test)}")
        if not self._too_large:
            terminalreporter.write_line(_where_all_fit(peaks[0][1]))


def _where_all_fit(nbytes: int) -> str:
    gpus = [find_gpu(name) for name in gpu_names()]
    enough = sorted(
        (gpu for gpu in gpus if gpu.memory - gpu.context >= nbytes),
        key=lambda gpu: (gpu.memory, gpu.name),
    )
    if not enough:
        return "the largest test fits on no GPU of the catalogue"
    smallest = ", ".join(f"{gpu.name} ({format_size(gpu.memory)})" for gpu in enough[:_SMALLEST])
    number = f"{len(enough)} of the {len(gpus)} GPUs of the catalogue"
    return f"every test fits on {number}, the smallest: {smallest}"
