"""Timelines read from files: saved profiles, and recordings of a real GPU.

A saved timeline is plain JSON types: every text once, and one list for each column. What is in a
recording of ``torch.cuda.memory._dump_snapshot`` says torch/cuda/memory.py, ``_snapshot``. Its
pickle has plain containers alone, and nothing else of a file is ever made.
"""

import io
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap
from types import NoneType
from typing import Any, TypeVar

from pytest_torchmem.figures import FIGURES
from pytest_torchmem.printable import printable_lines
from pytest_torchmem.profile.timeline import Allocation, Confidence, Kind, Origin, Phase, Timeline

_Value = TypeVar("_Value")
_Entry = Mapping[str, Any]


def _numbered() -> defaultdict[Any, int]:
    """Return a table that gives values numbers in the order in which it is asked for them."""
    numbers: defaultdict[Any, int] = defaultdict(lambda: len(numbers))
    return numbers


_NUMBER = (int, NoneType)
_TEXT = (str, NoneType)
_PLAIN: dict[str, Any] = {
    "device": re.compile(r"(cpu|cuda)(:\d+)?"),
    **dict.fromkeys(("gpu", "host", "torch_version", "workload", "values"), _TEXT),
    **dict.fromkeys((*FIGURES, "world_size", "rank"), _NUMBER),
    "warnings": [str],
    "unknown_workspaces": [str],
    "calibrated_workspaces": [str],
    "library_workspaces": [str],
    "allocator_peaks": {str: {str: int}},
    "facts": dict,
    "others": [dict],
}
"""What a saved profile holds beside its timeline, by name; ``str`` stands for any name."""


def check_plain(plain: Any, spec: Any = _PLAIN, where: str = "it") -> None:
    """Raise ``ValueError`` for what ``save`` does not write, such as negative or huge numbers."""
    kind: Any = spec
    if isinstance(spec, tuple):
        kind = type(plain) if type(plain) in spec else spec[0]
    elif not isinstance(spec, type):
        kind = str if isinstance(spec, re.Pattern) else type(spec)
    if (
        type(plain) is not kind
        or (kind is int and not 0 <= plain < 2**63)  # bytes and places have 64 bits in torch
        or (kind is str and escaped(plain) != plain)
        or (isinstance(spec, re.Pattern) and not spec.fullmatch(plain))
    ):
        raise ValueError(f"{where} is {plain!r:.40}")
    if isinstance(spec, list):
        for number, value in enumerate(plain):
            check_plain(value, spec[0], f"{where}[{number}]")
    elif isinstance(spec, dict) and str in spec:
        for name, value in plain.items():
            check_plain(name, str, f"a name in {where}")
            check_plain(value, spec[str], f"{where}[{name!r:.40}]")
    elif isinstance(spec, dict):
        for name in spec.keys() & plain.keys():
            check_plain(plain[name], spec[name], str(name))


def escaped(plain: Any) -> Any:
    """Return JSON types with every text as ``printable_lines`` has it."""
    if isinstance(plain, str):
        return printable_lines(plain)
    if isinstance(plain, list | tuple):
        return list(map(escaped, plain))
    if isinstance(plain, dict):
        return {escaped(name): escaped(value) for name, value in plain.items()}
    return plain


