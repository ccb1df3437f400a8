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
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Timeline

_Entry: TypeAlias = tuple[tuple[str, int, int, int], int, tuple[list[dict[str, Any]], str]]
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
    blocks: dict[int, Block] = {}
    yield "device_traces", Rows(_FIELDS, "time_us", _entries(timeline, recorder, blocks))
    frames = {
        block.address: recorder.frames_of(timeline.allocations[index - 1])
        for index, block in blocks.items()
    }
    reserved = segments(replayed)
    for segment in reserved:
        for block in segment["blocks"]:
            block["frames"] = frames.get(block["address"], [])
    yield "segments", reserved
    yield "external_annotations", []
    yield "allocator_settings", {"PYTORCH_ALLOC_CONF": allocator}


def _entries(timeline: Timeline, recorder: _Recorder, blocks: dict[int, Block]) -> Iterator[_Entry]:
    """Yield what is written down of each event; ``blocks`` has those that are in use."""
    for event in timeline.events:
        found = timeline.allocations[abs(event) - 1]
        if event < 0:
            block = blocks.pop(-event, None)
            if block is not None:
                recorder.free(block, found)
        elif found.nbytes:
            blocks[event] = recorder.allocate(found)
        yield from recorder.entries
        recorder.entries.clear()


class _Recorder:
    """Serves requests, and writes down what torch's allocator would record of them."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.entries: list[_Entry] = []
        """Those of the present event."""
        self._noted = 0
        self._frames: dict[tuple[Origin, str], list[dict[str, Any]]] = {}
        """By what they tell of; entries share them, as those of torch do."""
        self._categories = {kind: kind.value.replace(" ", "_") for kind in Kind}

    def frames_of(self, found: Allocation) -> list[dict[str, Any]]:
        """Return the stack of an allocation."""
        key = found.origin, found.label
        frames = self._frames.get(key)
        if frames is None:
            frames = self._frames[key] = frames_of(found)
        return frames

    def allocate(self, found: Allocation) -> Block:
        allocator = self._allocator
        reserved = allocator.reserved
        block = allocator.allocate(found.nbytes)
        assert block is not None  # it asks for bytes
        frames, grown = self.frames_of(found), allocator.reserved - reserved
        if grown:
            action = "segment_alloc" if block.expandable is None else "segment_map"
            self._note(action, block.address, grown, frames, found)
        self._note("alloc", block.address, block.requested, frames, found)
        return block

    def free(self, block: Block, found: Allocation) -> None:
        address, frames = block.address, self.frames_of(found)
        self._allocator.free(block)
        for action in ("free_requested", "free_completed"):
            self._note(action, address, found.nbytes, frames, found)

    def _note(
        self, action: str, address: int, size: int, frames: list[dict[str, Any]], found: Allocation
    ) -> None:
        what = (action, address, size, 0)
        self.entries.append((what, self._noted, (frames, self._categories[found.kind])))
        self._noted += 1


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
