"""How long a trace takes against the same step on ``meta`` tensors and under MemTracker.

    python -m benchmarks.tracing_time

Each round runs the three one after the other, in a different order in each process, so that a
ratio compares what ran within the same second; the table has the median of the rounds. The first
round of a process is a line of its own: a first trace finds the geometry of every operator, and
later ones remember it. So is the first round after another, tiny model was traced: what is done
once per process (a self-test of torch's private parts) is not in it. Attribution is on.

    python -m benchmarks.tracing_time --layer

is about one linear layer: what a trace costs that does next to nothing.
"""

import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import pytest_torchmem as torchmem
from benchmarks import command
from benchmarks.conformance.report import machine
from benchmarks.language_models import BERT, GPT2, LanguageModel
from pytest_torchmem.step.step import Step


class Convolutions:
    """A convolutional network: eight blocks of convolution, batch norm and ReLU, and a classifier
    with its loss.
    """

    name = "CNN, 8 blocks"

    def build(self, device: str) -> nn.Module:
        """Return the network on a device."""
        channels = (3, 32, 32, 64, 64, 128, 128, 256, 256)
        with torch.device(device):
            blocks = [
                nn.Sequential(
                    nn.Conv2d(before, after, 3, stride=1 + (before < after), padding=1),
                    nn.BatchNorm2d(after),
                    nn.ReLU(),
                )
                for before, after in pairwise(channels)
            ]
            return nn.Sequential(
                *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10), nn.LogSoftmax(1)
            )

    def inputs(self, device: str) -> dict[str, torch.Tensor]:
        """Return a batch of pictures."""
        return {"input": torch.zeros(8, 3, 64, 64, device=device)}


Model = LanguageModel | Convolutions
MODELS: dict[str, Model] = {"gpt2": GPT2, "bert": BERT, "cnn": Convolutions()}
Times = dict[str, float]


def rounds(model: Model, count: int, turn: int) -> list[Times]:
    """Return the seconds of each way in each round; a way that fails has no entry.

    ``turn`` says which way goes first, since the first one also pays for what all need once.
    """
    network, inputs = model.build("meta"), model.inputs("cpu")

    def traced() -> None:  # the model has no memory, so only the tracing takes time
        torchmem.trace(network, device="cpu", **inputs)  # type: ignore[arg-type]

    watched, on_meta = model.build("meta"), model.inputs("meta")

    def unwatched() -> None:
        watched.zero_grad()
        Step().run(watched, (), on_meta)

    ways = {"meta": unwatched, "trace": traced, "tracker": tracked(model)}
    order = [*ways][turn % len(ways) :] + [*ways][: turn % len(ways)]
    found: list[Times] = []
    for _ in range(count):
        times: Times = {}
        for name in order:
            try:
                times[name] = _seconds(ways[name])
            except Exception as error:
                print(f"{name} cannot run {model.name}: {str(error)[:200]}", file=sys.stderr)
        found.append(times)
    return found


def _seconds(way: Callable[[], object]) -> float:
    start = time.process_time()
    way()
    return time.process_time() - start


def tracked(model: Model) -> Callable[[], object]:
    """Return the same step under MemTracker, on fake tensors."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    mode = FakeTensorMode()
    with mode:
        network, inputs = model.build("cpu"), model.inputs("meta")
        inputs = {name: torch.empty_like(value, device="cpu") for name, value in inputs.items()}

    def run() -> None:
        network.zero_grad()
        with mode:
            tracker = MemTracker()
            tracker.track_external(network)
            with tracker:
                Step().run(network, (), inputs)

    return run


def one_layer(turns: int = 20, traces: int = 50) -> list[tuple[str, ...]]:
    """Return rows of what repeated traces of one linear layer take, by device."""
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    found: dict[Any, list[float]] = {"cpu": [], "cuda": []}
    for turn in range(turns + 1):  # the first is for what is done once
        for device, times in found.items():
            start = time.process_time()
            for _ in range(traces):
                torchmem.trace(layer, x, device=device)
            if turn:
                times.append((time.process_time() - start) / traces)
    return [
        (f"fake {device}", f"{1000 * min(times):.2f}", _milliseconds(times, 2))
        for device, times in found.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every model in several fresh processes and print times and ratios."""
    parser = command("tracing_time", __doc__)
    parser.add_argument("--model", choices=MODELS, help="run in this process and print JSON")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--processes", type=int, default=6, help="one after the other")
    parser.add_argument("--turn", type=int, default=0, help="which way goes first in a round")
    parser.add_argument("--layer", action="store_true", help="one linear layer, in this process")
    parser.add_argument("--begun", action="store_true", help="trace a tiny model before all rounds")
    options = parser.parse_args(arguments)
    if options.model:
        warnings.simplefilter("ignore")
        if options.begun:
            torchmem.trace(torch.nn.Linear(2, 2), torch.randn(1, 2))
        print(json.dumps(rounds(MODELS[options.model], options.rounds, options.turn)))
        return 0
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    if options.layer:
        headers: tuple[str, ...] = ("one linear layer", "least ms", "median ms")
        print(tabulate(one_layer(), headers=headers, disable_numparse=True))
        return 0
    rows = []
    for name, model in MODELS.items():
        _in_fresh_process(name, 1, 0)  # byte code is written, as it is from the second run on
        found = [_in_fresh_process(name, options.rounds, n) for n in range(options.processes)]
        begun = [_in_fresh_process(name, 1, n, "--begun") for n in range(options.processes)]
        rows.append(_row(f"{model.name}, first of the process", [process[0] for process in found]))
        rows.append(_row(f"{model.name}, first of the model", [process[0] for process in begun]))
        rows.append(_row(f"{model.name}, repeated", [t for p in found for t in p[1:]]))
    headers = ("step", "trace ms", "meta ms", "MemTracker ms", "trace / meta", "MemTracker / trace")
    print(tabulate(rows, headers=headers, disable_numparse=True))
    return 0


def _in_fresh_process(name: str, count: int, turn: int, *flags: str) -> list[Times]:
    command = [sys.executable, "-m", "benchmarks.tracing_time", "--model", name]
    variables = os.environ.copy()
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    command += ["--rounds", str(count), "--turn", str(turn), *flags]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def _row(name: str, found: Sequence[Times]) -> tuple[str, ...]:
    return (
        name,
        *(
            _milliseconds([t[way] for t in found if way in t])
            for way in ("trace", "meta", "tracker")
        ),
        _ratios([t["trace"] / t["meta"] for t in found if {"trace", "meta"} <= t.keys()]),
        _ratios([t["tracker"] / t["trace"] for t in found if {"trace", "tracker"} <= t.keys()]),
    )


def _milliseconds(seconds: Sequence[float], digits: int = 1) -> str:
    return f"{1000 * statistics.median(seconds):.{digits}f}" if seconds else "-"


def _ratios(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
