"""Exports: comma-separated values, a timeline for Perfetto and Chrome, one for PyTorch's page.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the timeline)

The snapshot is that of ``torch.cuda.memory._dump_snapshot``, for https://pytorch.org/memory_viz.
Its fields are those of torch/cuda/memory.py, ``_snapshot``, and of
``_memory_viz.profile_to_snapshot``, which has categories too. Its pickle is written piece by piece,
so that a list of millions of dictionaries is never in memory. The opcodes are those of
Lib/pickle.py, protocol 4. What comes more than once is written once, and fetched from the reader's
memo after that.
"""

from __future__ import annotations

import csv
import io
import json
import math
import pickle
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Return a header and a row for each allocation, in the order in which they were made.

    ``made`` and ``freed`` are positions among the events, from 1 on; ``freed`` is empty for what is
    alive at the end. A shape is written as ``2x3``.
    """
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
    positions, alike = samples(timeline, MOST_COUNTERS), Alike(timeline)
    names, groups = alike.grouped(by_kind)
    unused = {kind.value: 0 for kind in Kind}
    alive = alike.bytes_in_groups(positions, groups, len(names))
    for position, live in zip(positions, alive, strict=True):
        if position:
            args = unused | dict(zip(names, live, strict=True))
            yield _event("C", "bytes alive", ts=position, args=args)


def _peak(timeline: Timeline) -> Iterator[str]:
    peaks = timeline.peaks()
    if not peaks:
        return
    nbytes, position = max(peaks.values(), key=lambda found: found[0])
    yield _thread(_PEAK, "peak")
    yield _event("i", f"peak: {nbytes:,} bytes", s="p", tid=_PEAK, ts=position)


_BATCH = 1000
"""Elements of a list that a reader holds before it adds them; as in ``pickle.Pickler``."""
_REMEMBERED = 100_000
"""Beginnings of rows that are kept as they are written."""
_LARGE = 1 << 31
_OPEN = pickle.EMPTY_DICT + pickle.MARK
_SMALL = pickle.BININT
"""Before the four bytes of a number that has no sign."""
_FOUR_BYTES = struct.Struct("<I")


class Rows(NamedTuple):
    """Dictionaries of the same names, in the order of ``names``, as what they are made of.

    A row is the values of the names before ``changing``, its value, and those of the names after
    it: what differs from row to row stands between what comes again and again. Rows that follow
    each other come together, as a key for what each has before it (``before`` returns that), the
    first one's value, which counts up, and what all have after it. That is one object wherever it
    comes again, which lives until the end.
    """

    names: Sequence[str]
    changing: str
    before: Callable[[Any], tuple[tuple[Any, ...], ...]]
    rows: Iterable[tuple[Any, int, tuple[Any, ...]]]


class PickleWriter:
    """Writes a dictionary, of which some values are rows that are made as they are written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[Any, bytes] = {}
        """What fetches a text, or an object by its id, from the memo."""

    def dictionary(self, values: Iterable[tuple[str, Any]]) -> None:
        """Write a dictionary; ``Rows`` become a list of dictionaries in a list."""
        write = self._file.write
        write(pickle.PROTO + bytes([4]) + pickle.EMPTY_DICT + pickle.MARK)
        for name, value in values:
            write(self._text(name))
            if isinstance(value, Rows):
                write(pickle.EMPTY_LIST)
                self._list(value)
                write(pickle.APPEND)
            else:
                write(_whole(value))
        write(pickle.SETITEMS + pickle.STOP)

    def _list(self, table: Rows) -> None:
        heads: dict[Any, list[bytes]] = {}
        tails: dict[int, bytes] = {}
        self._file.write(pickle.EMPTY_LIST)
        batch, rows, four_bytes = [pickle.MARK], 0, _FOUR_BYTES.pack
        for key, changing, last in table.rows:
            beginnings, end = heads.get(key), tails.get(id(last))
            if beginnings is None or end is None or changing > _LARGE - len(beginnings):
                several = table.before(key)
                for number, first in enumerate(several, changing):
                    batch += self._head(table, first), _number(number), self._tail(table, last)
                # As they are written when they come again.
                tails[id(last)] = self._tail(table, last)
                if len(heads) < _REMEMBERED:
                    heads[key] = [self._head(table, first) + _SMALL for first in several]
                rows += len(several)
            elif len(beginnings) == 1:
                batch += beginnings[0], four_bytes(changing), end
                rows += 1
            else:
                for beginning in beginnings:
                    batch += beginning, four_bytes(changing), end
                    changing += 1
                rows += len(beginnings)
            if rows >= _BATCH:
                batch.append(pickle.APPENDS)
                self._file.write(b"".join(batch))
                batch, rows = [pickle.MARK], 0
        batch.append(pickle.APPENDS)
        self._file.write(b"".join(batch))

    def _head(self, table: Rows, values: Iterable[Any]) -> bytes:
        """Return a row up to the value that changes."""
        names = table.names[: table.names.index(table.changing)]
        return _OPEN + self._items(names, values) + self._text(table.changing)

    def _tail(self, table: Rows, values: Iterable[Any]) -> bytes:
        names = table.names[table.names.index(table.changing) + 1 :]
        return self._items(names, values) + pickle.SETITEMS

    def _items(self, names: Iterable[str], values: Iterable[Any]) -> bytes:
        return b"".join(
            [
                part
                for name, value in zip(names, values, strict=True)
                for part in (self._text(name), self._value(value))
            ]
        )

    def _value(self, value: Any) -> bytes:
        if type(value) is int:
            return _number(value)
        if type(value) is str:
            return self._text(value)
        return self._places.get(id(value)) or self._memoized(id(value), _whole(value))

    def _text(self, text: str) -> bytes:
        return self._places.get(text) or self._memoized(text, _whole(text))

    def _memoized(self, key: Any, written: bytes) -> bytes:
        place = len(self._places)
        self._places[key] = (
            pickle.BINGET + bytes([place])
            if place < 256
            else pickle.LONG_BINGET + struct.pack("<I", place)
        )
        return written + pickle.MEMOIZE


