"""A cuDNN to be asked, and a place of its own for what it answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_torchmem.cudnn import library as asked
from pytest_torchmem.cudnn.library import Library
from pytest_torchmem.cudnn.questions import VARIABLE, find_installed
from tests.conftest import CUDNN


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which answers are remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked._library.cache_clear()
    yield tmp_path / "cache"
    asked._library.cache_clear()


@pytest.fixture
def cudnn(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The cuDNN of this machine; without one the test is skipped."""
    monkeypatch.setenv(VARIABLE, CUDNN)
    found = find_installed()
    if isinstance(found, str):
        pytest.skip(found)
    made = asked.library()
    assert isinstance(made, Library)
    return made
