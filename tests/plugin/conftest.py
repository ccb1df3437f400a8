"""Projects for whole pytest runs: a small model whose width the test chooses."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import torch._dynamo  # noqa: F401

import pytest_torchmem.measurement.calibrate
import pytest_torchmem.plugin.fixture
import pytest_torchmem.plugin.settings
import pytest_torchmem.reports.files
import pytest_torchmem.reports.summary
import pytest_torchmem.reports.terminal  # noqa: F401
from pytest_torchmem.checks import gpu as measuring
from pytest_torchmem.measurement import device as devices
from pytest_torchmem.snapshots.calibration import load
from pytest_torchmem.targets.gpus import Setup, WorkspaceKey, WorkspaceSize
from pytest_torchmem.tracing.trace import trace
from tests.measurement.stand_in import StandIn

MODEL = """
import os
import pytest
import torch
from torch import nn

def width():
    return int(os.environ.get("WIDTH", 64))

def make():
    return nn.Sequential(nn.Linear(8, width()), nn.ReLU(), nn.Linear(width(), 2))

def inputs():
    return torch.zeros(4, 8)
"""

CONVOLUTIONS = """
import pytest
import torch
from torch import nn

def net(width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())

def image(size=32):
    return torch.zeros(2, 3, size, size)
"""

TWO_TESTS = """
from model import *

def test_first(torchmem):
    torchmem.check(make(), inputs())

def test_second(torchmem):
    torchmem.check(make(), inputs(), name="named", device="cpu")
"""


# hypothesis would be imported, in each of these runs anew, to print its statistics. Tests run as
# they are written, one after the other; a run that is about another order names its plugin.
PLAIN = ("-p", "no:hypothesispytest", "-p", "no:randomly")
NO_CACHE = ("-p", "no:cacheprovider")


class _ModuleKeeper:
    """Keeps what runs in this process import, which pytester forgets: torch has to stay."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        for name, module in sys.modules.items():
            file = getattr(module, "__file__", None)
            if file and not file.startswith(str(config.rootpath)):
                self._modules.setdefault(name, module)

    def put_back(self) -> None:
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)


@pytest.fixture(scope="session")
def keeper() -> _ModuleKeeper:
    """What keeps imported modules from run to run."""
    return _ModuleKeeper()


@pytest.fixture(autouse=True)
def _modules_stay(keeper: _ModuleKeeper) -> Iterator[None]:
    """Put back, once ``pytester`` has forgotten them, what later tests would import anew."""
    yield
    keeper.put_back()


class Result(pytest.RunResult):
    """What a run of pytest came to."""

    @classmethod
    def of(cls, run: pytest.RunResult, outcomes: dict[str, int]) -> "Result":
        """Return the result of a run, whose outcomes are these and no others, if any are given."""
        if outcomes:
            run.assert_outcomes(**outcomes)
        return cls(run.ret, run.outlines, run.errlines, run.duration)

    def tells(self, *lines: str) -> "Result":
        """Expect these lines, in which ``*`` is anything, one after the other in the output."""
        self.stdout.fnmatch_lines(lines)
        return self

    def fails(self, *lines: str) -> None:
        """Expect a run that failed, whatever became of its tests, and these lines."""
        assert self.ret == pytest.ExitCode.TESTS_FAILED
        self.tells(*lines)

    def is_refused(self, line: str) -> None:
        """Expect a run that ended before its tests, with this line."""
        assert self.ret == pytest.ExitCode.USAGE_ERROR
        self.stderr.fnmatch_lines([line])


def checking(call: str, *, name: str = "it", head: str = "", over: str = "") -> str:
    """Return the source of a test that checks with the fixture, for each ``n`` if ``over`` any."""
    each, n = (f"@pytest.mark.parametrize('n', {over})\n", ", n") if over else ("", "")
    test = f"def test_{name}(torchmem{n}):\n    torchmem.check({call})\n"
    return f"import os, pytest\n{head}{each}{test}"


def git(folder: Path, *words: str) -> None:
    """Run git for a user that needs no configuration of the machine's."""
    who = ("user.name=me", "user.email=me@example.com", "commit.gpgsign=false")
    options = (word for one in who for word in ("-c", one))
    subprocess.run(["git", *options, *words], cwd=folder, check=True, capture_output=True)


def valid(data: Any, schema: str) -> Any:
    """Return data that keeps to a published schema."""
    path = Path(__file__).parents[2] / "docs" / f"{schema}.schema.json"
    jsonschema.validate(data, json.loads(path.read_text()))
    return data


