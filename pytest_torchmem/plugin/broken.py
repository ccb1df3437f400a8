"""What is told where the plugin itself fails: a run loses neither a failure nor pytest's summary.

Its own frames are shown in the traceback of a failure only where they are to blame.

A test may have replaced what everything is made of (``open``, ``__import__``), and not put it back,
so nothing is imported for it then.
"""

import sys
import traceback
from typing import Any

import pytest

from pytest_torchmem.printable import printable_lines

_REPORT = (
    "Has a test replaced something of Python and not put it back? Else please report the lines "
    "above to pytest-torchmem"
)

_PACKAGE = __name__.partition(".")[0]
_OF_DEFECTS = (AssertionError, AttributeError, KeyError, NameError, TypeError, UnboundLocalError)


def hide_own_frames() -> None:
    """Leave the package's frames out of what pytest shows of a failure.

    It asks the globals of a frame, too (``TracebackEntry.ishidden``, _pytest/_code/code.py).
    """
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == _PACKAGE:
            vars(module)["__tracebackhide__"] = _is_no_defect


def _is_no_defect(failure: pytest.ExceptionInfo[Any]) -> bool:
    """Return whether an error was not raised in this package by mistake.

    Of one without a traceback pytest wants a frame all the same.
    """
    if not getattr(failure.value, "pytrace", True):
        return False
    raised_by = failure.traceback[-1].frame.f_globals.get("__name__", "")
    return failure.type not in _OF_DEFECTS or raised_by.partition(".")[0] != _PACKAGE


def not_reported(error: Exception) -> str:
    """Return what is told of a test whose checks are not known, through no fault of its own."""
    return (
        f"{_lines(error)}\ntorchmem could not take the results of this test's checks: "
        f"{type(error).__name__}. {_REPORT}; -p no:torchmem runs the test without it"
    )


def not_concluded(error: Exception) -> str:
    """Return what is told at the end of a run whose results could not be written or shown."""
    return (
        f"{_lines(error)}\nerror: torchmem could not conclude this run: {type(error).__name__}. "
        f"Snapshots and reports may not be written, so the run fails. {_REPORT}"
    )


def let_fail(session: pytest.Session) -> None:
    """Let a run fail that would be a success otherwise."""
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _lines(error: Exception) -> str:
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception:  # the lines of a source cannot be read
        lines = type(error).__name__
    return printable_lines(lines)
