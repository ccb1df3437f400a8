"""A directory with tests, and runs of pytest in it: forked from a process that has it all imported.

The profiler is a double, for which a model is a number of bytes: what is tried here is what becomes
of figures, files and outcomes.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DOUBLE = """
import json, os, sys, types
import pytest
from pytest_torchmem.profile.profile import MemoryProfile

def trace(target, *args, device="cpu", gpu=None, **kwargs):
    size = target() if callable(target) else target
    return MemoryProfile(
        device=device, gpu=gpu, host="reference" if device == "cpu" else None, baseline=size // 2,
        forward_peak=size, backward_peak=2 * size, optimizer_peak=None, peak=2 * size,
        retained=size, end=size, torch_version="2.13.0+cpu", workload=str(*args),
    )

import pytest_torchmem.checks.gpu
pytest_torchmem.checks.gpu.run_for_real = lambda *given: None
double = types.ModuleType("pytest_torchmem.tracing.trace")
double.trace = trace
sys.modules[double.__name__] = double

def pytest_runtest_logreport(report, open=open, dumps=json.dumps):  # tests may replace them
    said = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    with open(os.environ["HOSTILE_LOG"], "a") as file:
        file.write(dumps([report.nodeid, report.when, said]) + "\\n")
"""
_PATIENCE = 120.0
"""Seconds of processor time after which a run hangs, and seconds after which one does that uses
none: on a busy machine one that gets little may take long."""
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_UNUSED = (
    "cacheprovider", "doctest", "faulthandler", "junitxml", "legacypath", "logging",
    "pastebin", "setuponly", "setupplan", "stepwise",
)  # fmt: skip
"""Parts of pytest that no run uses, and that take a fifth of it to set up."""
_ALWAYS = (
    *("-p", "pytest_torchmem.plugin.hooks", "-q", "-s"),
    *(option for name in _UNUSED for option in ("-p", f"no:{name}")),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One run, over: its exit status (negative: the signal that ended it) and what it said."""

    status: int
    output: str
    outcomes: dict[str, str]
    """What became of each test."""


def status_of(pid: int) -> int:
    """Return the status of a process that this one has forked, when it has ended.

    Raises ``TimeoutError`` for one that does not end, which is killed.
    """
    used, since = 0.0, time.monotonic()
    while True:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(code)
        if time.monotonic() > since + _PATIENCE:
            before, used, since = used, _processor_time(pid), time.monotonic()
            if used > _PATIENCE or used == before:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise TimeoutError(f"no end after {used:.0f} s of processor time")
        time.sleep(0.002)


def _processor_time(pid: int) -> float:
    """Seconds that a process has used (proc(5), /proc/pid/stat: ``utime`` and ``stime``)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Running:
    """A run under way."""

    def __init__(self, pid: int, output: Path, log: Path) -> None:
        self.pid, self._output, self._log = pid, output, log

    def kill(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self) -> Result:
        """Return the result; raises ``TimeoutError`` for a run that does not end."""
        status = status_of(self.pid)
        outcomes: dict[str, str] = {}
        for line in self._log.read_text().splitlines() if self._log.exists() else ():
            test, _, said = json.loads(line)
            if outcomes.get(test, "passed") == "passed":
                outcomes[test] = said
        output = self._output.read_text(errors="replace")
        return Result(status, output, outcomes)


class Project:
    """A directory of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path / "project"
        self.path.mkdir(parents=True)
        self._runs = path
        self._number = 0
        (self.path / "pytest.ini").write_text("[pytest]\n")
        (self.path / "conftest.py").write_text(DOUBLE)

    def start(self, *options: str, **environment: str) -> Running:
        """Begin a run of pytest."""
        self._number += 1
        output, log = (self._runs / f"{kind}-{self._number}" for kind in ("output", "log"))
        output.touch()  # a signal may come before the run opens it
        sys.stdout.flush()
        # A signal that comes at once waits: it would end this function in the other process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            pid = os.fork()
            if not pid:
                self._run(options, {**environment, "HOSTILE_LOG": str(log)}, output)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Running(pid, output, log)

    def run(self, *options: str, **environment: str) -> Result:
        """Run pytest to its end."""
        return self.start(*options, **environment).wait()

    def _run(self, options: Sequence[str], environment: dict[str, str], output: Path) -> None:
        status = 70
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            for name in ("CI", "GITHUB_ACTIONS", "PYTEST_ADDOPTS"):
                os.environ.pop(name, None)
            os.environ.update(environment, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
            os.chdir(self.path)
            sys.dont_write_bytecode = True
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            status = int(pytest.main([*_ALWAYS, *options]))
        except BaseException:
            said = traceback.format_exc()
            print(said)
            if "KeyboardInterrupt" in said:  # before pytest began, or after it
                status = int(pytest.ExitCode.INTERRUPTED)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def file(self, module: str) -> Path:
        """Return the snapshot file of a module."""
        return self.path / "__torchmem__" / f"{module}.json"

    def files(self) -> dict[str, bytes]:
        """Return every file in the snapshots' directory."""
        found = self.path / "__torchmem__"
        return {f.name: f.read_bytes() for f in found.iterdir()} if found.is_dir() else {}

    def entries(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return every entry by module and test; raises ``ValueError`` for a broken file.

        What a killed run had not yet put in a snapshot's place is none.
        """
        return {
            (name.removesuffix(".json"), entry["test"]): entry
            for name, content in self.files().items()
            if name.endswith(".json")
            for entry in json.loads(content)["entries"]
        }


def trouble(result: Result) -> list[str]:
    """Return what no run may end with."""
    found = [
        f"{word} in the output" for word in ("INTERNALERROR", "KeyError:") if word in result.output
    ]
    if result.status not in (0, 1, 2, 5):
        found.append(f"status {result.status}")
    return found
