"""``--torchmem-measure=stand-in``: checks on cuda are measured by torch's own CUDA code first.

All tests of a process in which torch finds the stand-in's GPU would see a GPU whose kernels compute
nothing. So the run that was asked for stays as it is, and a process beside it runs the memory tests
with the same arguments, once for each GPU that checks name.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_torchmem.checks.gpu import Confirmations
from pytest_torchmem.errors import UsageError
from pytest_torchmem.plugin.collection import test_id
from pytest_torchmem.plugin.start import checks_memory
from pytest_torchmem.snapshots.location import relative
from pytest_torchmem.stand_in.environment import stand_in_environment
from pytest_torchmem.targets.gpus import find_gpu

_DIRECTORY = "TORCHMEM_STAND_IN_DIRECTORY"
_GPU = "TORCHMEM_STAND_IN_GPU"
_FINE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_GONE = "the process with the stand-in that ran the test is gone"
_MOST_SECONDS = 300
"""How long a test may take there: a loop that waits for a value would not end."""


def served_confirmations() -> Confirmations | None:
    directory = os.environ.get(_DIRECTORY)
    return Confirmations(Path(directory), os.environ[_GPU]) if directory else None


class ServingHooks:
    """The hooks of a process that measures: memory tests alone run, and all of them."""

    def __init__(self, config: pytest.Config, confirmations: Confirmations) -> None:
        self._confirmations = confirmations
        config.option.maxfail = 0
        config.option.usepdb = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what checks no memory, and what ended an earlier process."""
        begun = self._confirmations.has_begun
        items[:] = [one for one in items if checks_memory(one) and not begun(_name(one))]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._confirmations.begin(_name(item))
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        error = call.excinfo.value if call.excinfo is not None else None
        if error is not None:
            first = str(error).strip().partition("\n")[0]
            why = f"there, the test ended in {type(error).__name__}: {first}"
            self._confirmations.end(_name(item), why)
        elif call.when == "teardown" and not self._confirmations.ended(_name(item)):
            self._confirmations.end(_name(item), "")
        return (yield)


def _name(item: pytest.Item) -> str:
    return f"{relative(item.path, item.config.rootpath)}::{test_id(item)}"


def measure_beside(config: pytest.Config, gpu: str) -> Confirmations:
    """Run the memory tests of this run in processes with the stand-in; return what they measured.

    The first process has the GPU ``gpu``. Raises ``UsageError`` where there can be none, and where
    one ends before it has begun a test.
    """
    directory = tempfile.TemporaryDirectory(prefix="torchmem-stand-in-")
    config.add_cleanup(directory.cleanup)
    confirmations = Confirmations(Path(directory.name))
    gpus = [gpu]
    while gpus:
        for name in gpus:
            _measure_for(config, confirmations, name)
            confirmations.finish(name)
        gpus = confirmations.gpus()
    return confirmations


def _measure_for(config: pytest.Config, confirmations: Confirmations, gpu: str) -> None:
    environment = {
        **stand_in_environment(find_gpu(gpu)),
        _DIRECTORY: str(confirmations.directory),
        _GPU: gpu,
    }
    # The command of this run, without what it would write.
    command = [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
    if config.pluginmanager.hasplugin("cacheprovider"):
        command += ["-o", f"cache_dir={confirmations.directory / 'cache'}"]
    if getattr(config.option, "xmlpath", None):
        command += [f"--junitxml={confirmations.directory / 'junit.xml'}"]
    begun, why = 0, "not begun"
    while why:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                command,
                cwd=config.invocation_params.dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                why = _ending(process, confirmations)
            finally:
                with suppress(ProcessLookupError):  # with what it started
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            before, begun = begun, confirmations.lost(gpu, why or _GONE)
            if begun == before and begun:
                return
            if why and not begun:
                output.seek(0)
                last = ([line.strip() for line in output if line.strip()] or [""])[-1]
                raise UsageError(f"--torchmem-measure=stand-in, for {gpu}: {why}: {last}")


def _ending(process: subprocess.Popen[bytes], confirmations: Confirmations) -> str:
    """Wait for a process; return why it ended before its tests, "" if it did not."""
    started = time.time()
    while True:
        try:
            status = process.wait(0.5)
        except subprocess.TimeoutExpired:
            if time.time() - confirmations.last_sign(started) > _MOST_SECONDS:
                return (
                    f"the test takes more than {_MOST_SECONDS} s with the stand-in, where kernels "
                    "compute nothing: does it wait for a value?"
                )
            continue
        if status < 0:
            return f"the process with the stand-in was ended by {signal.Signals(-status).name}"
        return "" if status in _FINE else f"pytest ended with exit status {status} there"
