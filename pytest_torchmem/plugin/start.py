"""Tests and options as a run first met them, and what is told where the plugin itself fails.

Every run imports this. A test may have replaced what everything is made of (``open``,
``__import__``), and not put it back, so nothing is imported where the plugin itself fails.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.checks import MARKER
from pytest_torchmem.printable import printable_lines
from pytest_torchmem.snapshots.location import snapshot_path, state_of

_NODE_ID: pytest.StashKey[str] = pytest.StashKey()


class SeenFile:
    """A test file as it was when pytest began to collect it."""

    def __init__(self, collector: pytest.File) -> None:
        self.collector = collector
        self.members: list[pytest.Item | pytest.Collector] = []
        self.states = states_of(collector.path)


def states_of(module: Path) -> list[str]:
    """Return what differs once a test module or its snapshots have been changed."""
    return [state_of(module), state_of(snapshot_path(module))]


def written_early(config: pytest.Config, name: str) -> str:
    """Return an option or ini key as it is written, "" for none, before options are read."""
    namespaces = (config.option, config.known_args_namespace)
    given = next(filter(None, (getattr(known, name, None) for known in namespaces)), None)
    return str(given or config.getini(name) or "")


def note_id(item: pytest.Item) -> None:
    """Take note of a node id before plugins change it: xdist adds groups for ``loadgroup``."""
    item.stash[_NODE_ID] = item.nodeid


def node_id(item: pytest.Item) -> str:
    return item.stash.get(_NODE_ID, item.nodeid)


def checks_memory(node: pytest.Item | pytest.Collector) -> bool:
    """Tell whether a test has the fixture or the marker."""
    has_fixture = "torchmem" in getattr(node, "fixturenames", ())
    return has_fixture or node.get_closest_marker(MARKER) is not None


_FIXTURES = frozenset({"fs", "fs_class", "fs_module", "fs_session"})
_IS_DONE: pytest.StashKey[bool] = pytest.StashKey()


def import_before(item: pytest.Item) -> None:
    """Import all of this package before a fixture of pyfakefs puts other files in their place.

    What is imported while these stand would keep their functions, and is forgotten with them
    (pyfakefs/fake_filesystem_unittest.py, ``DynamicPatcher.cleanup``): there would be two of each
    class.
    """
    stash = item.session.stash
    if _IS_DONE in stash or _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return
    stash[_IS_DONE] = True
    if any(map(checks_memory, item.session.items)):
        from importlib import import_module
        from pkgutil import walk_packages

        for module in walk_packages(import_module(_OWN).__path__, f"{_OWN}."):
            import_module(module.name)


_REPORT = (
    "Has a test replaced something of Python and not put it back? Else please report the lines "
    "above to pytest-torchmem"
)

_OWN = __name__.partition(".")[0]
_OF_DEFECTS = (AssertionError, AttributeError, KeyError, NameError, TypeError, UnboundLocalError)


def hide_own_frames() -> None:
    """Leave the package's frames, unless they are to blame, out of what pytest shows of a failure.

    It asks the globals of a frame, too (``TracebackEntry.ishidden``, _pytest/_code/code.py).
    """
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == _OWN:
            vars(module)["__tracebackhide__"] = _is_no_defect


def _is_no_defect(failure: pytest.ExceptionInfo[Any]) -> bool:
    """Return whether an error was not raised in this package by mistake.

    Of one without a traceback pytest wants a frame all the same.
    """
    if not getattr(failure.value, "pytrace", True):
        return False
    raised_by = failure.traceback[-1].frame.f_globals.get("__name__", "")
    return failure.type not in _OF_DEFECTS or raised_by.partition(".")[0] != _OWN


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