def _number(number: int) -> bytes:
    if 0 <= number < _LARGE:
        return _SMALL + number.to_bytes(4, "little")
    written = pickle.encode_long(number)
    return pickle.LONG1 + bytes([len(written)]) + written


def _whole(value: Any) -> bytes:
    """Return the opcodes of a value, which leave the reader's memo as it is."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(value)
    written = file.getvalue()[2:-1]  # without protocol and end
    if written[:1] == pickle.FRAME:
        return written[9:]
    return written


_About: TypeAlias = tuple[list[dict[str, Any]], str]
"""The stack and the category of an allocation."""
_Blocks: TypeAlias = dict[int, tuple[Block, _About]]
"""Blocks by the events that asked for them."""
_Change: TypeAlias = tuple[int, int] | tuple[int, int, str]
"""An address and its bytes, negative ones given back; of a segment the action, too."""
_Entry: TypeAlias = tuple[_Change, int, _About]
"""Of one event: what it changes, and the number of its first entry."""
_FIELDS = ("action", "addr", "size", "stream", "time_us", "frames", "category")


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
    in_use = most = 0
    for position, event in enumerate(timeline.events):
        if event < 0:
            if event_made := live.pop(-event, None):
                block, one = event_made
                allocator.free(block)
                in_use -= one.nbytes
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
        in_use += one.nbytes
        most = max(most, in_use)
    placed += [one for _, one in live.values()]
    sizes = accumulate((nbytes for _, nbytes, _ in reserved), initial=0)
    offsets = sorted(zip((address for address, *_ in reserved), sizes, strict=False))
    for index, one in enumerate(placed):
        address, offset = offsets[bisect_right(offsets, (one.offset, math.inf)) - 1]
        placed[index] = one._replace(offset=offset + one.offset - address)
    by_address = dict(offsets)
    segments_made = [(by_address[address], nbytes, at) for address, nbytes, at in reserved]
    return Layout(allocator.reserved, most, segments_made, placed)


def write_memory_snapshot(timeline: Timeline, file: BinaryIO, allocator: str = "") -> None:
    """Write what the caching allocator has after the timeline, and everything that it did, entry by
    entry: there are more than allocations.

    The requests are replayed on one stream; ``allocator`` is written as for
    ``PYTORCH_ALLOC_CONF``. Frames name the line, the module and the operator of an allocation.
    """
    PickleWriter(file).dictionary(parts_of(timeline, allocator))


def parts_of(timeline: Timeline, allocator: str) -> Iterator[tuple[str, Any]]:
    """Yield names and values; ``Rows`` are to be taken before the next one."""
    replayed = CachingAllocator(parse_options(allocator))
    replayed.statistics = NoStatistics()
    blocks: _Blocks = {}
    yield "device_traces", Rows(_FIELDS, "time_us", _written, _entries(timeline, replayed, blocks))
    frames = {block.address: told[0] for block, told in blocks.values()}
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
    allocations, shared = timeline.allocations, dict[tuple[int, str, Kind], _About]()
    allocate, free, take = allocator.allocate, allocator.free, blocks.pop
    reserved = noted = 0
    for event in timeline.events:
        if event < 0:
            freed = take(-event, None)
            if freed is None:
                continue
            block, told = freed
            change = block.address, -block.requested
            free(block)
            yield change, noted, told
            noted += 2
            continue
        found = allocations[event - 1]
        served = allocate(found.nbytes)
        if served is None:  # it asks for no bytes
            continue
        key = id(found.origin), found.label, found.kind
        if key not in shared:
            shared[key] = frames_of(found), found.kind.value.replace(" ", "_")
        block, told = blocks[event] = served, shared[key]
        if allocator.reserved != reserved:
            grown, reserved = allocator.reserved - reserved, allocator.reserved
            if grown > 0:
                action = "segment_alloc" if block.expandable is None else "segment_map"
                yield (block.address, grown, action), noted, told
                noted += 1
        yield (block.address, block.requested), noted, told
        noted += 1


def _written(change: _Change) -> tuple[tuple[str, int, int, int], ...]:
    """Return action, address, size and stream of the entries of a change."""
    address, nbytes, *segment = change
    if segment:
        return ((segment[0], address, nbytes, 0),)
    if nbytes > 0:
        return (("alloc", address, nbytes, 0),)
    return ("free_requested", address, -nbytes, 0), ("free_completed", address, -nbytes, 0)


def frames_of(found: Allocation) -> list[dict[str, Any]]:
    """Return the stack of an allocation as torch writes one, the innermost frame first."""
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
