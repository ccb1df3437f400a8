"""Recordings on disk: the figures of every case, and the requests behind them.

A recording is a directory. ``truth.json`` has the ``machine`` and, by case, ``baseline`` and, for
the steps ``first`` (optimizer state is made in it) and ``second``, what each phase had at its peak
and what was alive when it ended (``forward``, ``forward_end``, …): ``requested_bytes``,
``allocated_bytes`` and ``reserved_bytes``. A case that failed has an ``error``.

``requests.jsonl.gz`` has a line per case: ``key``, ``events`` and ``bounds``. An event is the bytes
of a request (requests are counted from 1 on) or minus the number of the one that is given back; a
bound is ``[step, phase, events before its end]``. ``segments`` has ``[events before it, address,
bytes]`` for each segment of the device, minus its bytes where it is given back. It is one gzip
member per case, so that a recording can be taken up again.
"""

import gzip
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_torchmem.cudnn.questions import ConvolutionQuestion, Operand, contiguous_strides

TRUTH, REQUESTS = "truth.json", "requests.jsonl.gz"
CONVOLUTIONS = "convolutions.txt"
PHASES = ("forward", "backward", "optimizer")
STEPS = ("first", "second")
COUNTERS = ("requested_bytes", "allocated_bytes", "reserved_bytes")

#: What a history says of the device's segments, and the sign of their bytes.
_SEGMENTS = {"segment_alloc": 1, "segment_free": -1, "segment_map": 1, "segment_unmap": -1}

Bound = tuple[str, str, int]
Segment = tuple[int, int, int]


class RecordingError(ValueError):
    """A recording that cannot be read."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one case, from before its model was made to its end."""

    events: tuple[int, ...]
    bounds: tuple[Bound, ...]
    segments: tuple[Segment, ...] = ()


@dataclass(slots=True)
class Recording:
    """The figures of one machine."""

    path: Path
    truth: dict[str, Any] = field(default_factory=dict)

    @property
    def machine(self) -> dict[str, Any]:
        """What is known of the machine and its software."""
        found: dict[str, Any] = self.truth.get("machine", {})
        return found

    def keys(self) -> list[str]:
        """Return the cases, those that failed among them."""
        return [key for key in self.truth if key != "machine"]

    def figures(self, key: str) -> dict[str, Any] | None:
        """Return a case's figures, None where it is not there, failed or was not counted."""
        found = self.truth.get(key, {})
        return found if "first" in found else None

    def save(self) -> None:
        """Write the figures; a reader sees the old or the new ones."""
        self.path.mkdir(parents=True, exist_ok=True)
        new = self.path / f".{TRUTH}.new"
        new.write_text(json.dumps(self.truth, indent=1) + "\n")
        os.replace(new, self.path / TRUTH)

    def append(self, key: str, requests: Mapping[str, Any]) -> None:
        """Add the requests of a case, as ``asdict`` gives them."""
        self.path.mkdir(parents=True, exist_ok=True)
        line = {"key": key, **requests}
        with gzip.open(self.path / REQUESTS, "at") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def requests(self) -> Iterator[tuple[str, Requests]]:
        """Yield the requests of every case; of one recorded twice, the latest last."""
        path = self.path / REQUESTS
        if path.exists():
            with gzip.open(path, "rt") as file:
                for number, line in enumerate(file, start=1):
                    yield _requests(path, number, line)


def load(path: Path) -> Recording:
    """Return the recording in a directory; raises ``RecordingError`` where there is none."""
    try:
        truth = json.loads((path / TRUTH).read_text())
    except FileNotFoundError:
        raise RecordingError(f"{path}: there is no {TRUTH}, so nothing was recorded") from None
    except json.JSONDecodeError as error:
        raise RecordingError(f"{path / TRUTH} is not JSON: {error}") from None
    if not isinstance(truth, dict):
        raise RecordingError(f"{path / TRUTH} is not a recording: expected an object")
    return Recording(path, truth)


def recorded_convolutions(path: Path) -> Iterator[tuple[ConvolutionQuestion, int, int]]:
    """Yield what cuDNN was asked with its handle on the GPU, and engine and workspace of its first
    plan: ``convolutions.txt``, a line of direction, geometry, engine and bytes each.
    """
    for line in (path / CONVOLUTIONS).read_text(encoding="utf-8").splitlines():
        direction, geometry, engine, workspace = line.split("; ")
        dtype = geometry.partition("[")[0]
        *shapes, padding, stride, dilation = (
            tuple(map(int, numbers.split(","))) for numbers in re.findall(r"\[(.*?)\]", geometry)
        )
        x, w, y = (Operand(dtype, shape, contiguous_strides(shape)) for shape in shapes)
        question = ConvolutionQuestion(direction, x, w, y, padding, stride, dilation)
        yield question, int(engine), int(workspace)


def numbered(history: Sequence[Any], marks: Sequence[Bound]) -> Requests:
    """Return the requests in what ``torch.cuda.memory._snapshot`` has of a device.

    The bounds of ``marks`` count entries of ``history``; those returned count events.
    """
    events: list[int] = []
    live: dict[int, int] = {}
    bounds: list[Bound] = []
    segments: list[Segment] = []
    made = 0
    waiting = list(marks)
    for position, entry in enumerate(history):
        while waiting and waiting[0][2] <= position:
            step, phase, _ = waiting.pop(0)
            bounds.append((step, phase, len(events)))
        if entry["action"] == "alloc":
            made += 1
            live[entry["addr"]] = made
            events.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            events.append(-live.pop(entry["addr"]))
        elif entry["action"] in _SEGMENTS:
            nbytes = _SEGMENTS[entry["action"]] * entry["size"]
            segments.append((len(events), entry["addr"], nbytes))
    bounds.extend((step, phase, len(events)) for step, phase, _ in waiting)
    return Requests(tuple(events), tuple(bounds), tuple(segments))


def _requests(path: Path, number: int, line: str) -> tuple[str, Requests]:
    try:
        found = json.loads(line)
        bounds = tuple((step, phase, end) for step, phase, end in found["bounds"])
        segments = tuple((before, address, size) for before, address, size in found["segments"])
        return found["key"], Requests(tuple(found["events"]), bounds, segments)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordingError(f"{path}, line {number}: {error!r}") from None
