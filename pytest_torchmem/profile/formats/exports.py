"""Exports: comma-separated values, a timeline for Perfetto and Chrome, one for PyTorch's page.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the timeline)

The snapshot is that of ``torch.cuda.memory._dump_snapshot``, for https://pytorch.org/memory_viz.
Its fields are those of torch/cuda/memory.py, ``_snapshot``, and of
``_memory_viz.profile_to_snapshot``, which has categories too. Its pickle is written piece by piece,
so that a list of millions of dictionaries is never in memory. What comes more than once is written
once, and fetched from the reader's memo after that.
"""

import csv
import io
import json
import math
import pickle
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from pytest_torchmem.allocator.caching import CachingAllocator, segments
from pytest_torchmem.allocator.device_memory import Block, NoStatistics, parse_options
from pytest_torchmem.profile.sampled import Alike, by_kind, samples
from pytest_torchmem.profile.static_plan import Placed
from pytest_torchmem.profile.timeline import Allocation, Kind, Timeline

COLUMNS = (
    *("index", "nbytes", "kind", "phase", "module", "operator", "line"),
    *("dtype", "shape", "label", "confidence", "made", "freed"),
)


def allocations_csv(timeline: Timeline) -> str:
    """Return a header and a row for each allocation; what is alive at the end is not ``freed``."""
    freed = array("q", bytes(8 * (len(timeline.allocations) + 1)))
    for position, event in enumerate(timeline.events, start=1):
        if event < 0:
            freed[-event] = position
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(COLUMNS)
    told: dict[Allocation, str] = {}
    for position, event in enumerate(timeline.events, start=1):
        if event < 0:
            continue
        found = timeline.allocations[event - 1]
        columns = told.get(found)
        if columns is None:
            columns = told[found] = _columns(found)
        text.write(f"{event},{columns},{position},{freed[event] or ''}\n")
    return text.getvalue()


def _columns(found: Allocation) -> str:
    """Return what is told of all allocations that are alike, from ``nbytes`` to ``confidence``."""
    origin, text = found.origin, io.StringIO()
    csv.writer(text, lineterminator="").writerow(
        (
            found.nbytes,
            found.kind.value,
            origin.phase.value,
            origin.module,
            origin.operator,
            origin.line,
            found.dtype,
            "x".join(map(str, found.shape)),
            found.label,
            found.confidence.value,
        )
    )
    return text.getvalue()


_PHASES, _PEAK = 1, 2
MOST_COUNTERS = 200_000
"""Viewers take minutes for more: those of a longer timeline tell the most of several events."""


def trace_events(name: str, timeline: Timeline) -> str:
    """Return counters of the bytes alive by kind, a slice for each phase, and a mark at the peak.

    There is no time in a trace: an event of the timeline is a microsecond. Of a timeline with more
    than ``MOST_COUNTERS`` events a counter is the most of several, and every peak is among them.
    """
    slices = (
        _event("X", phase.value, tid=_PHASES, ts=start, dur=stop - start)
        for start, stop, phase in timeline.spans()
    )
    named = _event("M", "process_name", args={"name": name})
    parts = [named, _thread(_PHASES, "phases"), *slices, *_counters(timeline), *_peak(timeline)]
    end = json.dumps({"displayTimeUnit": "ns", "otherData": {"unit": "bytes"}})
    return f'{{"traceEvents": [{", ".join(parts)}], {end[1:]}'


def _event(kind: str, name: str, **others: Any) -> str:
    """Return an event of a kind, as the format calls them: metadata, a slice, a counter, …"""
    return json.dumps({"ph": kind, "pid": 1, "name": name, **others})


def _thread(number: int, name: str) -> str:
    return _event("M", "thread_name", tid=number, args={"name": name})


def _counters(timeline: Timeline) -> Iterator[str]:
    """Yield all kinds together: viewers stack the values of one counter."""
    positions = samples(timeline, MOST_COUNTERS)
    names, alive = Alike(timeline).grouped(by_kind, positions)
    unused = {kind.value: 0 for kind in Kind}
    for position, live in zip(positions, alive, strict=True):
        if position:
            args = unused | dict(zip(names, live, strict=True))
            yield _event("C", "bytes alive", ts=position, args=args)


def _peak(timeline: Timeline) -> Iterator[str]:
    if timeline.phases:
        nbytes, position = timeline.peak()
        yield _thread(_PEAK, "peak")
        yield _event("i", f"peak: {nbytes:,} bytes", s="p", tid=_PEAK, ts=position)


_BATCH = 1000
"""Entries that a reader holds before it adds them to the list; as in ``pickle.Pickler``."""
_Entry: TypeAlias = dict[str, Any]
_Blocks: TypeAlias = dict[int, tuple[Block, _Entry]]
"""Blocks, and what their entries have in common, by the events that asked for them."""


class Layout(NamedTuple):
    """The segments of the caching allocator, one upon another, and the blocks in them."""

    reserved: int
    allocated: int
    """The most bytes that blocks had at once."""
    segments: list[tuple[int, int, int]]
    """Offset, bytes, and the number of the event that each was made for."""
    blocks: list[Placed]


