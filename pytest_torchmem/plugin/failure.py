"""What pytest reports of a memory test: its failure, its checks, and why it made none.

A test may expect one: ``with pytest.raises(AssertionError):``. Nothing of checks that it calls in
processes which it forks comes to the report, so these fail it, too.
"""

import inspect
import linecache
import mmap
import os
import re
import shlex
import sys
import unittest.case
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchmem.errors import UsageError
from pytest_torchmem.figures import label
from pytest_torchmem.reports.layout import MARGIN
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.reports.summary import Check

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


class MemoryCheckFailed(AssertionError, pytest.fail.Exception):  # type: ignore[name-defined,misc]
    """A test needs more memory than its budget or snapshot allows, or could not be checked.

    Where a whole body was traced no line of the test is running any more, so that a traceback
    would be empty: pytest then shows the message and ``last_line`` instead.
    """

    # As pytest does for its own outcomes: reports show "MemoryCheckFailed: …" without the module.
    __module__ = "builtins"

    def __init__(
        self, message: str, last_line: str = "", headline: str = "", checks: Sequence["Check"] = ()
    ) -> None:
        self.checks = tuple(checks)
        """What failed, where figures did."""
        self.last_line = last_line
        self.headline = headline or message.partition("\n")[0]
        """The failure in one line, for pytest's short summary."""
        self.msg = f"{message}\n\n{last_line}" if last_line else message
        self.pytrace = not last_line
        super().__init__(self.msg, self.pytrace)
        self.args = (self.msg,)


@contextmanager
def shown_at_the_call() -> Iterator[None]:
    """Let a failure be as wide as there is room behind the indentation of the user's line."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    token = MARGIN.set(_margin(frame) if frame is not None else MARGIN.get())
    try:
        yield
    finally:
        MARGIN.reset(token)


def _margin(frame: FrameType) -> int:
    """Return the columns that pytest puts before what a line raised: four, and how much further in
    it stands than its function (``FormattedExcinfo._getindent``, _pytest/_code/code.py).
    """
    code = frame.f_code
    numbers = code.co_firstlineno, frame.f_lineno
    lines = (linecache.getline(code.co_filename, number, frame.f_globals) for number in numbers)
    first, own = (len(line) - len(line.lstrip(" ")) for line in lines)
    return 4 + max(own - first, 4)


_UPDATE = "pytest --torchmem-update"


def update_command(path: str, test: str) -> str:
    """Return the command that accepts what a test of the module at ``path`` does now.

    A parameter that cannot be typed (a line end, an escape, a letter that is not seen) is left
    out, and so are the parts before it that cannot: the function, or the module, is updated whole.
    """
    while not test.isprintable():
        function, bracket, _ = test.partition("[")
        test = function if bracket else test.rpartition("::")[0]
    if "[" in path or not path.isprintable():
        # pytest takes what follows a bracket for a parameter (_pytest/main.py,
        # resolve_collection_argument), so no argument names such a file.
        name = test.partition("[")[0].rpartition("::")[2]
        return f"{_UPDATE} -k {name}" if name.isidentifier() else _UPDATE
    if path.startswith(("-", "@")):  # an option, or a file of arguments
        path = f"./{path}"
    return f"{_UPDATE} {shlex.quote('::'.join(filter(None, (path, test))))}"


NOT_HERE = (
    "not checked: torchmem.check was called in a process that the test forked, whose results are "
    "lost. Call it in the process of the test, with what the other one would run"
)


class OtherProcesses:
    """Tells a test of the checks that were called in processes forked from its own.

    They share a byte of memory with it, and nothing else that both could count on.
    """

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def refuse(self, process: int) -> None:
        """Raise ``UsageError``, and let the other process know, unless ``process`` is this one."""
        if os.getpid() != process:
            self._byte[0] = 1
            raise UsageError(NOT_HERE)

    def called(self) -> bool:
        """Tell whether any did since this was last asked."""
        told = bool(self._byte[0])
        self._byte[0] = 0
        return told


_NUMBERS = count(1)
_NUMBER = "torchmem_number"
"""The attribute of what checks raise, and of what expects errors, that tells which came first."""
_EXPECTED = "torchmem_expected"


def number_in_order(one: object) -> None:
    setattr(one, _NUMBER, next(_NUMBERS))


def is_expected(failure: BaseException) -> bool:
    """Tell whether ``pytest.raises`` or ``assertRaises`` caught what a check raised."""
    return hasattr(failure, _EXPECTED)


def follow_expectations(patch: pytest.MonkeyPatch) -> None:
    """Take note of what checks raise and ``pytest.raises`` or ``assertRaises`` catches.

    It may have become another error by then, but not one that was raised while a program handled it
    without having expected any (_pytest/raises.py, before pytest 8.4 _pytest/python_api.py;
    unittest/case.py).
    """
    info: Any = pytest.ExceptionInfo
    case: Any = unittest.case._AssertRaisesContext
    later, fill, of_call = info.for_later, info.fill_unfilled, info.from_exception
    enter, leave = case.__enter__, case.__exit__

    def for_later(cls: object) -> Any:
        made = later()
        number_in_order(made)
        return made

    def fill_unfilled(self: Any, exc_info: Any) -> None:
        fill(self, exc_info)
        _expect(exc_info[1], self)

    def from_exception(cls: object, exception: BaseException, *args: Any, **kwargs: Any) -> Any:
        _expect(exception, None)
        return of_call(exception, *args, **kwargs)

    def begin(self: Any) -> Any:
        number_in_order(self)
        return enter(self)

    def end(self: Any, kind: Any, error: Any, traceback: Any) -> bool:
        __tracebackhide__ = True
        caught: bool = leave(self, kind, error, traceback)
        if caught:
            _expect(error, self)
        return caught

    patch.setattr(info, "for_later", classmethod(for_later))
    patch.setattr(info, "fill_unfilled", fill_unfilled)
    patch.setattr(info, "from_exception", classmethod(from_exception))
    patch.setattr(case, "__enter__", begin)
    patch.setattr(case, "__exit__", end)


def _expect(error: BaseException, by: object) -> None:
    """Mark what a check raised: an error that was caught, or what led to it since ``by`` began."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    begun: float = getattr(by, _NUMBER, inf)
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        number = getattr(one, _NUMBER, 0)
        if number and (one is error or number > begun):
            setattr(one, _EXPECTED, True)
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


