"""Recordings of what a GPU counts; a stand-in with an allocator of its own takes its place."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.truth import record as recorder
from benchmarks.truth.networks import NETWORKS
from benchmarks.truth.record import counted_steps, main, record
from benchmarks.truth.recording import Recording, RecordingError, load
from benchmarks.truth.settings import Case, cases
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


@pytest.mark.parametrize(
    "key",
    [
        "dense/gelu-layer-norm/float32",
        "transformer/llama-grouped/bfloat16",
        "recurrent/gru-cell/autocast",
    ],
)
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
    assert [(step, phase) for step, phase, _ in requests.bounds] == [
        ("first", "baseline"),
        ("first", "forward"),
        ("first", "backward"),
        ("first", "optimizer"),
        ("first", "zero_grad"),
        ("second", "forward"),
        ("second", "backward"),
        ("second", "optimizer"),
    ]


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
