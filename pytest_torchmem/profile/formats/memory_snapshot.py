"""The snapshot of ``torch.cuda.memory._dump_snapshot``, for PyTorch's memory visualizer.

https://pytorch.org/memory_viz; the fields are those of torch/cuda/memory.py, ``_snapshot``, and
of ``_memory_viz.profile_to_snapshot``, which has categories too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias

from pytest_torchmem.allocator.blocks import Block
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.options import parse_options
from pytest_torchmem.allocator.segments import segments
from pytest_torchmem.allocator.statistics import NoStatistics
from pytest_torchmem.profile.formats.pickles import PickleWriter, Rows
from pytest_torchmem.profile.timeline import Allocation, Kind, Timeline

_About: TypeAlias = tuple[list[dict[str, Any]], str]
"""The stack and the category of an allocation."""
_Blocks: TypeAlias = dict[int, tuple[Block, _About]]
"""Blocks by the events that asked for them."""
_Change: TypeAlias = tuple[int, int] | tuple[int, int, str]
"""An address, and the bytes that are asked for there or, negative, given back; for a segment, the
bytes and the action."""
_Entries: TypeAlias = tuple[_Change, int, _About]
"""Of one event: what it changes, and the number of its first entry."""
_FIELDS = ("action", "addr", "size", "stream", "time_us", "frames", "category")


def memory_snapshot(timeline: Timeline, allocator: str = "") -> dict[str, Any]:
    """Return what the caching allocator has after the timeline, and everything that it did.

    The requests are replayed on one stream; ``allocator`` is written as for
    ``PYTORCH_ALLOC_CONF``. Frames name the line, the module and the operator of an allocation.
    """
    return {
        name: [[*found.dictionaries()]] if isinstance(found, Rows) else found
        for name, found in _parts(timeline, allocator)
    }


def write_memory_snapshot(timeline: Timeline, file: BinaryIO, allocator: str = "") -> None:
    """Write the pickle of ``memory_snapshot``, entry by entry: there are more than allocations."""
    PickleWriter(file).dictionary(_parts(timeline, allocator))


def _parts(timeline: Timeline, allocator: str) -> Iterator[tuple[str, Any]]:
    """Yield names and values; ``Rows`` are to be taken before the next one."""
    replayed = CachingAllocator(parse_options(allocator))
    replayed.statistics = NoStatistics()
    recorder = _Recorder(replayed)
    blocks: _Blocks = {}
    yield "device_traces", Rows(_FIELDS, "time_us", _written, _entries(timeline, recorder, blocks))
    frames = {block.address: told[0] for block, told in blocks.values()}
    reserved = segments(replayed)
    for segment in reserved:
        for block in segment["blocks"]:
            block["frames"] = frames.get(block["address"], [])
    yield "segments", reserved
    yield "external_annotations", []
    yield "allocator_settings", {"PYTORCH_ALLOC_CONF": allocator}


def _entries(timeline: Timeline, recorder: _Recorder, blocks: _Blocks) -> Iterator[_Entries]:
    """Yield what is written down of each event; ``blocks`` has those that are in use."""
    allocations, about = timeline.allocations, recorder.about
    allocator = recorder.allocator
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
        block, told = blocks[event] = served, about(found)
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


class _Recorder:
    """Serves requests, and knows what torch's allocator would record of them."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._told: dict[tuple[int, str, Kind], _About] = {}
        """By the ids of origins, which the timeline holds; entries share them, as those of torch
        do."""

    def about(self, found: Allocation) -> _About:
        """Return the stack and the category of an allocation."""
        key = id(found.origin), found.label, found.kind
        told = self._told.get(key)
        if told is None:
            told = self._told[key] = frames_of(found), found.kind.value.replace(" ", "_")
        return told


def frames_of(found: Allocation) -> list[dict[str, Any]]:
    """Return the stack of an allocation as torch writes one, the innermost frame first."""
    origin = found.origin
    file, _, line = origin.line.rpartition(":")
    frames = [{"name": origin.operator, "filename": "torch", "line": 0}] if origin.operator else []
    if origin.line:
        number = int(line) if line.isdecimal() else 0
        frames.append(
            {"name": origin.module, "filename": file if number else origin.line, "line": number}
        )
    elif origin.module or found.label:
        frames.append({"name": found.label or origin.module, "filename": "", "line": 0})
    return frames
