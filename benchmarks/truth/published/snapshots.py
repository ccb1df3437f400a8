"""Memory snapshots as ``torch.cuda.memory._dump_snapshot`` writes them, read as plain data.

A snapshot is a pickle, and a pickle can run anything: only builtin containers, numbers and strings
are let through here. ``segments`` is what the allocator had when the snapshot was taken, with every
block; ``device_traces`` what happened before, per device (torch/csrc/cuda/memory_snapshot.cpp).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_torchmem.profile.formats.saved import plain_recording


class SnapshotError(ValueError):
    """A file that is not a memory snapshot."""


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a trace; ``size`` is what was asked for, or that of a segment, in bytes."""

    action: str
    """``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``,
    ``segment_map``, ``segment_unmap``, ``snapshot`` or ``oom``."""
    address: int
    size: int
    stream: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that the device gave; of an expandable segment, a range that is mapped."""

    address: int
    size: int
    stream: int
    is_small: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A block as the snapshot has it."""

    address: int
    size: int
    requested: int
    in_use: bool


@dataclass(frozen=True, slots=True)
class History:
    """What one device's allocator did, and how it stood at the end."""

    device: int
    options: str
    """As in ``PYTORCH_ALLOC_CONF``."""
    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    pieces: tuple[Piece, ...]

    @property
    def is_expandable(self) -> bool:
        """Whether segments grow page by page."""
        return any(event.action == "segment_map" for event in self.events)

    @property
    def requests(self) -> int:
        """How many requests were made."""
        return sum(1 for event in self.events if event.action == "alloc")


def plain(data: bytes) -> Any:
    """Return what a pickle of plain data holds; raises ``SnapshotError`` for anything else."""
    try:
        return plain_recording(data)
    except ValueError as error:
        raise SnapshotError(f"this is not a pickle: {error}") from None


def histories(path: Path) -> list[History]:
    """Return the history of every device of a snapshot file that has one.

    Raises ``SnapshotError`` where the file is not a snapshot.
    """
    return histories_of(plain(path.read_bytes()))


def histories_of(snapshot: Any) -> list[History]:
    """Return the history of every device of a snapshot that has one."""
    if not isinstance(snapshot, Mapping) or "segments" not in snapshot:
        raise SnapshotError("this is not a snapshot: expected 'segments' and 'device_traces'")
    options = (snapshot.get("allocator_settings") or {}).get("PYTORCH_CUDA_ALLOC_CONF") or ""
    found = []
    for device, trace in enumerate(snapshot.get("device_traces", ())):
        if not trace:
            continue
        own = [segment for segment in snapshot["segments"] if segment["device"] == device]
        events = (
            Event(
                entry["action"],
                entry.get("addr", entry.get("device_free", 0)),
                entry["size"],
                entry["stream"],
            )
            for entry in trace
        )
        segments = (
            Segment(
                one["address"], one["total_size"], one["stream"], one["segment_type"] == "small"
            )
            for one in own
        )
        pieces = tuple(piece for segment in own for piece in _pieces(segment))
        found.append(History(device, options, tuple(events), tuple(segments), pieces))
    return found


def _pieces(segment: Mapping[str, Any]) -> Iterator[Piece]:
    address = segment["address"]
    for block in segment["blocks"]:
        in_use = block["state"] != "inactive"
        yield Piece(
            block.get("address", address),
            block["size"],
            block.get("requested_size", block["size"]) if in_use else 0,
            in_use,
        )
        address += block["size"]
