"""The markers of a test in the order of their places: of two that disagree, the closer wins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_torchmem.checks.defaults import MARKER
from pytest_torchmem.checks.request import read_budget
from pytest_torchmem.errors import UsageError

if TYPE_CHECKING:
    from _pytest.nodes import Node

    from pytest_torchmem.checks.request import Budget


def budget_of(item: pytest.Item) -> Budget:
    """Return what the markers of a test say; raises ``UsageError`` where they cannot be read."""
    nodes = reversed(item.listchain())
    levels = (level for node in nodes for level in _levels(node))
    return read_budget([(mark.args, mark.kwargs) for mark in level] for level in levels)


def refuse_unreadable(report: pytest.CollectReport) -> None:
    """Let the collection of tests fail where markers of theirs cannot be read."""
    wrong: dict[str, None] = {}
    for item in (one for one in report.result if isinstance(one, pytest.Item)):
        try:
            budget_of(item)
        except UsageError as error:
            path, line, name = item.location
            wrong[f"{path}:{(line or 0) + 1}: {name.partition('[')[0]}: {error}"] = None
    if wrong:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(wrong), []


def _levels(node: Node) -> Iterator[list[pytest.Mark]]:
    """Yield the markers of a node by the places where they are written, the closest first.

    Those of a set of parameters come before the function's, and a class's before its bases', which
    ``iter_markers`` has the other way round (_pytest/python.py, ``Function``;
    _pytest/mark/structures.py, ``get_unpacked_marks``). What a plugin adds stands by itself.
    """
    own = [mark for mark in node.own_markers if mark.name == MARKER]
    if len(own) < 2:
        yield from ([mark] for mark in own)
        return
    places = [[mark for mark in own if id(mark) in place] for place in _places(node)]
    written = {id(mark) for place in places for mark in place}
    first = next((n for n, mark in enumerate(own) if id(mark) in written), len(own))
    added = [(n, [mark]) for n, mark in enumerate(own) if id(mark) not in written]
    yield from (level for n, level in added if n < first)
    yield from filter(None, places)
    yield from (level for n, level in added if n > first)


def _places(node: Node) -> Iterator[set[int]]:
    """Yield the ``id`` of every marker at each place of a node."""
    call = getattr(node, "callspec", None)
    if call is not None:
        yield set(map(id, call.marks))
    owner = getattr(node, "obj", None)
    for one in owner.__mro__ if inspect.isclass(owner) else [owner]:
        found: Any = getattr(one, "__dict__", {}).get("pytestmark")
        if not inspect.isclass(one):
            found = getattr(one, "pytestmark", None)
        several = found if isinstance(found, list) else [found]
        yield {id(getattr(mark, "mark", mark)) for mark in several if mark is not None}
