"""One program in a process of its own: for real on the CPU, traced, or as a test of pytest.

``run.py`` starts it and sets limits; ``result.json`` says how it ended.
"""

import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from benchmarks.programs_of_others.data import write
from benchmarks.programs_of_others.lines import Counts, executed_lines
from benchmarks.programs_of_others.manifest import Entry

GPU = "a100-80gb"


class EnoughSteps(BaseException):
    """The program has made as many optimizer steps as the manifest asks for."""


def main(entry: Entry, mode: str, files: Path, work: Path, options: dict[str, Any]) -> None:
    """Run the program in the folder ``work``, and write down there how it ended."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as usual, for loaders' workers
    with (work / "log.txt").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable(file=open(2, "w", closefd=False))  # noqa: SIM115
    try:
        program, folders = prepare(entry, files, work / "run", mode)
        result, lines = outcome(program, entry, folders, mode, options)
    except BaseException as error:
        result, lines = how_it_failed(error), {}
    (work / "result.json").write_text(json.dumps({**result, "lines": lines}), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the program do not keep the process


def outcome(
    program: Callable[[], None], entry: Entry, folders: tuple[str, ...], mode: str, options: Any
) -> tuple[dict[str, Any], Counts]:
    """Run the program, and return how it ended and which lines it executed."""
    torch.manual_seed(0)
    started = time.monotonic()
    result: dict[str, Any] = {"ended": "ok"}
    lines: Counts = {}
    try:
        if entry.suite:
            result.update(suite(entry.suite, mode))
        elif mode == "pytest":
            result.update(as_a_test(program))
        else:
            script = sys.argv[0]

            def recorded() -> None:
                with executed_lines(folders, script) as counts:
                    program()
                lines.clear()  # a trace may run the program again: its last run counts
                lines.update(relative(counts))

            result["figures"] = run(recorded if entry.compare else program, entry, mode, options)
    except BaseException as error:
        result.update(how_it_failed(error))
    result["seconds"] = time.monotonic() - started
    return result, lines


def prepare(
    entry: Entry, files: Path, work: Path, mode: str
) -> tuple[Callable[[], None], tuple[str, ...]]:
    """Return the program as a function of nothing, and the folders of its author's files."""
    folder = work / entry.folder if entry.driver else files / entry.folder
    if not entry.driver:
        # Programs write beside themselves: each run has its own copy.
        import shutil

        shutil.copytree(files, work / "files", ignore=shutil.ignore_patterns("__pycache__"))
        files = work / "files"
        folder = files / entry.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for name in entry.data:
        write(name)
    for package in entry.packages:
        importlib.import_module(package)
    if entry.driver:
        module, _, name = entry.driver.partition(":")
        if not entry.source.is_package:
            sys.path.insert(0, str(files))
        driver = getattr(
            importlib.import_module(f"benchmarks.programs_of_others.drivers.{module}"), name
        )
        program = driver(*entry.parameters)
        folders = (str(files),)
        if entry.source.is_package:
            found = importlib.import_module(entry.source.package.replace("-", "_"))
            folders = (str(Path(str(found.__file__)).parent) + os.sep,)
    elif entry.suite:
        return lambda: None, ()  # pytest runs it
    else:
        arguments = entry.arguments
        if not mode.startswith("cuda"):
            arguments = tuple(word.replace("cuda", "cpu") for word in arguments)
        script = files / entry.script
        for path in script.parent.iterdir():  # its own modules, where packages have their names
            if path.suffix == ".py" or path.is_dir():
                for name in list(sys.modules):
                    if name == path.stem or name.startswith(path.stem + "."):
                        del sys.modules[name]
        sys.argv = [str(script), *arguments]
        program = functools.partial(run_script, script)
        folders = (str(files),)
    return functools.partial(seeded, program, entry.steps), folders


def run_script(script: Path) -> None:
    """Run a script as ``python script`` does, with the arguments that ``sys.argv`` has."""
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (0, None):
            raise RuntimeError(f"the program ended with exit code {end.code}") from None


def seeded(program: Callable[[], None], steps: int | None) -> None:
    """Run the program from one seed, for as many optimizer steps as asked."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    with ExitStack() as stack:
        if steps is not None:
            stack.enter_context(ended_after(steps))
        with suppress(EnoughSteps):
            program()


@contextmanager
def ended_after(steps: int) -> Iterator[None]:
    """End the program after so many optimizer steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    made = 0

    def hook(*arguments: Any) -> None:
        nonlocal made
        made += 1
        if made >= steps:
            raise EnoughSteps

    handle = register_optimizer_step_post_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def relative(counts: Counts) -> Counts:
    """Return the counts with the place of the run taken off the files' names."""
    here = os.getcwd()
    marker = f"{os.sep}files{os.sep}"
    if marker in here + os.sep:
        root = (here + os.sep).partition(marker)[0] + marker
        return {name.removeprefix(root): rows for name, rows in counts.items()}
    return counts