def plain_timeline(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as JSON types; ``read_timeline`` reads it."""
    origins, shapes, texts = _numbered(), _numbered(), _numbered()
    allocations = timeline.allocations
    return {
        "nbytes": [found.nbytes for found in allocations],
        "kind": [texts[found.kind.value] for found in allocations],
        "origin": [origins[found.origin] for found in allocations],
        "shape": [shapes[found.shape] for found in allocations],
        "dtype": [texts[found.dtype] for found in allocations],
        "label": [texts[found.label] for found in allocations],
        "confidence": [texts[found.confidence.value] for found in allocations],
        "origins": [
            [
                *(texts[found.phase.value], texts[found.module]),
                *(texts[found.operator], texts[found.line], int(found.recomputed)),
            ]
            for found in origins
        ],
        "shapes": [list(shape) for shape in shapes],
        "events": list(timeline.events),
        "phases": [[position, phase.value] for position, phase in timeline.phases],
        "module_calls": list(timeline.module_calls),
        "texts": escaped(list(texts)),
    }


def read_timeline(plain: Any) -> Timeline:
    """Return the timeline that ``plain_timeline`` wrote.

    Raises ``ValueError``, ``TypeError``, ``KeyError`` or ``IndexError`` for anything else.
    """
    check_plain(plain["texts"], [str], "a text")
    check_plain(plain["shapes"], [[int]], "a shape")
    texts = plain["texts"]
    origins = [
        Origin(Phase(texts[phase]), texts[module], texts[operator], texts[line], again == 1)
        for phase, module, operator, line, again in plain["origins"]
    ]
    read: dict[str, tuple[list[Any], Callable[[Any], Any]]] = {
        "kind": (texts, Kind),
        "origin": (origins, lambda one: one),
        "shape": (plain["shapes"], tuple),
        "dtype": (texts, str),
        "label": (texts, str),
        "confidence": (texts, Confidence),
    }
    columns: dict[str, list[Any]] = {name: _integers(plain[name]) for name in Allocation._fields}
    columns |= {name: _looked_up(columns[name], *found) for name, found in read.items()}
    if min(columns["nbytes"], default=0) < 0:
        raise ValueError("a size of it is negative")
    allocations = tuple(starmap(Allocation, zip(*columns.values(), strict=True)))
    events = tuple(_integers(plain["events"]))
    _check(events, len(allocations))
    phases = tuple((position, Phase(phase)) for position, phase in plain["phases"])
    begins = _integers([position for position, _ in phases])
    calls = _integers(plain.get("module_calls", []))
    for what, positions in (("phases", begins), ("calls of a module", calls)):
        if positions != sorted(positions) or not {*positions} <= {*range(len(events) + 1)}:
            raise ValueError(f"its {what} are not in order")
    return Timeline(allocations, events, phases, tuple(calls))


def _check(events: Sequence[int], made: int) -> None:
    """Raise ``ValueError`` where something is freed that is not alive, or made twice."""
    if len(events) and not -made <= min(events) <= max(events) <= made:
        raise ValueError("its events have numbers that none of its allocations has")
    state = bytearray(made + 1)
    for event in events:
        if event > 0 and not state[event]:
            state[event] = 1
        elif event < 0 and state[-event] == 1:
            state[-event] = 2
        else:
            raise ValueError(f"its event {event} cannot be")


def _looked_up(
    numbers: list[int], values: list[_Value], make: Callable[[_Value], Any]
) -> list[Any]:
    """Return what is made of the values that the numbers are the places of."""
    used = {*numbers}
    if used and min(used) < 0:
        raise IndexError(f"it has no value {min(used)}")
    made = {number: make(values[number]) for number in used}
    return list(map(made.__getitem__, numbers))


def _integers(values: Any) -> list[int]:
    """Return a list of integers. Raises ``TypeError`` for anything else, of which most is a list of
    others, and which no column of millions is to be looked at for by a function of Python.
    """
    if not isinstance(values, list) or not {*map(type, values)} <= {int}:
        raise TypeError("a list of it has not only integers")
    return values


PICKLE = pickle.PROTO
"""What the file begins with."""
_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_MAKES_MEMORY = re.compile(r"(new_)?empty|resize|set_|_?to_copy")
"""Operators that others call for their outputs."""
_INSTALLED = re.compile(r".*(?:site|dist)-packages/")
_KINDS = {kind.value.replace(" ", "_"): kind for kind in Kind}


class _Plain(pickle.Unpickler):
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
    segments = [one for one in segments if one.get("device", 0) == device]
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


def _phase(frames: Iterable[_Entry]) -> Phase:
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


def _operator(frames: Iterable[_Entry]) -> str:
    """Return the innermost operator but those that only make its output."""
    found = [match[1] for frame in frames if (match := _OPERATOR.search(frame["name"]))]
    named = (name for name in found if not _MAKES_MEMORY.match(name))
    name = next(named, found[0] if found else "")
    return f"aten::{name}" if name else ""


def _line(frames: Iterable[_Entry]) -> str:
    """Return the innermost line of the program, or else of a library that is not torch."""
    of_python = [frame for frame in frames if frame["filename"].endswith(".py")]
    own = [frame for frame in of_python if not _INSTALLED.match(frame["filename"])]
    others = [frame for frame in of_python if "/torch/" not in frame["filename"]]
    for frame in (*own, *others, *of_python):
        file = _INSTALLED.sub("", frame["filename"]).removeprefix(os.getcwd() + os.sep)
        return f"{file}:{frame['line']}"
    return ""
