"""Recordings of ``torch.cuda.memory._dump_snapshot``, read as the timeline of a real GPU.

torch/cuda/memory.py, ``_snapshot``, says what is in one. Its pickle has plain containers alone, and
nothing else of a file is ever made.
"""

import io
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline

PICKLE = pickle.PROTO
"""What the file begins with."""
_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_MAKES_MEMORY = re.compile(r"(new_)?empty|resize|set_|_?to_copy")
"""Operators that others call for their outputs."""
_INSTALLED = re.compile(r".*(?:site|dist)-packages/")
_KINDS = {kind.value.replace(" ", "_"): kind for kind in Kind}


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse everything that has a name: a recording has none."""
        raise pickle.UnpicklingError(f"a recording has no {module}.{name} in it")


def plain_recording(content: bytes) -> Any:
    """Return what a pickle of plain containers holds; raises ``ValueError`` for another file."""
    try:
        return _Plain(io.BytesIO(content)).load()
    except Exception as error:  # a pickle that is cut short can raise almost anything
        raise ValueError(f"no recording: {error}") from None


def read_recording(content: bytes) -> Timeline:
    """Return what the GPU with the most events allocated and freed while it was recorded.

    What was there before is its baseline. Raises ``ValueError`` for a file that has no history.
    """
    plain = plain_recording(content)
    traces, segments = plain["device_traces"], plain["segments"]
    device = max(range(len(traces)), key=lambda index: len(traces[index]))
    entries = traces[device]
    if not entries:
        raise ValueError("it has no history: call torch.cuda.memory._record_memory_history() first")
    return _timeline(entries, [one for one in segments if one.get("device", 0) == device])


def _timeline(
    entries: Iterable[Mapping[str, Any]], segments: Iterable[Mapping[str, Any]]
) -> Timeline:
    live: dict[int, int] = {}
    made: list[Allocation] = []
    events: list[int] = []
    for entry in entries:
        if entry["action"] == "alloc":
            made.append(_allocation(entry, entry["size"]))
            live[entry["addr"]] = len(made)
            events.append(len(made))
        elif entry["action"] == "free_completed":
            if entry["addr"] not in live:  # it was there before
                made.append(_allocation({}, entry["size"]))
                live[entry["addr"]] = len(made)
            events.append(-live.pop(entry["addr"]))
    for block in (block for segment in segments for block in segment["blocks"]):
        if block["state"] == "active_allocated" and block.get("address") not in live:
            made.append(_allocation({}, block.get("requested_size", block["size"])))
    return _in_order(made, events)


def _in_order(made: list[Allocation], events: list[int]) -> Timeline:
    """Return the timeline that begins with what nothing has made."""
    new = [event for event in events if event > 0]
    known = set(new)
    before = [number for number in range(1, len(made) + 1) if number not in known]
    places = {number: place for place, number in enumerate([*before, *new], start=1)}
    moved = [places[event] if event > 0 else -places[-event] for event in events]
    allocations = tuple(made[number - 1] for number in places)
    phases = [(0, Phase.BASELINE)]
    for position, event in enumerate(moved, start=len(before)):
        phase = allocations[event - 1].origin.phase if event > 0 else phases[-1][1]
        if phase is not phases[-1][1]:
            phases.append((position, phase))
    return Timeline(allocations, (*range(1, len(before) + 1), *moved), tuple(phases))


def _allocation(entry: Mapping[str, Any], nbytes: int) -> Allocation:
    frames = entry.get("frames")
    if frames is None:
        return Allocation(nbytes, Kind.OTHER, Origin(Phase.BASELINE))
    kind = _KINDS.get(entry.get("category", ""), Kind.OTHER)
    return Allocation(nbytes, kind, Origin(_phase(frames), "", _operator(frames), _line(frames)))


def _phase(frames: Iterable[Mapping[str, Any]]) -> Phase:
    """Return the phase that a stack is of; the engine's own threads have none of Python's."""
    backward = True
    for frame in frames:
        name, file = frame["name"], frame["filename"]
        if "autograd::Engine" in name or name == "_engine_run_backward":
            return Phase.BACKWARD
        if "/torch/optim/" in file:
            return Phase.OPTIMIZER
        backward &= not file.endswith(".py")
    return Phase.BACKWARD if backward else Phase.FORWARD


def _operator(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost operator but those that only make its output."""
    found = [match[1] for frame in frames if (match := _OPERATOR.search(frame["name"]))]
    named = (name for name in found if not _MAKES_MEMORY.match(name))
    name = next(named, found[0] if found else "")
    return f"aten::{name}" if name else ""


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line of the program, or else of a library that is not torch."""
    of_python = [frame for frame in frames if frame["filename"].endswith(".py")]
    own = [frame for frame in of_python if not _INSTALLED.match(frame["filename"])]
    others = [frame for frame in of_python if "/torch/" not in frame["filename"]]
    for frame in (*own, *others, *of_python):
        file = _INSTALLED.sub("", frame["filename"]).removeprefix(os.getcwd() + os.sep)
        return f"{file}:{frame['line']}"
    return ""