def layout(timeline: Timeline) -> Layout:
    """Return the caching allocator's layout with its default options and unlimited memory."""
    allocator = CachingAllocator(parse_options(""))
    live: dict[int, tuple[Block, Placed]] = {}
    placed: list[Placed] = []
    reserved: list[tuple[int, int, int]] = []
    for position, event in enumerate(timeline.events):
        if event < 0:
            if event_made := live.pop(-event, None):
                block, one = event_made
                allocator.free(block)
                placed.append(one._replace(stop=position))
            continue
        allocation, before = timeline.allocations[event - 1], allocator.reserved
        served = allocator.allocate(allocation.nbytes)
        if served is None:  # it asks for no bytes
            continue
        if allocator.reserved > before:
            reserved.append((served.address, allocator.reserved - before, position))
        one = Placed(served.address, served.size, position, len(timeline.events), allocation)
        live[event] = served, one
    placed += [one for _, one in live.values()]
    sizes = accumulate((nbytes for _, nbytes, _ in reserved), initial=0)
    offsets = sorted(zip((address for address, *_ in reserved), sizes, strict=False))
    for index, one in enumerate(placed):
        address, offset = offsets[bisect_right(offsets, (one.offset, math.inf)) - 1]
        placed[index] = one._replace(offset=offset + one.offset - address)
    by_address = dict(offsets)
    segments_made = [(by_address[address], nbytes, at) for address, nbytes, at in reserved]
    most = allocator.statistics.all.allocated_bytes.peak
    return Layout(allocator.reserved, most, segments_made, placed)


def write_memory_snapshot(timeline: Timeline, file: BinaryIO, allocator: str = "") -> None:
    """Write what the caching allocator has after the timeline, and all that it did, one by one."""
    part = io.BytesIO()
    pickler = pickle.Pickler(part, protocol=3)  # in later ones the memo's places have no numbers

    def written(value: Any) -> bytes:
        part.seek(0)
        part.truncate()
        pickler.dump(value)
        return part.getvalue()[2:-1]  # without protocol and end

    file.write(pickle.PROTO + bytes([3]) + pickle.EMPTY_DICT + pickle.MARK)
    for name, value in parts_of(timeline, allocator):
        file.write(written(name))
        if not isinstance(value, Iterator):
            file.write(written(value))
            continue
        file.write(pickle.EMPTY_LIST + pickle.EMPTY_LIST)  # entries are those of one device
        for entries in _batches(value):
            pickler.fast = isinstance(entries, list)  # the memo is read then, and not written to
            found = written(entries)
            found = found.removeprefix(pickle.EMPTY_LIST) if pickler.fast else found + pickle.APPEND
            file.write(found)
        file.write(pickle.APPEND)
        pickler.fast = False
    file.write(pickle.SETITEMS + pickle.STOP)


def _batches(entries: Iterable[_Entry]) -> Iterator[_Entry | list[_Entry]]:
    """Yield an entry whose texts or stack are new by itself, and lists of others, all in order."""
    known: set[str | int] = set()
    batch: list[_Entry] = []
    for entry in entries:
        action, stack = entry["action"], id(entry["frames"])
        is_new = not (action in known and stack in known)
        if is_new or len(batch) == _BATCH:
            yield batch
            batch = []
        if is_new:
            known.update((action, stack))
            yield entry
        else:
            batch.append(entry)
    yield batch


def parts_of(timeline: Timeline, allocator: str) -> Iterator[tuple[str, Any]]:
    """Yield names and values; the entries are to be taken before the next one."""
    replayed = CachingAllocator(parse_options(allocator))
    replayed.statistics = NoStatistics()
    blocks: _Blocks = {}
    yield "device_traces", _entries(timeline, replayed, blocks)
    frames = {block.address: shared["frames"] for block, shared in blocks.values()}
    reserved = segments(replayed)
    for segment in reserved:
        for block in segment["blocks"]:
            block["frames"] = frames.get(block["address"], [])
    yield "segments", reserved
    yield "external_annotations", []
    yield "allocator_settings", {"PYTORCH_ALLOC_CONF": allocator}


def _entries(timeline: Timeline, allocator: CachingAllocator, blocks: _Blocks) -> Iterator[_Entry]:
    """Yield what is written down of each event; ``blocks`` has those that are in use.

    Entries share the stacks of allocations, as those of torch do: by the ids of origins, which the
    timeline holds.
    """
    allocations, common = timeline.allocations, dict[tuple[int, str, Kind], _Entry]()
    reserved = noted = 0

    def entry(action: str, address: int, nbytes: int, shared: _Entry) -> _Entry:
        nonlocal noted
        noted += 1
        return {
            "action": action,
            "addr": address,
            "size": nbytes,
            "stream": 0,
            "time_us": noted - 1,
            **shared,
        }

    for event in timeline.events:
        if event < 0:
            if (freed := blocks.pop(-event, None)) is not None:
                block, shared = freed
                for action in ("free_requested", "free_completed"):
                    yield entry(action, block.address, block.requested, shared)
                allocator.free(block)
            continue
        found = allocations[event - 1]
        served = allocator.allocate(found.nbytes)
        if served is None:  # it asks for no bytes
            continue
        key = id(found.origin), found.label, found.kind
        if key not in common:
            category = found.kind.value.replace(" ", "_")
            common[key] = {"frames": frames_of(found), "category": category}
        blocks[event] = served, common[key]
        grown, reserved = allocator.reserved - reserved, allocator.reserved
        if grown > 0:
            action = "segment_alloc" if served.expandable is None else "segment_map"
            yield entry(action, served.address, grown, common[key])
        yield entry("alloc", served.address, served.requested, common[key])


def frames_of(found: Allocation) -> list[dict[str, Any]]:
    origin = found.origin
    file, _, line = origin.line.rpartition(":")
    frames = [{"name": origin.operator, "filename": "torch", "line": 0}] if origin.operator else []
    if origin.line:
        number = int(line) if line.isdecimal() else 0
        named = file if number else origin.line
        frames.append({"name": origin.module, "filename": named, "line": number})
    elif origin.module or found.label:
        frames.append({"name": found.label or origin.module, "filename": "", "line": 0})
    return frames
