"""What ``fully_shard`` adds to the time of a trace, and to that of the same step without a trace.

    python -m benchmarks.sharded_steps.cost [--layers 12] [--pairs 9] [--world-size 8]

A training step of a small transformer with AdamW, once as it is and once with ``fully_shard`` of
each layer, in turn. Prints the processor time of both (the median), and how many times as long the
sharded one takes (the median of the pairs), for repeated traces on the CPU and on fake cuda. Beside
them stands the step itself: on the CPU, with real tensors and collectives that send nothing
(torch's ``fake`` backend). What sharding adds there is Python of ``fully_shard`` and ``DTensor``,
which a trace runs as it is.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.conformance.report import machine
from benchmarks.sharded_steps.programs import Decoder, shard, start, train
from pytest_torchmem import trace


def step(layers: int, sharded: bool, device: str) -> None:
    """Run one training step."""
    model: torch.nn.Module = Decoder(layers).to(device)
    if sharded:
        model = shard(model, mesh=start(device))
    train(model, torch.optim.AdamW(model.parameters()), steps=1, device=device)


def traced(layers: int, world_size: int, device: Any, sharded: bool) -> None:
    """Trace it; both traces are of one rank of a world."""
    trace(step, layers, sharded, device, device=device, world_size=world_size)


def plain(layers: int, world_size: int, sharded: bool) -> None:
    """Run it on the CPU, as one process of a world in which nobody else is."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        step(layers, sharded, "cpu")
    finally:
        dist.destroy_process_group()


def seconds(run: Callable[[bool], None], sharded: bool) -> float:
    """Return the processor time of one run, in seconds."""
    gc.collect()
    begin = time.process_time()
    run(sharded)
    return time.process_time() - begin


def main() -> None:
    """Run both in turn, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--world-size", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about = (options.layers, options.world_size)
    runs = {
        "traced, cpu": partial(traced, *about, "cpu"),
        "traced, cuda": partial(traced, *about, "cuda"),
        "step itself, cpu": partial(plain, *about),
    }
    rows = []
    for name, run in runs.items():
        first = [seconds(run, sharded) for sharded in (False, True)]
        pairs = [(seconds(run, False), seconds(run, True)) for _ in range(options.pairs)]
        without, with_it = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(after / before for before, after in pairs)
        rows.append([name, *first, without, with_it, with_it - without, f"{ratio:.2f} x"])
    headers = ["", "first", "first, sharded", "without", "sharded", "more", "ratio"]
    print(tabulate(rows, headers, floatfmt=".3f"))
    print(f"\nseconds of a processor, torch {torch.__version__}, {machine()}")


if __name__ == "__main__":
    main()
