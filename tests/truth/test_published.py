"""Recordings of real GPUs: how they are read and replayed, and figures of some that were published.

The recordings themselves are no part of this repository (``python -m benchmarks.truth.published``
compares with them). Snapshots here are made by the replay itself, in the form torch gives them.
"""

import gzip
import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.truth.published import gpt, peaks
from benchmarks.truth.published.kineto import compare_step, read_step
from benchmarks.truth.published.peaks import FORMER, Figure, figures, peak, traced
from benchmarks.truth.published.programs import recording
from benchmarks.truth.published.replaying import Outcome, replay
from benchmarks.truth.published.snapshots import (
    History,
    SnapshotError,
    histories,
    histories_of,
    plain,
)
from benchmarks.truth.published.sources import sources
from benchmarks.truth.published.traced import PROGRAMS, highest, traced_events
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.device_memory import Addresses, Block, parse_options

MIB = 2**20
SMALL = "Charan6924/assignment2-systems cs336_systems/memory_snapshot.pickle"
MEDIUM = "Wedsonlin/assignment2-systems results/medium_128_training_memory_snapshot.pickle"


class Places(Addresses):
    """Addresses that are not in order."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._places = chance.sample(range(1, 4096), 4095)

    def take(self, size: int) -> int:
        return self._places.pop() << 45

    def give_back(self, address: int, size: int) -> None:
        pass


class Recorder(CachingAllocator):
    """An allocator that writes down what it does, on addresses that a driver might give."""

    def __init__(self, options: str, chance: random.Random) -> None:
        super().__init__(parse_options(options))
        self.text, self.chance = options, chance
        self.trace: list[dict[str, Any]] = []
        self.addresses = Places(chance)

    def note(self, action: str, address: int, size: int) -> None:
        self.trace.append({"action": action, "addr": address, "size": size, "stream": 0})

    def request(self, nbytes: int) -> Block:
        before = self.segments()
        block = self.allocate(nbytes)
        for address, size in self.segments().items():
            if address not in before:
                self.note("segment_alloc", address, size)
        self.note("alloc", block.address, nbytes)
        return block

    def give_back(self, block: Block) -> None:
        self.note("free_requested", block.address, block.requested)
        self.note("free_completed", block.address, block.requested)
        self.free(block)

    def empty(self) -> None:
        """Empty the cache, and write down what went."""
        before = self.segments()
        self.empty_cache()
        for address in before.keys() - self.segments().keys():
            self.note("segment_free", address, before[address])

    def segments(self) -> dict[int, int]:
        """Return the bytes of each segment by its address."""
        return {blocks[0].address: sum(block.size for block in blocks) for blocks in self._chains()}

    def snapshot(self, from_event: int = 0) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot`` would."""
        segments = []
        for blocks in self._chains():
            whole = {"address": blocks[0].address, "total_size": sum(one.size for one in blocks)}
            kind = "small" if blocks[0].pool.is_small else "large"
            parts = {"segment_type": kind, "blocks": [*map(_as_recorded, blocks)]}
            segments.append({"device": 0, "stream": 0, **whole, **parts})
        return {
            "segments": segments,
            "device_traces": [self.trace[from_event:]],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.text},
        }

    def _chains(self) -> Iterator[list[Block]]:
        for block in self.blocks():
            if block.before is None:
                chain = [block]
                while chain[-1].after is not None:
                    chain.append(chain[-1].after)
                yield chain


def _as_recorded(block: Block) -> dict[str, Any]:
    state = "active_allocated" if block.allocated else "inactive"
    sizes = {"size": block.size, "requested_size": block.requested}
    return {"address": block.address, **sizes, "state": state}


def recorded(chance: random.Random, options: str = "") -> tuple[Recorder, int]:
    """Return a recorder after a program, and the event at which a recording might begin."""
    recorder = Recorder(options, chance)
    live: list[Block] = []
    begin = 0
    for step in range(600):
        if step == 300:
            begin = len(recorder.trace)
        if live and chance.random() < 0.48:
            recorder.give_back(live.pop(chance.randrange(len(live))))
        elif chance.random() < 0.02:
            recorder.empty()
        else:
            live.append(recorder.request(int(2 ** chance.uniform(2, 26))))
    return recorder, begin


