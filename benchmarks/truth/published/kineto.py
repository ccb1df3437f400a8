"""Traces of ``torch.profiler`` with ``profile_memory=True``, as those of pytorch/kineto's samples.

A ``[memory]`` event has the bytes of a block (what was asked for in multiples of 512, or up to
1 MiB more where the caching allocator does not split) and no address; the operators that ran on its
thread then say whose it is.
"""

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.truth.networks import convolutional  # noqa: F401 - registers the networks
from benchmarks.truth.networks.registry import NETWORKS
from benchmarks.truth.published.programs import Program, recording
from benchmarks.truth.published.snapshots import SnapshotError
from benchmarks.truth.published.traced import highest, traced_events

_CUDA = 1
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a trace took and gave back on the GPU, in order."""

    gpu: str
    events: tuple[int, ...]
    """Bytes of a block, negative where it is given back."""
    operators: tuple[str, ...]
    """The outermost and the innermost operator that was running, for every event."""


@dataclass(frozen=True, slots=True)
class StepComparison:
    """A recorded step and its trace; bytes of blocks."""

    gpu: str
    requests: tuple[int, int]
    """Traced, recorded."""
    same: int
    peak: tuple[int, int]
    """Above what was there when the step began."""
    only_recorded: Mapping[str, int]
    """Requests that are in the recording alone or have another size, by operator."""


def read_step(path: Path, number: int = 2) -> Step:
    """Return the step of a trace file (``.json`` or ``.json.gz``) at a position from 0 on."""
    data = path.read_bytes()
    trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events: Sequence[Any] = trace["traceEvents"]
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("ph") == "X" and event["name"].startswith("ProfilerStep#")
    )
    if number >= len(steps):
        raise SnapshotError(f"{path.name} has {len(steps)} steps")
    begin, end = steps[number]
    memory = [
        (str(event["tid"]), event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]"
        and event["args"]["Device Type"] == _CUDA
        and begin <= event["ts"] < end
    ]
    running: dict[str, list[tuple[int, int, str]]] = {}
    for event in events:
        if event.get("cat") == "Operator" and not event["name"].startswith("ProfilerStep#"):
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            running.setdefault(str(event["tid"]), []).append(span)
    found = []
    for thread, time, _ in memory:
        names = [
            name
            for _, _, name in sorted(
                (start, -stop, name)
                for start, stop, name in running.get(thread, ())
                if start <= time <= stop
            )
        ]
        found.append(" > ".join(dict.fromkeys((*names[:1], *names[-1:]))))
    sizes = tuple(nbytes for _, _, nbytes in memory)
    return Step(trace["deviceProperties"][0]["name"], sizes, tuple(found))


def resnet50_training() -> None:
    """Train ResNet-50 as kineto's samples do: 32 images, SGD with momentum.

    tb_plugin/examples/resnet50_profiler_api.py, with the defaults that torch 1.9 had: gradients are
    set to zero and kept, and the optimizer takes a parameter at a time.
    """
    network = NETWORKS["cnn/resnet50"]
    model = network.make(**network.full).cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=False)

    for index in range(2):  # what a step's variables hold is alive until the next replaces it
        with recording() if index else nullcontext():
            images = torch.randn(32, 3, 224, 224).to("cuda")
            labels = torch.zeros(32, dtype=torch.long).to("cuda")
            outputs = model(images)
            loss = criterion(outputs, labels)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()


def compare_step(step: Step, program: Program, gpu: str) -> StepComparison:
    """Trace a program and compare it with a recorded step of it."""
    traced = [  # requests as blocks
        -(-abs(size) // _BLOCK) * _BLOCK * (1 if size > 0 else -1)
        for size in traced_events(program, gpu)[0]
    ]
    ours = [size for size in traced if size > 0]
    theirs = [
        (size, name) for size, name in zip(step.events, step.operators, strict=True) if size > 0
    ]
    matching = SequenceMatcher(None, ours, [size for size, _ in theirs], autojunk=False)
    same, only = 0, Counter(name for _, name in theirs)
    for block in matching.get_matching_blocks():
        same += block.size
        only.subtract(name for _, name in theirs[block.b : block.b + block.size])
    return StepComparison(
        step.gpu,
        (len(ours), len(theirs)),
        same,
        (highest(traced), highest(step.events)),
        {name: number for name, number in only.most_common() if number},
    )
