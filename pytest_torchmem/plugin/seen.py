"""Test files as a run first met them. Every run imports this, so it imports little itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_torchmem.snapshots.location import snapshot_path, state_of


class SeenFile:
    """A test file as it was when pytest began to collect it."""

    def __init__(self, collector: pytest.File) -> None:
        self.collector = collector
        self.members: list[pytest.Item | pytest.Collector] = []
        self.states = states_of(collector.path)


def states_of(module: Path) -> list[str]:
    """Return what differs once a test module or its snapshots have been changed."""
    return [state_of(module), state_of(snapshot_path(module))]