@pytest.mark.parametrize("program", range(6))
@pytest.mark.parametrize("options", ["", "max_split_size_mb:32"])
def test_a_recording_is_replayed_from_its_beginning(program, options, chance):
    recorder, _ = recorded(chance, options)
    (history,) = histories_of(recorder.snapshot())
    outcome = replay(history)
    assert outcome.is_exact, outcome
    assert outcome.requests == history.requests > 0
    assert outcome.reserved_end == (recorder.reserved, recorder.reserved)


#: Programs whose recording, begun in its midst, does not tell what a block had that it frees: of
#: what was split off behind it, nothing is seen (benchmarks/truth/published/beginning.py, _size).
AMBIGUOUS = pytest.mark.xfail(
    strict=True, reason="moves 1 of 145 requests: the size of a block is not in the recording"
)


def from_the_midst(seed: int, options: str) -> tuple[Outcome, Recorder]:
    recorder, begin = recorded(random.Random(seed), options)
    (history,) = histories_of(recorder.snapshot(begin))
    return replay(history), recorder


@pytest.mark.parametrize("options", ["", "max_split_size_mb:32"])
@pytest.mark.parametrize("seed", [*range(6), pytest.param(1039, marks=AMBIGUOUS)])
def test_a_recording_is_replayed_from_its_midst(seed: int, options: str) -> None:
    outcome, recorder = from_the_midst(seed, options)
    assert outcome.is_exact, outcome
    assert outcome.requests > 0
    assert outcome.reserved_end == (recorder.reserved, recorder.reserved)


@pytest.mark.parametrize("options", ["", "max_split_size_mb:32"])
def test_a_size_that_is_not_recorded_moves_a_request_and_reserves_the_same(options: str) -> None:
    outcome, recorder = from_the_midst(1039, options)
    assert (outcome.moved, outcome.requests) == (1, 145)
    assert outcome.reserved_peak[0] == outcome.reserved_peak[1]
    assert outcome.reserved_end == (recorder.reserved, recorder.reserved)


def _other_address(snapshot: dict[str, Any]) -> None:
    """Let two requests of one size have changed places."""
    trace = snapshot["device_traces"][0]
    first = next(entry for entry in trace if entry["action"] == "alloc" and entry["size"] < MIB)
    first["addr"] += 512
    for entry in trace[trace.index(first) + 1 :]:
        if entry["addr"] == first["addr"] - 512 and entry["action"].startswith("free"):
            entry["addr"] += 512
            if entry["action"] == "free_completed":
                break


def _other_segment(snapshot: dict[str, Any]) -> None:
    entry = next(e for e in snapshot["device_traces"][0] if e["action"] == "segment_alloc")
    entry["size"] += 2 * MIB


def _other_block(snapshot: dict[str, Any]) -> None:
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    free = max((block for block in blocks if block["state"] == "inactive"), key=lambda b: b["size"])
    free["size"] -= 512


@pytest.mark.parametrize("change", [_other_address, _other_segment, _other_block])
def test_what_is_not_the_same_is_found(change: Callable[[dict[str, Any]], None]) -> None:
    snapshot = recorded(random.Random(2))[0].snapshot()
    change(snapshot)
    (history,) = histories_of(snapshot)
    outcome = replay(history)
    assert not outcome.is_exact
    assert outcome.first


def test_a_segment_that_is_not_released_is_an_error() -> None:
    snapshot = recorded(random.Random(1))[0].snapshot()
    trace = snapshot["device_traces"][0]
    trace.remove(next(entry for entry in trace if entry["action"] == "segment_free"))
    with pytest.raises(SnapshotError, match=r"the segment at .* is never seen again"):
        replay(histories_of(snapshot)[0])