class Project:
    """A directory with tests, run by pytest in this process or in another."""

    def __init__(self, pytester, monkeypatch, keeper):
        self.pytester = pytester
        self._keeper = keeper
        self.path = pytester.path
        self._monkeypatch = monkeypatch
        pytester.makepyfile(model=MODEL)
        monkeypatch.syspath_prepend(self.path)

    def write(self, test_net: str | None = None, **files: str) -> None:
        """Write test modules, by name without ``.py``."""
        if test_net is not None:
            files["test_net"] = test_net
        for name, text in files.items():
            (self.path / f"{name}.py").write_text(dedent(text))

    def width(self, width: int) -> None:
        self._monkeypatch.setenv("WIDTH", str(width))

    def _outcomes(self, given: dict[str, int | str]) -> dict[str, int]:
        """Write the modules that a run is given, and return the outcomes that it has to have."""
        self.write(**{name: text for name, text in given.items() if isinstance(text, str)})
        return {name: number for name, number in given.items() if isinstance(number, int)}

    def run(self, *options: str, cache: bool = False, **given: int | str) -> Result:
        """Run pytest in this process; ``cache`` keeps what ``--lf`` needs."""
        outcomes, plain = self._outcomes(given), (*PLAIN, *(() if cache else NO_CACHE))
        self._keeper.put_back()
        run = self.pytester.runpytest_inprocess(*plain, *options, plugins=[self._keeper])
        return Result.of(run, outcomes)

    def run_apart(self, *options: str, **given: int | str) -> Result:
        """Run pytest in a process of its own."""
        outcomes = self._outcomes(given)
        return Result.of(self.pytester.runpytest_subprocess(*PLAIN, *NO_CACHE, *options), outcomes)

    def checks(self, *options: str, **given: int | str) -> tuple[Result, list[dict[str, Any]]]:
        """Run pytest; return the result, and the checks of its JSON report, which is valid."""
        sys.modules.pop("model", None)  # which a test may have written
        result = self.run("--torchmem-json=report.json", *options, **given)
        return result, valid(json.loads(self.read("report.json")), "report")["checks"]

    def ini(self, *lines: str) -> None:
        (self.path / "pytest.ini").write_text("\n".join(["[pytest]", *lines, ""]))

    def read(self, name: str) -> str:
        return (self.path / name).read_text()

    def file(self, module: str = "test_net") -> Path:
        return self.path / "__torchmem__" / f"{module}.json"

    @contextmanager
    def unchanged(self, module: str = "test_net") -> Iterator[None]:
        """Expect that what runs meanwhile leaves a snapshot file as it was."""
        before = self.file(module).read_bytes()
        yield
        assert self.file(module).read_bytes() == before

    def entries(self, module: str = "test_net") -> dict[str, dict[str, Any]]:
        """Return a module's entries by test, name and device."""
        return {_name(one): one for one in json.loads(self.file(module).read_text())["entries"]}

    def calibration(self) -> dict[Setup, dict[WorkspaceKey, WorkspaceSize]]:
        """Return the figures of the calibration file."""
        text = self.file("gpu-calibration").read_text()
        valid(json.loads(text), "calibration")
        return load(text)

    def edit(self, key: str, module: str = "test_net", **values: Any) -> None:
        """Write values into one entry by hand."""
        data = json.loads(self.file(module).read_text())
        for entry in data["entries"]:
            if _name(entry) == key:
                entry.update(values)
        self.file(module).write_text(json.dumps(data))


def _name(entry: dict[str, str]) -> str:
    return " ".join(filter(None, [entry["test"], entry.get("name", ""), entry["device"]]))


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs behave as on a developer's machine, wherever these tests run."""
    for name in ("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITLAB_CI", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs behave as on a machine without a GPU, wherever these tests run."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _no_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave cuBLAS without its 8 MiB, beside which these tests' models would be nothing."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")


@pytest.fixture
def project(pytester, monkeypatch, keeper) -> Project:
    """An empty project with the module ``model``."""
    return Project(pytester, monkeypatch, keeper)


@pytest.fixture
def stored(project: Project) -> Project:
    """A project with two tests and their snapshots."""
    project.write(test_net=TWO_TESTS)
    project.run("--torchmem-update").assert_outcomes(passed=2)
    return project


@pytest.fixture
def there_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandIn], StandIn]:
    """A function that lets a stand-in be the GPU that is there."""

    def put(found: StandIn) -> StandIn:
        monkeypatch.setattr(devices, "cuda_device", lambda: found)
        return found

    return put


# Where a test is about files and processes, and not about memory, its runs use this double of the
# profiler: the "model" is a number of bytes, and no worker has to import torch.
DOUBLE = """
import sys, types
from pytest_torchmem.profile.profile import MemoryProfile

def trace(target, *args, device="cpu", gpu=None, **kwargs):
    size = target() if callable(target) else target
    return MemoryProfile(
        device=device, gpu=gpu, host="reference" if device == "cpu" else None, baseline=size // 2,
        forward_peak=size, backward_peak=2 * size, optimizer_peak=None, peak=2 * size,
        retained=size, end=size, torch_version="2.13.0+cpu", workload="w",
    )

import pytest_torchmem.checks.gpu
import pytest_torchmem.plugin.fixture, pytest_torchmem.plugin.standing
pytest_torchmem.checks.gpu.run_for_real = lambda *given: None
if "torch" not in sys.modules:
    pytest_torchmem.checks.gpu.Calibrations.measure = lambda *given: None
    state = types.SimpleNamespace(restore=lambda: None)
    pytest_torchmem.plugin.fixture._state_of = lambda *given: state
    pytest_torchmem.plugin.standing.find_torch = lambda: None

double = types.ModuleType("pytest_torchmem.tracing.trace")
double.trace = trace
sys.modules[double.__name__] = double
"""


@pytest.fixture
def light(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose runs use the double of the profiler."""
    monkeypatch.setitem(sys.modules, trace.__module__, sys.modules[trace.__module__])
    monkeypatch.setattr(measuring, "run_for_real", measuring.run_for_real)
    project.write(conftest=DOUBLE)
    return project
