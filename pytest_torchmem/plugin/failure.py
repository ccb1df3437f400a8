"""What pytest reports of a memory test: its failure, its checks, and why it made none.

A test may expect one: ``with pytest.raises(AssertionError):``. Nothing of checks that it calls in
processes which it forks comes to the report, so these fail it, too.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import mmap
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
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
        self, message: str, last_line: str = "", headline: str = "", checks: Sequence[Check] = ()
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


_GROUP = "RaisesGroup"
_EXPECT = ("raises", "assertRaises", "assertRaisesRegex", _GROUP, "RaisesExc")
_EXPECTING = (("_pytest", "raises.py"), ("_pytest", "python_api.py"), ("unittest", "case.py"))
"""The files of what calls a function and expects it to raise, in any version of pytest."""
_SUPPRESS = "suppress"
_LIBRARIES = ("_pytest", "pytest", "unittest", "contextlib")
_Catching = ast.With | ast.AsyncWith | ast.Try
_CATCHING = (ast.With, ast.AsyncWith, ast.Try, getattr(ast, "TryStar", ast.Try))  # of Python 3.11
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef


def expecting_blocks(frame: FrameType | None) -> set[str]:
    """Return the names of expecting blocks around the running line or a caller of it."""
    found = set()
    while frame is not None and Path(frame.f_code.co_filename).parent.name != "_pytest":
        if _calls_and_expects(frame.f_code):
            found.add(frame.f_code.co_name)
        for statement in _around(frame, frame.f_lineno):
            if isinstance(statement, ast.With | ast.AsyncWith):
                names = (_called(item.context_expr, frame) for item in statement.items)
                found.update(name for name in names if name in _EXPECT)
        frame = frame.f_back
    return found


def failure_is_expected(error: BaseException, blocks: set[str]) -> bool:
    """Tell whether the code that caught a failure declared that it expects one.

    That is in the frame that the traceback came to last. Where there is none any more (unittest
    takes it away; case.py, ``_AssertRaisesContext.__exit__``), or the failure was caught to become
    a part of another one, ``blocks`` tell: those that stood around it when it was raised.
    """
    traceback = error.__traceback__
    if traceback is None or _GROUP in blocks:
        return bool(blocks)
    frame = traceback.tb_frame
    if _calls_and_expects(frame.f_code):
        return True
    for statement in _around(frame, traceback.tb_lineno):
        if isinstance(statement, ast.With | ast.AsyncWith):
            for item in reversed(statement.items):
                name = _called(item.context_expr, frame)
                if name and _may_catch(item.context_expr, frame, error):
                    return name in _EXPECT
            continue
        for handler in statement.handlers:
            if handler.type is None or _is_one(handler.type, frame, error) is not False:
                raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
                return raises and bool(blocks)  # as another one
    return False


def _calls_and_expects(code: CodeType) -> bool:
    file = Path(code.co_filename)
    return (file.parent.name, file.name) in _EXPECTING and code.co_name in (*_EXPECT, "handle")


def _around(frame: FrameType, line: int) -> list[_Catching]:
    """Return the statements of a frame's own function whose body a line is in, innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return []
    statements = _statements(_function(tree, frame.f_code))
    return [
        one for one in statements if one.body[0].lineno <= line <= (one.body[-1].end_lineno or line)
    ]


def _statements(node: ast.AST) -> Iterator[_Catching]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function):
            yield from _statements(child)
            if isinstance(child, _CATCHING):
                yield child


def _function(tree: ast.AST, code: CodeType) -> ast.AST:
    """Return what a code object was compiled from: a function, or else the module."""
    for node in ast.walk(tree):
        if getattr(node, "name", "") == code.co_name and isinstance(node, _Function):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            if first == code.co_firstlineno:
                return node
    return tree


def _called(expression: ast.expr, frame: FrameType) -> str:
    """Return what catches errors for an expression, under any name: "raises"; "" for all else.

    A function that has only the name, and belongs to the program, may catch whatever comes.
    """
    if not isinstance(expression, ast.Call):
        return ""
    called = _value(expression.func, frame)
    name = getattr(expression.func, "attr", "") or getattr(expression.func, "id", "")
    if called is not None:
        name = getattr(called, "__name__", "")
        if str(getattr(called, "__module__", "")).partition(".")[0] not in _LIBRARIES:
            return ""
    return name if name in (*_EXPECT, _SUPPRESS) else ""


def _may_catch(call: ast.expr, frame: FrameType, error: BaseException) -> bool:
    """Tell whether ``raises`` or ``suppress`` is given a type of an error, or one unknown."""
    assert isinstance(call, ast.Call)
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "expected_exception")]
    return not given or any(_is_one(one, frame, error) is not False for one in given)


def _is_one(types: ast.expr, frame: FrameType, error: BaseException) -> bool | None:
    """Tell whether an error is of the types that an expression names, ``None`` if unknown."""
    if isinstance(types, ast.Tuple):
        told = [_is_one(one, frame, error) for one in types.elts]
        return True if True in told else None if None in told else False
    value = _value(types, frame)
    if isinstance(value, type) or (isinstance(value, tuple) and value):
        try:
            return isinstance(error, value)
        except TypeError:
            return None
    return None


def _value(expression: ast.expr, frame: FrameType) -> object:
    """Return what a name, or an attribute of one, stands for in a frame; ``None`` if unknown."""
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, frame), expression.attr, None)
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if expression.id in names:
                found: object = names[expression.id]
                return found
    return None


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


def attach(item: pytest.Item, check: Check, properties: Sequence[tuple[str, object]]) -> None:
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


def _text(check: Check) -> str:
    figures = check.result.figures.items()
    lines = [f"{label(name):15} {format_size(size)}" for name, size in figures]
    return "\n".join([check.device, *lines, "", check.message, check.advice]).rstrip() + "\n"
