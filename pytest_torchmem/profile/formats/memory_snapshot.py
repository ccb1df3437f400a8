"""The snapshot of ``torch.cuda.memory._dump_snapshot``, for PyTorch's memory visualizer.

https://pytorch.org/memory_viz; the fields are those of torch/cuda/memory.py, ``_snapshot``, and
of ``_memory_viz.profile_to_snapshot``, which has categories too.
"""

from __future__ import annotations

from typing import Any

from pytest_torchmem.allocator.blocks import Block
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.options import parse_options
from pytest_torchmem.allocator.segments import segments
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Timeline


def memory_snapshot(timeline: Timeline, allocator: str = "") -> dict[str, Any]:
    """Return what the caching allocator has after the timeline, and everything that it did.

    The requests are replayed on one stream; ``allocator`` is written as for
    ``PYTORCH_ALLOC_CONF``. Frames name the line, the module and the operator of an allocation.
    """
    replayed = CachingAllocator(parse_options(allocator))
    recorder = _Recorder(replayed)
    blocks: dict[int, Block] = {}
    for event in timeline.events:
        found = timeline.allocations[abs(event) - 1]
        if event < 0:
            block = blocks.pop(-event, None)
            if block is not None:
                recorder.free(block, found)
        elif found.nbytes:
            blocks[event] = recorder.allocate(found)
    frames = {
        block.address: recorder.frames_of(timeline.allocations[index - 1])
        for index, block in blocks.items()
    }
    reserved = segments(replayed)
    for segment in reserved:
        for block in segment["blocks"]:
            block["frames"] = frames.get(block["address"], [])
    return {
        "segments": reserved,
        "device_traces": [recorder.entries],
        "external_annotations": [],
        "allocator_settings": {"PYTORCH_ALLOC_CONF": allocator},
    }


class _Recorder:
    """Serves requests, and writes down what torch's allocator would record of them."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.entries: list[dict[str, Any]] = []
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
        self.entries.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": len(self.entries),
                "frames": frames,
                "category": self._categories[found.kind],
            }
        )


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
