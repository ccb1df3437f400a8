"""Profiles written for other programs, and read again."""

import csv
import gzip
import io
import json
import pickle
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.cuda import _memory_viz

from pytest_torchmem import MemoryProfile, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.formats import exports
from pytest_torchmem.profile.formats.exports import parts_of, write_memory_snapshot
from pytest_torchmem.profile.formats.saved import plain_timeline, read_timeline
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline
from tests.profile.test_static_plan import timelines


@pytest.fixture(scope="module")
def profile() -> MemoryProfile:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    return trace(model, torch.randn(32, 64), device="cuda", gpu="h100")


@given(timelines())
def test_a_timeline_is_read_as_it_was_written(timeline: Timeline) -> None:
    assert read_timeline(json.loads(json.dumps(plain_timeline(timeline)))) == timeline


@pytest.mark.parametrize("name", ["profile.json", "profile.json.gz"])
def test_a_profile_is_loaded_as_it_was_saved(profile, tmp_path, name):
    profile.save(tmp_path / name)
    loaded = MemoryProfile.load(tmp_path / name)
    assert loaded.figures() == profile.figures()
    assert loaded.allocator_peaks() == profile.allocator_peaks()
    assert loaded.table() == profile.table()
    assert loaded.by_module() == profile.by_module()
    loaded.save(tmp_path / "again.json")
    text = (tmp_path / name).read_bytes()
    text = gzip.decompress(text) + b"\n" if name.endswith(".gz") else text
    assert (tmp_path / "again.json").read_bytes() == text


def damaged(plain: dict[str, Any], chance: random.Random) -> bytes:
    """Return the file with one value replaced by another, or one byte gone."""
    if chance.random() < 0.2:
        text = bytearray(json.dumps(plain).encode())
        del text[chance.randrange(len(text))]
        return bytes(text)
    place: Any = plain
    while True:
        key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.1:
            break
        place = place[key]
    values = [None, -1, 10**400, 1.5, float("nan"), float("inf"), "", "forward", [], [[]], {}, True]
    hostile = ["\udc80", "\x1b[2J", ["\x1b[2J"], {"\x1b[2J": "\x9b"}, "</script><script>alert(1)"]
    place[key] = chance.choice([*values, *hostile])
    return json.dumps(plain).encode("utf-8", "surrogatepass")


def test_a_damaged_file_is_refused_or_read(profile, tmp_path, chance):
    """Never another error, wrong figures, or what a terminal or a browser would run."""
    file = tmp_path / "profile.json"
    profile.save(file)
    plain = file.read_text()
    unnamed = json.loads(plain)
    unnamed["allocator_peaks"]["eak"] = unnamed["allocator_peaks"].pop("peak")
    wrong = [damaged(json.loads(plain), chance) for _ in range(60)]
    for content in (json.dumps(unnamed).encode(), *wrong):
        file.write_bytes(content)
        with suppress(UsageError):
            loaded = MemoryProfile.load(file)
            assert loaded.peak == max(loaded.timeline.live_bytes(), default=0)
            shown = loaded.table() + str(loaded) + loaded.to_csv() + loaded.to_trace_events()
            assert "\x1b" not in shown
            assert "<script>alert" not in loaded.to_html()


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "1e999", "[" * 100_000, '{"kind": 1}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(UsageError, match="is not a profile saved by pytest-torchmem"):
        MemoryProfile.load(tmp_path / "file.json")


@given(timelines())
def test_rows_are_the_allocations(timeline: Timeline) -> None:
    rows = list(csv.DictReader(io.StringIO(exports.allocations_csv(timeline))))
    live = [0] * (len(timeline.events) + 1)
    for row in rows:
        stop = int(row["freed"]) if row["freed"] else len(live)
        for position in range(int(row["made"]), stop):
            live[position] += int(row["nbytes"])
    assert live[1:] == timeline.live_bytes()


