"""Recordings compared with traces: what a trace itself counted is met, what is doctored is told."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.truth.compare import (
    RecordedAddresses,
    errors_of,
    main,
    recorded_gpu,
    replay_differences,
    replayed,
    traced_figures,
)
from benchmarks.truth.recording import Recording, RecordingError, Requests, load
from benchmarks.truth.settings import Case, cases
from pytest_torchmem.allocator import device_memory
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.device_memory import DriverAddresses
from pytest_torchmem.targets.gpus import find_gpu

KEYS = ("dense/gelu-layer-norm/float32", "recurrent/gru-cell/autocast")
A100 = find_gpu("a100-80gb")
MACHINE = {
    "torch": "2.13.0",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "capability": list(A100.capability),
    "sms": A100.multiprocessors,
    "threads_per_sm": A100.threads_per_multiprocessor,
    "memory": A100.memory,
    "alloc_conf": None,
    "tiny": True,
}


def case(key: str) -> Case:
    return next(found for found in cases() if found.key == key)


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """What a trace counts in two cases."""
    return {key: traced_figures(case(key), A100, True)[0] for key in KEYS}


@pytest.fixture
def recording(tmp_path: Path, figures: dict[str, Any]) -> Recording:
    made = Recording(tmp_path, json.loads(json.dumps({"machine": MACHINE, **figures})))
    made.save()
    return made


def test_a_trace_has_what_the_recorder_writes(figures: dict[str, Any]) -> None:
    for found in figures.values():
        for phase in ("forward", "backward", "optimizer"):
            requested, allocated, reserved = found["second"][phase].values()
            assert 0 < requested <= allocated <= reserved


def test_nothing_differs(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recording.path)]) == 0
    printed = capsys.readouterr().out
    assert "Beyond" not in printed
    assert "0.00%" in printed


def test_what_differs_is_told(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    key = KEYS[0]
    recording.truth[key]["second"]["backward"]["requested_bytes"] //= 2
    recording.truth[KEYS[1]] = {"error": "the process died"}
    recording.save()
    assert main([str(recording.path)]) == 1
    beyond = capsys.readouterr().out.partition("Beyond the limit")[2]
    assert f"{key} second backward" in beyond
    assert "+100.00%" in beyond
    assert "first" not in beyond


def test_requests_are_replayed(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    key = KEYS[0]
    mib = 2**20
    events = (3 * mib, 700, -1, 2 * mib, -2, -3)
    requests = Requests(events, (("first", "forward", 3), ("first", "backward", 6)))
    assert replayed(requests, CachingAllocator()) == {
        ("first", "forward"): (3 * mib + 1024, 22 * mib),
        ("first", "backward"): (2 * mib + 1024, 22 * mib),
    }
    for phase, (allocated, reserved) in replayed(requests, CachingAllocator()).items():
        recording.truth[key][phase[0]][phase[1]].update(
            allocated_bytes=allocated, reserved_bytes=reserved
        )
    recording.save()
    recording.append(key, asdict(requests))
    assert main([str(recording.path), "--replay"]) == 0
    recording.truth[key]["first"]["backward"]["reserved_bytes"] += 512
    recording.save()
    assert main([str(recording.path), "--replay"]) == 1
    assert "1 figures differ, with a trace's 1\n" in capsys.readouterr().out


def test_a_recording_without_a_gpu(recording: Recording) -> None:
    with pytest.raises(RecordingError, match="not made on a GPU"):
        recorded_gpu({"torch": "2.13.0"})
    with pytest.raises(SystemExit):
        main([str(recording.path / "nowhere")])


H100 = load(Path(__file__).parents[2] / "benchmarks" / "truth" / "recorded" / "h100")


def test_the_replay_of_what_an_h100_was_asked_has_its_peaks() -> None:
    """To the byte where segments lie as recorded; elsewhere mostly."""
    differ = elsewhere = 0
    for key, requests in itertools.islice(H100.requests(), 0, None, 9):
        figures, there = H100.figures(key), CachingAllocator()
        assert figures is not None
        there.addresses = RecordedAddresses(requests.segments)
        differ += len(replay_differences(key, requests, figures, there))
        own = CachingAllocator()
        own.addresses = DriverAddresses()
        elsewhere += len(replay_differences(key, requests, figures, own))
    assert differ == 0
    assert elsewhere <= 50  # of 530


@pytest.mark.parametrize(
    "key",
    [
        "dense/recommender/float32",
        "recurrent/lstm-2-batch-first/float32",
        "recurrent/gru-cell/bfloat16",
        "transformer/llama-grouped/bfloat16",
    ],
)
def test_traces_have_every_peak_that_an_h100_had(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the recording's torch 2.11 does.
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    monkeypatch.setattr(device_memory, "addresses_of_this_torch", DriverAddresses)
    figures = H100.figures(key)
    assert figures is not None
    errors = errors_of(case(key), traced_figures(case(key), find_gpu("h100"), False)[0], figures)
    assert len(errors) == 18
    assert [error for error in errors if error.traced != error.recorded] == []
