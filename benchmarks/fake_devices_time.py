"""How long a trace on fake cuda takes against the same trace on fake cpu.

python -m benchmarks.fake_devices_time                 the zoo, and a perceptron of three layers
python -m benchmarks.fake_devices_time -k 'bert|gpt2'  models whose name matches

The two are traced in turn, in one process, after each was traced once; the ratio is of what ran
within the same moment, and the table has the medians.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import pytest_torchmem as torchmem
from benchmarks.conformance.report import machine
from benchmarks.isolation.sample import Sample
from benchmarks.zoo.models import models, samples

LIMIT = 1.3
PERCEPTRON = "perceptron of three layers"


def steps(pattern: str) -> dict[str, Sample]:
    """Return the steps to time, with AdamW, by name; of the perceptron a pure forward too."""
    found = {model.case: next(samples(model)) for model in models(pattern)}
    if re.search(pattern, PERCEPTRON):
        layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        options = {"optimizer": torch.optim.AdamW}
        found[PERCEPTRON] = Sample(0, layers, (torch.randn(4, 8),), options=options)
        forward = {"backward": False}
        found[f"{PERCEPTRON}, forward"] = Sample(0, layers, (torch.randn(4, 8),), options=forward)
    return found


def paired(sample: Sample, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of a trace on fake cpu and on fake cuda, round by round."""
    options: dict[str, Any] = {**sample.options, **sample.kwargs}

    def trace(device: Any) -> Callable[[], object]:
        return lambda: torchmem.trace(sample.target, *sample.args, device=device, **options)

    on_cpu, on_cuda = trace("cpu"), trace("cuda")
    on_cpu(), on_cuda()
    # A collection would come in the one or the other, and take longer than a small trace.
    gc.collect()
    gc.disable()
    try:
        return [(_seconds(on_cpu), _seconds(on_cuda)) for _ in range(rounds)]
    finally:
        gc.enable()


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the steps and print them, the largest ratio first; return 1 for more than the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fake_devices_time",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    rows = []
    for name, sample in steps(options.pattern).items():
        try:
            found = paired(sample, options.rounds)
        except torchmem.TorchmemError as error:
            print(f"{name} cannot be traced: {str(error)[:120]}", file=sys.stderr)
            continue
        ratio = statistics.median(cuda / cpu for cpu, cuda in found)
        cpu, cuda = (statistics.median(pair[index] for pair in found) for index in (0, 1))
        rows.append((ratio, name, f"{1000 * cpu:.2f}", f"{1000 * cuda:.2f}", f"{ratio:.2f}"))
    rows.sort(reverse=True)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    headers = ("step", "fake cpu ms", "fake cuda ms", "cuda / cpu")
    print(tabulate([row[1:] for row in rows], headers=headers, disable_numparse=True))
    over = [row[1] for row in rows if row[0] > LIMIT]
    middle, highest = statistics.median(row[0] for row in rows), rows[0][0]
    print(
        f"{len(rows)} steps, median {middle:.2f}, highest {highest:.2f}, {len(over)} above {LIMIT}"
    )
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