def expandable() -> dict[str, Any]:
    """Return a snapshot of an expandable segment of two pages, with two requests."""
    base = 0x602000000
    trace = [
        ("segment_map", base, 20 * MIB),
        ("alloc", base, 16 * MIB),
        ("segment_map", base + 20 * MIB, 20 * MIB),
        ("alloc", base + 16 * MIB, 16 * MIB),
        ("free_requested", base, 16 * MIB),
        ("free_completed", base, 16 * MIB),
    ]
    sizes = [(16 * MIB, "inactive"), (16 * MIB, "active_allocated"), (8 * MIB, "inactive")]
    segment = {"device": 0, "address": base, "total_size": 40 * MIB, "stream": 0}
    blocks = [{"size": size, "requested_size": size, "state": state} for size, state in sizes]
    events = [dict(zip(("action", "addr", "size"), event, strict=True)) for event in trace]
    return {
        "segments": [segment | {"segment_type": "large", "blocks": blocks}],
        "device_traces": [[event | {"stream": 0} for event in events]],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }


def test_expandable_segments_are_replayed() -> None:
    (history,) = histories_of(expandable())
    assert history.is_expandable
    outcome = replay(history)
    assert outcome.is_exact, outcome
    assert outcome.reserved_peak == (40 * MIB, 40 * MIB)


def test_expandable_segments_may_be_there_before_the_recording_begins() -> None:
    """A block that can grow is taken after one that cannot, though it fits better."""
    snapshot = expandable()
    base = snapshot["segments"][0]["address"]
    request = {"action": "alloc", "addr": base, "size": 8 * MIB, "stream": 0}
    snapshot["device_traces"][0] = [*snapshot["device_traces"][0][4:], request]
    snapshot["segments"][0]["blocks"] = [
        {"size": 8 * MIB, "requested_size": 8 * MIB, "state": "active_allocated"},
        {"size": 8 * MIB, "state": "inactive"},
        *snapshot["segments"][0]["blocks"][1:],
    ]
    outcome = replay(histories_of(snapshot)[0])
    assert outcome.is_exact, outcome
    assert (outcome.requests, outcome.reserved_peak) == (1, (40 * MIB, 40 * MIB))


def test_a_snapshot_is_read_from_a_file_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorded(random.Random(2))[0].snapshot()))
    assert isinstance(histories(path)[0], History)
    with pytest.raises(SnapshotError, match=r"has no pathlib\.[\w.]+ in it"):
        plain(pickle.dumps(tmp_path))
    with pytest.raises(SnapshotError, match="not a pickle"):
        plain(b"<html>")
    with pytest.raises(SnapshotError, match="not a snapshot"):
        histories_of({"some": "thing"})


def test_events_that_do_not_fit_the_end_are_an_error() -> None:
    snapshot = recorded(random.Random(3))[0].snapshot()
    snapshot["segments"] = []
    with pytest.raises(SnapshotError, match="never seen again"):
        replay(histories_of(snapshot)[0])


def test_every_program_has_its_source() -> None:
    found = sources()
    assert {source.name for source in found} >= set(PROGRAMS)
    assert len({source.url for source in found}) == len(found)
    assert all(len(source.commit) == 40 and len(source.sha256) == 64 for source in found)


# Figures that these recordings have: the peak of what was requested in the recorded part, and the
# bytes that the process had reserved at its end. torch 2.11.0, GPU not named.
@pytest.mark.parametrize(
    ("name", "peak", "reserved", "requests"),
    [(SMALL, 247_959_552, 937_426_944, 3221), (MEDIUM, 1_918_013_444, 7_235_174_400, 6526)],
)
def test_traces_give_what_was_recorded_on_real_gpus(name, peak, reserved, requests):
    events, traced, unknown = traced_events(*PROGRAMS[name])
    assert highest(events) == peak
    assert traced == reserved
    assert sum(1 for size in events if size > 0) == requests
    assert not unknown


