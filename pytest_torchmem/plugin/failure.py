"""The failure of a test whose memory is not as its snapshot or budget says, and what updates it."""

from __future__ import annotations

import linecache
import os
import shlex
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import pytest

from pytest_torchmem.errors import UsageError
from pytest_torchmem.reports.layout import MARGIN

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


def shorten(report: pytest.TestReport, error: BaseException) -> None:
    """Let pytest's short summary and JUnit's message be the headline of a failed check.

    It begins with the number: the summary cuts lines at the terminal's width.

    pytest prints all of ``reprcrash.message`` there in CI and with ``-vv``
    (``_get_line_with_reprcrash_message`` in ``_pytest/terminal.py``), and all of the message once
    more is pages. The section of the failure is made of ``reprtraceback``, which keeps the whole.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(error, MemoryCheckFailed) and crash is not None:
        crash.message = error.headline


class shown_at_the_call:
    """Lets a failure stand at the user's line, as wide as there is room behind its indentation.

    What found a usage error is no part of it. (``contextlib.contextmanager`` would put the whole
    traceback back; contextlib.py, ``__exit__``.)
    """

    def __enter__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        self._token = MARGIN.set(_margin(frame) if frame is not None else MARGIN.get())

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        MARGIN.reset(self._token)
        if isinstance(error, UsageError):
            raise error.with_traceback(_without_own_end(error.__traceback__))


def _margin(frame: FrameType) -> int:
    """Return the columns that pytest puts before what a line raised: four, and how much further in
    it stands than its function (``FormattedExcinfo._getindent``, _pytest/_code/code.py).
    """
    code = frame.f_code
    first, own = (
        linecache.getline(code.co_filename, number, frame.f_globals)
        for number in (code.co_firstlineno, frame.f_lineno)
    )
    return 4 + max(_indentation(own) - _indentation(first), 4)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _without_own_end(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package that stand last in it."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    while frames and frames[-1].tb_frame.f_code.co_filename.startswith(_OWN):
        frames.pop()
    shown: TracebackType | None = None
    for one in reversed(frames):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown


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
