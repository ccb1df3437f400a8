"""Test files and tests as a run first met them; every run imports this, which imports little."""

from pathlib import Path

import pytest

from pytest_torchmem.checks.defaults import MARKER
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


def note_id(item: pytest.Item) -> None:
    """Take note of a node id before plugins change it: xdist adds groups for ``loadgroup``."""
    item.stash[_NODE_ID] = item.nodeid


def node_id(item: pytest.Item) -> str:
    """Return the node id of ``item``, the same with every plugin."""
    return item.stash.get(_NODE_ID, item.nodeid)


def checks_memory(node: pytest.Item | pytest.Collector) -> bool:
    """Tell whether a test has the fixture or the marker."""
    has_fixture = "torchmem" in getattr(node, "fixturenames", ())
    return has_fixture or node.get_closest_marker(MARKER) is not None
