"""``--torchmem-fake-cuda``: a whole suite as if a GPU were there, whatever its tests are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_torchmem.checks.defaults import VALUES_MODES
from pytest_torchmem.checks.settings import parse_values
from pytest_torchmem.errors import UsageError
from pytest_torchmem.printable import printable
from pytest_torchmem.targets.gpus import find_gpu, gpu_names
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.tracing.layers import StandingGpu

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
        given = config.known_args_namespace
        written = getattr(given, "torchmem_allocator", None)
        allocator = written or config.getini("torchmem_allocator") or ""
        values = getattr(given, "torchmem_values", None) or config.getini("torchmem_values")
        gpu = config.stash[_GPU] = StandingGpu(
            found,
            allocator=str(allocator),
            limited=True,
            values=parse_values(values or VALUES_MODES[0], "torchmem_values"),
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
        """Tests that ran out of memory."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        """Import tests, and select them, with the GPU."""
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
        """Take over what a test allocated."""
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
    """Return in a sentence on which GPUs of the catalogue a process with a peak fits."""
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
