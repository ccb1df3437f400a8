"""Workers of a run share the GPUs of a machine."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_torchmem.measurement.device import Device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The GPUs that were made current, of two."""
    found: list[int] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda index: found.append(index) or nullcontext())
    return found


@pytest.mark.parametrize(
    ("worker", "expected"), [("", []), ("gw0", [0]), ("gw1", [1]), ("gw12", [0]), ("master", [])]
)
def test_each_worker_has_a_gpu(
    worker: str, expected: list[int], chosen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    with Device().taken():
        pass
    assert chosen == expected


def test_one_measures_at_a_time(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    measured = threading.Event()

    def other() -> None:
        with Device().taken():
            measured.set()

    thread = threading.Thread(target=other)
    with Device().taken():
        thread.start()
        assert not measured.wait(0.2)
    assert measured.wait(60)
    thread.join()