def test_a_step_of_a_profiler_trace(tmp_path: Path) -> None:
    import torch

    def program() -> None:
        with recording():
            torch.empty(1000, device="cuda").add(1)

    def span(name: str, start: int, stop: int) -> dict[str, Any]:
        times = {"ts": start, "dur": stop - start}
        return {"ph": "X", "cat": "Operator", "name": name, "tid": 7, "args": {}} | times

    def memory(time: int, nbytes: int, device: int = 1) -> dict[str, Any]:
        args = {"Device Type": device, "Device Id": 0, "Bytes": nbytes}
        return {"ph": "i", "name": "[memory]", "tid": "7", "ts": time, "args": args}

    trace = {
        "deviceProperties": [{"name": "Tesla V100"}],
        "traceEvents": [
            *(span("ProfilerStep#1", 0, 9), span("ProfilerStep#2", 10, 99), memory(5, 512)),
            *(span("aten::empty", 11, 13), memory(12, 4096), memory(12, 64, device=0)),
            *(span("aten::add", 20, 40), span("aten::empty", 21, 23), memory(22, 4608)),
            *(memory(50, -4608), memory(51, -4096)),
        ],
    }
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    step = read_step(path, 1)
    assert step.events == (4096, 4608, -4608, -4096)
    assert step.operators[:3] == ("aten::empty", "aten::add > aten::empty", "")
    found = compare_step(step, program, "v100")
    assert (found.requests, found.same, found.peak) == ((2, 2), 1, (8192, 8704))
    assert found.only_recorded == {"aten::add > aten::empty": 1}
    with pytest.raises(SnapshotError, match="has 2 steps"):
        read_step(path, 2)


def figure(program: str) -> Figure:
    return next(one for one in figures() if one.program == program)


def test_every_figure_has_its_program_and_source() -> None:
    found = figures()
    assert {one.program for one in found} <= set(peaks.PROGRAMS)
    assert len({one.name for one in found}) == len(found)
    assert all(len(one.commit) == 40 and one.licence for one in found)
    assert {one.quantity for one in found} == {"allocated", "reserved"}


def test_an_error_within_the_rounding_is_none() -> None:
    one = figure("vit/03")
    assert (one.published, one.unit) == ("13.82", "GB")
    assert one.nbytes == 13_820_000_000
    assert [one.error(nbytes) for nbytes in (13_824_999_999, 13_815_000_001)] == [0, 0]
    assert one.error(13_826_000_000) == 6_000_000
    assert one.text(13_826_000_000) == "13.83 GB"
    other = figure("t5/All")
    assert other.text(other.nbytes) == "35,859,657,728"
    assert other.error(other.nbytes + 512) == 512


# A forward of T5 with its scores written out, and one of Mistral with attention in flash's kernel:
# what was allocated on a GPU that is not named, to the byte. Flash attention then had its seed and
# offset on the host (native/transformers/cuda/flash_attn/flash_api.cpp, mha_fwd), and has them on
# the GPU now: 512 bytes each in 32 layers.
@pytest.mark.parametrize(("program", "since"), [("t5/Input", 0), ("mistral-7b/Input", 32 * 1024)])
def test_forwards_allocate_what_was_measured(program: str, since: int) -> None:
    published = figure(program)
    profile = traced(peaks.PROGRAMS[program](), published.gpu)
    assert peak(profile, "allocated") - published.nbytes == since
    assert not profile.unknown_workspaces


def test_training_reserves_what_was_measured() -> None:
    profile = traced(gpt.training(gpt.Variant(), steps=2, every=1, words=2), "a100-40gb")
    assert figure("gpt/baseline").error(peak(profile, "reserved")) == 0
    profile = traced(FORMER["vit/03"](), "a100-40gb")
    assert figure("vit/03").error(peak(profile, "reserved")) == 0


def test_other_addresses_reserve_another_sum() -> None:
    variant = gpt.Variant(False, True, True, True, one_kernel=True)
    profile = traced(gpt.training(variant, steps=2, every=1, words=2), "a100-40gb")
    found = {figure("gpt/7").error(peaks.scattered(profile, seed)) for seed in range(8)}
    assert 0 in found
    assert len(found) > 1


def test_the_table_names_what_is_left_out(monkeypatch, capsys):
    one = figure("resnet101/All")

    def missing() -> peaks.Program:
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(peaks, "PROGRAMS", {one.program: missing})
    assert one.name not in peaks.table([one])
    assert "left out: ResNet-101: All: No module named 'torchvision'" in capsys.readouterr().out
