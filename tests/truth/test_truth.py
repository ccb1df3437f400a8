"""Recordings of what a GPU counts; a stand-in with an allocator of its own takes its place."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.truth import compare
from benchmarks.truth import record as recorder
from benchmarks.truth.compare import main as compare_main
from benchmarks.truth.compare import replayed, traced_figures
from benchmarks.truth.networks import NETWORKS
from benchmarks.truth.record import counted_steps, main, record
from benchmarks.truth.recording import Recording, RecordingError, Requests, load
from benchmarks.truth.settings import Case, cases
from pytest_torchmem.allocator import caching
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.device_memory import DriverAddresses
from pytest_torchmem.targets.gpus import find_gpu
from tests.measurement.stand_in import StandIn


class StandInMeter:
    """The stand-in, asked as the recorder asks."""

    def __init__(self) -> None:
        self.gpu = StandIn()
        self.device = torch.device("cpu")

    def statistics(self) -> Mapping[str, int]:
        return self.gpu.statistics()

    def reset_peaks(self) -> None:
        self.gpu.reset_peaks()

    def start_history(self) -> None:
        self.gpu.start_history()

    def history(self) -> Sequence[Any]:
        return list(self.gpu._history or ())

    def stop_history(self) -> None:
        self.gpu.stop_history()


def case(key: str) -> Case:
    return next(found for found in cases() if found.key == key)


def test_there_are_models_of_every_family() -> None:
    families = {network.family for network in NETWORKS.values()}
    assert families == {"cnn", "dense", "diffusion", "recurrent", "transformer"}
    assert len(NETWORKS) == 86
    assert len({found.key for found in cases()}) == len(cases())


COUNTED = ["dense/gelu-layer-norm/float32", "transformer/llama-grouped/bfloat16"]
COUNTED += ["recurrent/gru-cell/autocast"]


@pytest.mark.parametrize("key", COUNTED)
def test_the_requests_add_up_to_the_figures(key: str) -> None:
    meter = StandInMeter()
    with meter.gpu.current():
        found, requests = counted_steps(case(key), meter, tiny=True)
    live = start = 0
    for step, phase, end in requests.bounds:
        peak = live
        for event in requests.events[start:end]:
            live += event if event > 0 else -sizes_of(requests.events)[-event - 1]
            peak = max(peak, live)
        start = end
        if phase == "baseline":
            assert live == found["baseline"]["requested_bytes"] > 0
        else:
            assert found[step][phase]["requested_bytes"] == peak
            assert found[step][f"{phase}_end"]["requested_bytes"] == live
    phases = ["forward", "backward", "optimizer"]
    first = [("first", phase) for phase in ("baseline", *phases, "zero_grad")]
    second = [("second", phase) for phase in phases]
    assert [(step, phase) for step, phase, _ in requests.bounds] == first + second


def sizes_of(events: Sequence[int]) -> list[int]:
    return [event for event in events if event > 0]


def test_inference_has_a_forward_alone() -> None:
    meter = StandInMeter()
    with meter.gpu.current():
        found, _ = counted_steps(case("cnn/resnet18/float32-eval"), meter, tiny=True)
    assert set(found["second"]) == {"forward", "forward_end"}


def test_a_recording_is_taken_up_again_and_survives_a_model_that_fails(tmp_path, monkeypatch):
    keys = ("dense/autoencoder/float32", "dense/recommender/float32", "dense/batch-norm/float32")
    wanted = [case(key) for key in keys]

    def run(found: Case, device: str, tiny: bool) -> dict[str, Any]:
        if found.key == keys[1]:
            return {"error": "RuntimeError: no such kernel"}
        meter = StandInMeter()
        with meter.gpu.current():
            figures, requests = counted_steps(found, meter, tiny)
        assert requests is not None
        return {**figures, "requests": asdict(requests), "machine": {"gpu": "one"}}

    monkeypatch.setattr(recorder, "_in_a_process", run)
    machine = {"machine": {"tiny": True}}
    assert record(Recording(tmp_path, machine), wanted[:1], 1, "cuda", 60.0) == 0
    assert record(load(tmp_path), wanted, 1, "cuda", -1.0) == 2
    assert record(load(tmp_path), wanted, 1, "cuda", 60.0) == 0
    found = load(tmp_path)
    assert sorted(found.keys()) == sorted(keys)
    assert found.truth[keys[1]] == {"error": "RuntimeError: no such kernel"}
    assert found.figures(keys[1]) is None
    assert [key for key, _ in found.requests()] == [keys[0], keys[2]]
    assert found.machine == {"tiny": True, "gpu": "one"}


def test_a_case_that_ends_its_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.sys, "executable", "false")
    found = recorder._in_a_process(case("dense/autoencoder/float32"), "cpu", True)
    assert found == {"error": "the process ended with 1"}


def test_what_is_no_recording_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"there is no truth\.json"):
        load(tmp_path)
    (tmp_path / "truth.json").write_text("{")
    with pytest.raises(RecordingError, match="is not JSON"):
        load(tmp_path)


def test_the_command_lists_and_runs_on_the_cpu(tmp_path, capsys):
    assert main(["--list", "--only", "dense/recommender"]) == 0
    assert "dense/recommender/float32\n" in capsys.readouterr().out
    only = ["--device", "cpu", "--tiny", "--only", "dense/recommender/float32$"]
    assert main([str(tmp_path), *only]) == 0
    found = load(tmp_path)
    (key,) = found.keys()
    assert found.figures(key) is None
    assert "error" not in found.truth[key]
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--device", "cpu"])  # of another size


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
    assert compare_main([str(recording.path)]) == 0
    printed = capsys.readouterr().out
    assert "Beyond" not in printed
    assert "0.00%" in printed


def test_what_differs_is_told(recording: Recording, capsys: pytest.CaptureFixture[str]) -> None:
    key = KEYS[0]
    recording.truth[key]["second"]["backward"]["requested_bytes"] //= 2
    recording.truth[KEYS[1]] = {"error": "the process died"}
    recording.save()
    assert compare_main([str(recording.path)]) == 1
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
    for (step, phase), sizes in replayed(requests, CachingAllocator()).items():
        counted = dict(zip(("allocated_bytes", "reserved_bytes"), sizes, strict=True))
        recording.truth[key][step][phase].update(counted)
    recording.save()
    recording.append(key, asdict(requests))
    assert compare_main([str(recording.path), "--replay"]) == 0
    recording.truth[key]["first"]["backward"]["reserved_bytes"] += 512
    recording.save()
    assert compare_main([str(recording.path), "--replay"]) == 1
    assert "1 figures differ, with a trace's 1\n" in capsys.readouterr().out


def test_a_recording_without_a_gpu(recording: Recording) -> None:
    with pytest.raises(RecordingError, match="not made on a GPU"):
        compare.recorded_gpu({"torch": "2.13.0"})
    with pytest.raises(SystemExit):
        compare_main([str(recording.path / "nowhere")])


H100 = load(Path(__file__).parents[2] / "benchmarks" / "truth" / "recorded" / "h100")


def test_the_replay_of_what_an_h100_was_asked_has_its_peaks() -> None:
    """To the byte where segments lie as recorded; elsewhere mostly."""
    differ = elsewhere = 0
    for key, requests in itertools.islice(H100.requests(), 0, None, 9):
        figures, there = H100.figures(key), CachingAllocator()
        assert figures is not None
        there.addresses = compare.RecordedAddresses(requests.segments)
        differ += len(compare.replay_differences(key, requests, figures, there))
        own = CachingAllocator()
        own.addresses = DriverAddresses()
        elsewhere += len(compare.replay_differences(key, requests, figures, own))
    assert differ == 0
    assert elsewhere <= 50  # of 530


EXACT = ["dense/recommender/float32", "recurrent/lstm-2-batch-first/float32"]
EXACT += ["recurrent/gru-cell/bfloat16", "transformer/llama-grouped/bfloat16"]


@pytest.mark.parametrize("key", EXACT)
def test_traces_have_every_peak_that_an_h100_had(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the recording's torch 2.11 does.
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    monkeypatch.setattr(caching, "addresses_of_this_torch", DriverAddresses)
    figures = H100.figures(key)
    assert figures is not None
    errors = compare.errors_of(
        case(key), traced_figures(case(key), find_gpu("h100"), False)[0], figures
    )
    assert len(errors) == 18
    assert [error for error in errors if error.traced != error.recorded] == []