def run(program: Callable[[], None], entry: Entry, mode: str, options: Any) -> dict[str, Any]:
    """Run the program for real or in a trace, and return the figures of the trace."""
    where, _, warm = mode.partition(" ")
    if warm:
        with on_the_cpu(entry):
            program()
    if where == "real":
        with on_the_cpu(entry):
            program()
        return {}
    import pytest_torchmem

    gpu = {"gpu": GPU} if where == "cuda" else {}
    options = {"device": where, "memory": "unlimited", **gpu, **options}
    profile = pytest_torchmem.trace(program, **options)
    return {"peak": profile.peak, "warnings": list(profile.warnings)}


@contextmanager
def on_the_cpu(entry: Entry) -> Iterator[None]:
    """Let a program run for real although it may be for a GPU."""
    arguments = sys.argv
    sys.argv = [*arguments[:1], *(word.replace("cuda", "cpu") for word in arguments[1:])]
    try:
        with cuda_is_the_cpu() if entry.needs_cuda else nullcontext():
            yield
    finally:
        sys.argv = arguments


@contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Let programs that call ``.cuda()`` without asking run on the CPU, for the real run."""
    before = torch.Tensor.cuda, nn.Module.cuda, torch.Tensor.to, nn.Module.to
    available = torch.cuda.is_available
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda, nn.Module.cuda = before[:2]  # type: ignore[method-assign]
        torch.cuda.is_available = available


def as_a_test(program: Callable[[], None]) -> dict[str, Any]:
    """Run the program as the body of a test with a budget, in a real run of pytest."""
    import pytest

    Path("test_program.py").write_text(
        "import pytest\n\n\n"
        '@pytest.mark.memory_budget(peak="1 TiB", device="cuda")\n'
        "def test_program(program_of_others):\n    program_of_others()\n",
        encoding="utf-8",
    )
    found: dict[str, Any] = {"ended": "lost"}

    class Plugin:
        @pytest.fixture
        def program_of_others(self) -> Callable[[], None]:
            return program

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            report = (yield).get_result()
            if report.when == "call" or report.failed:
                if report.passed:
                    found["ended"] = "ok"
                elif call.excinfo is not None:
                    found.update(how_it_failed(call.excinfo.value))

    arguments = ["-q", "-p", "no:cacheprovider", "--rootdir=.", "-p", "no:randomly"]
    pytest.main([*arguments, *plugin(), "test_program.py"], plugins=[Plugin()])
    return found


def plugin() -> list[str]:
    """Return the arguments that load this project's plugin where it is not installed."""
    installed = metadata.entry_points(group="pytest11", name="torchmem")
    return [] if installed else ["-p", "pytest_torchmem.plugin.hooks"]


def suite(arguments: tuple[str, ...], mode: str) -> dict[str, Any]:
    """Run a test suite: for real, as if a GPU were there, or on the CPU with a budget for all."""
    import pytest

    failed: list[tuple[str, BaseException]] = []
    passed = 0

    class Plugin:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            if mode == "cpu":
                for module in {item.getparent(pytest.Module) for item in items}:
                    module.add_marker(pytest.mark.memory_budget(peak="1 TiB", device="cpu"))

        @pytest.hookimpl(hookwrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            nonlocal passed
            report = (yield).get_result()
            passed += report.when == "call" and report.passed
            if report.failed and call.excinfo is not None:
                failed.append((item.nodeid, call.excinfo.value))

    common = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-c", os.devnull]
    common += [f"--torchmem-fake-cuda={GPU}"] if mode == "cuda" else []
    pytest.main([*common, *plugin(), "--rootdir=.", *arguments], plugins=[Plugin()])
    if not failed:
        return {"ended": "ok" if passed else "lost"}
    worst = {**how_it_failed(failed[0][1])}
    for name, error in failed:
        found = how_it_failed(error)
        print(name, found["error"][:300])
        if not found["by_torchmem"]:
            worst = found
    worst["error"] = f"{len(failed)} of {passed + len(failed)} tests: {worst['error']}"
    return worst


def how_it_failed(error: BaseException) -> dict[str, Any]:
    """Return what the parent has to know of an exception."""
    from pytest_torchmem.errors import TorchmemError

    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = [
        f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}"
        for frame in frames
        if "programs_of_others/one.py" not in frame.filename
    ]
    return {
        "ended": "raised",
        "error": f"{type(error).__module__}.{type(error).__name__}: {str(error)[:1500]}",
        "by_torchmem": isinstance(error, TorchmemError),
        "where": "\n".join(where[-6:]),
    }