@given(timelines())
def test_counters_add_up_to_what_is_alive(timeline: Timeline) -> None:
    events = json.loads(exports.trace_events("cpu", timeline))["traceEvents"]
    counted = [sum(event["args"].values()) for event in events if event["ph"] == "C"]
    assert counted == timeline.live_bytes()
    slices = [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    spans = sum(stop - start for start, stop, _ in timeline.spans())
    assert sum(duration for _, duration in slices) == spans


def test_trace_events_keep_to_the_format(profile: MemoryProfile) -> None:
    """What Perfetto's importer asks of every phase of event, or drops it
    (src/trace_processor/importers/json/json_trace_parser_impl.cc, ParseJsonPacket).
    """
    ends = dict[int, int]()
    for event in json.loads(profile.to_trace_events())["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
        if event["ph"] == "X":  # slices of a thread are in order, and none begins in another
            assert event["ts"] >= ends.get(event["tid"], 0)
            assert event["dur"] >= 0
            ends[event["tid"]] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
        else:
            assert event["ph"] == "M"
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)


def memory_snapshot(timeline: Timeline) -> dict[str, Any]:
    parts = parts_of(timeline, "")
    return {name: [list(one)] if isinstance(one, Iterator) else one for name, one in parts}


@settings(max_examples=30)
@given(timelines())
def test_a_snapshot_has_what_is_alive_piece_by_piece(timeline: Timeline) -> None:
    snapshot = memory_snapshot(timeline)
    requested = sum(segment["requested_size"] for segment in snapshot["segments"])
    assert requested == (timeline.live_bytes() or [0])[-1]
    for segment in snapshot["segments"]:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    file = io.BytesIO()
    write_memory_snapshot(timeline, file)
    assert pickle.loads(file.getvalue()) == memory_snapshot(timeline)


def test_a_snapshot_of_many_entries_is_read_as_it_was() -> None:
    lines = [f"{'x' * 100_000 * (number == 7)}model.py:{number}" for number in range(400)]
    origins = [Origin(Phase.FORWARD, "net", "aten::mm", line) for line in lines]
    kinds = list(Kind)
    made = [
        Allocation(1 << n % 34, kinds[n % 3], origins[n % 400 * (n < 2000)]) for n in range(4000)
    ]
    events = (one for n in range(1, 4001) for one in (n, 3 - n)[: 1 + (n > 3)])
    timeline = Timeline(tuple(made), tuple(events), ((0, Phase.FORWARD),))
    file = io.BytesIO()
    write_memory_snapshot(timeline, file)
    assert len(file.getvalue()) < 1_000_000
    assert pickle.loads(file.getvalue()) == memory_snapshot(timeline)


def test_the_tools_of_torch_read_the_snapshot(profile: MemoryProfile, tmp_path: Path) -> None:
    profile.to_memory_snapshot(tmp_path / "snapshot.pickle")
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert f"segments: {len(snapshot['segments'])}\n" in _memory_viz.segsum(snapshot)
    assert "alloc" in _memory_viz.trace(snapshot)
    assert "<html>" in _memory_viz.trace_plot(snapshot)
    live = peak = 0
    for entry in snapshot["device_traces"][0]:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        peak = max(peak, live)
    assert peak == profile.peak
    entries = snapshot["device_traces"][0]
    reserved = sum(one["size"] for one in entries if one["action"] == "segment_alloc")
    assert reserved == profile.reserved_peak  # nothing was given back


class Runs:
    """What a pickle of it would run, if it were read as a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it ran",)


def test_a_recording_of_a_gpu_is_a_profile(profile: MemoryProfile, tmp_path: Path) -> None:
    """What the trace writes for PyTorch's visualizer is as what a GPU has recorded."""
    profile.to_memory_snapshot(tmp_path / "recorded.pickle")
    loaded = MemoryProfile.load(tmp_path / "recorded.pickle")
    assert loaded.peak == profile.peak
    assert loaded.timeline.live_bytes() == profile.timeline.live_bytes()
    kinds, lines = {Kind.PARAMETER, Kind.GRADIENT}, {one.origin.line for one in _made(profile)}
    assert kinds <= {one.kind for one in loaded.timeline.allocations}
    assert {one.origin.line for one in _made(loaded)} == lines


def _made(profile: MemoryProfile) -> list[Allocation]:
    return [one for one in profile.timeline.allocations if one.origin.line]


def _entry(action: str, address: int, *frames: tuple[str, str]) -> dict[str, Any]:
    stack = [{"name": name, "filename": file, "line": 3} for name, file in frames]
    return {"action": action, "addr": address, "size": 1024, "frames": stack}


def test_what_a_recording_found_there_is_its_baseline(tmp_path: Path) -> None:
    block = {"state": "active_allocated", "address": 7, "size": 2048, "requested_size": 2000}
    recorded = {
        "device_traces": [
            [],
            [
                _entry("alloc", 1, ("at::_ops::empty_strided::call(", ""), ("f", "/x/model.py")),
                _entry("free_completed", 5),
                _entry("alloc", 2, ("at::_ops::empty::call(", ""), ("at::_ops::mm::call(", "")),
                _entry("alloc", 3, ("g", "/x/site-packages/torch/optim/sgd.py")),
                _entry("oom", 0),
            ],
        ],
        "segments": [{"device": 1, "blocks": [block]}, {"device": 0, "blocks": [block] * 3}],
    }
    (tmp_path / "recorded").write_bytes(pickle.dumps(recorded))
    profile = MemoryProfile.load(tmp_path / "recorded")
    assert (profile.baseline, profile.forward_peak) == (3024, 4048)
    assert (profile.backward_peak, profile.optimizer_peak) == (4048, 5072)
    origins = [one.origin for one in profile.timeline.allocations]
    assert origins[2:] == [
        Origin(Phase.FORWARD, operator="aten::empty_strided", line="/x/model.py:3"),
        Origin(Phase.BACKWARD, operator="aten::mm"),
        Origin(Phase.OPTIMIZER, line="torch/optim/sgd.py:3"),
    ]
    assert profile.to_html()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Runs()), "a recording has no builtins.print in it"),
        (pickle.dumps({"device_traces": [[]], "segments": []}), "it has no history"),
        (pickle.dumps({"device_traces": [], "segments": []}), "empty"),
        (pickle.dumps({"other": 1}), "device_traces"),
        (pickle.dumps([1])[:-2], "no recording"),
        (pickle.dumps({"device_traces": [[{"action": "alloc"}]], "segments": []}), "size"),
    ],
)
def test_another_pickle_is_refused(tmp_path, content, said, capsys):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UsageError, match="nor a recording of a GPU") as raised:
        MemoryProfile.load(tmp_path / "file")
    assert said in str(raised.value)
    assert not capsys.readouterr().out