_OF_A_GPU = re.compile(r"cuda|gpu|nvidia|accelerator", re.IGNORECASE)
NEVER_CHECKED = (
    "never checked, because they are skipped where there is no GPU: run pytest with "
    "--torchmem-fake-cuda=h100, or remove the skipif, since a traced test needs no GPU"
)
SKIPPED = "never checked, because they were skipped"
UNUSED = "passed without a check: nothing in them called torchmem.check"


def why_skipped(item: pytest.Item, call: pytest.CallInfo[None]) -> tuple[str, str] | None:
    """Return why a test was skipped and what is said of all such, ``None`` where it was not.

    Is it for want of a GPU? The reason tells, conditions that are texts, and how marks are written.
    """
    excinfo = call.excinfo
    if excinfo is None:
        return None
    # One that did not run, and none that failed as expected: ``xfail(run=False)``.
    not_run = call.when == "setup" and excinfo.errisinstance(pytest.xfail.Exception)
    if not (not_run or excinfo.errisinstance(pytest.skip.Exception)):
        return None
    reason = str(getattr(excinfo.value, "msg", "") or excinfo.value)
    marks = list(item.iter_markers("skipif"))
    texts = [str(argument) for mark in marks for argument in (*mark.args, *mark.kwargs.values())]
    if marks:  # else a fixture skipped, or the test's module
        with suppress(OSError, TypeError):
            source = inspect.getsource(getattr(item, "function", None))  # type: ignore[arg-type]
            texts += re.split(r"^\s*(?:async\s+)?def\s", source, maxsplit=1, flags=re.MULTILINE)[:1]
    # "not torch.cuda.is_available()" of a mark, its name, or "needs a GPU"
    marker = re.compile(r"memory_budget\(.*?\)", re.DOTALL)
    is_for_gpu = any(_OF_A_GPU.search(marker.sub("", text)) for text in (*texts, reason))
    return reason, NEVER_CHECKED if is_for_gpu else SKIPPED


_ATTACHED: pytest.StashKey[list[dict[str, Any]]] = pytest.StashKey()


def attach(item: pytest.Item, check: "Check", properties: Sequence[tuple[str, object]]) -> None:
    """Hand a check to those of the plugins that run."""
    manager = item.config.pluginmanager
    if manager.hasplugin("benchmark"):
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        getattr(benchmark, "extra_info", {}).update(properties)
    title = f"memory: {check.result.key.name or check.device}"
    if manager.hasplugin("allure_listener"):  # with --alluredir alone
        allure: Any = import_module("allure")
        allure.attach(_text(check), title, allure.attachment_type.TEXT)
    if item.config.getoption("htmlpath", None):
        extras: Any = import_module("pytest_html.extras")
        item.stash.setdefault(_ATTACHED, []).append(extras.text(_text(check), title))


def add_attached(item: pytest.Item, report: pytest.TestReport) -> None:
    """Add what was attached in a phase to its report, where pytest-html looks for it."""
    if attached := item.stash.get(_ATTACHED, []):
        report.extras = [*getattr(report, "extras", []), *attached]  # type: ignore[attr-defined]
        attached.clear()


def _text(check: "Check") -> str:
    figures = check.result.figures.items()
    lines = [f"{label(name):15} {format_size(size)}" for name, size in figures]
    return "\n".join([check.device, *lines, "", check.message, check.advice]).rstrip() + "\n"
