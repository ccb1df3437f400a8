"""Real training in four threads beside traces on fake cuda, and what an operator costs afterwards.

    python -m benchmarks.isolation.beside_threads [--traces 10000] [--seconds S]

Every result of the threads is compared with what the same step gave before the first trace, bit by
bit; dropout, whose numbers are random, by what holds for all. The cost of operators is measured in
two processes in turn, of which only one traces: as long as neither has, and when one has.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch
from torch import nn

from benchmarks.conformance.report import machine
from pytest_torchmem import trace
from tests.tracing.test_other_threads import train_beside

CALLS = 2_000
ROUNDS = 41
OPERATORS = {
    "add": lambda x: torch.add(x, x),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, False),
    "batch_norm": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "linear": lambda x: nn.functional.linear(x, x),
    "scaled_dot_product_attention": lambda x: nn.functional.scaled_dot_product_attention(x, x, x),
}
"""One that no path of a GPU concerns, and composite ones of which fake cuda has paths."""


def main() -> int:
    """Print the cost of operators before and after, and what the threads found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print_costs()
    start = time.monotonic()

    def told(taken: int, made: int, wrong: list[str]) -> None:
        seconds = time.monotonic() - start
        text = f"{taken:,} steps beside {made:,} traces in {seconds:.0f} s"
        print(f"{text}: {len(wrong)} differences", file=sys.stderr, flush=True)

    taken, made, wrong = train_beside(options.traces, options.seconds, told)
    print(f"{taken:,} steps beside {made:,} traces in {time.monotonic() - start:.0f} s")
    print(f"differences and errors: {len(wrong)}")
    for line in wrong[:10]:
        print(f"  {line}")
    return bool(wrong)


def print_costs() -> None:
    """Print how a call's processor time differs between two processes, before and after a trace."""
    from tabulate import tabulate

    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_measured, args=(theirs,), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    before = _ratios(*pipes)
    pipes[1].send("trace")
    pipes[1].recv()
    after = _ratios(*pipes)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    rows = [(name, before[name], after[name]) for name in OPERATORS]
    headers = ("cost in a process, of that in another", "before its first trace", "after it")
    print(tabulate(rows, headers=headers, floatfmt=".3f"))


def _ratios(alone: Connection, other: Connection) -> dict[str, float]:
    """Return the median of what ``other`` takes for each operator as a part of what ``alone`` does.

    Both measure at the same time of a round, and who is first changes with each.
    """
    found: dict[str, list[float]] = {name: [] for name in OPERATORS}
    for number in range(ROUNDS):
        for name in OPERATORS:
            took = {}
            for side in ((0, 1), (1, 0))[number % 2]:
                pipe = (alone, other)[side]
                pipe.send(name)
                took[side] = pipe.recv()
            found[name].append(took[1] / took[0])
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def _measured(connection: Connection) -> None:
    """Measure operators by name until ``None`` comes; "trace" makes one trace."""
    torch.set_num_threads(1)
    x = torch.ones(4, 4)
    while (name := connection.recv()) is not None:
        if name == "trace":
            trace(lambda: nn.Linear(4, 4).cuda()(torch.ones(2, 4).cuda()), device="cuda")
            connection.send(0.0)
            continue
        operator, best = OPERATORS[name], math.inf
        for _ in range(3):
            start = time.process_time()
            for _ in range(CALLS // 4):
                operator(x)
            best = min(best, time.process_time() - start)
        connection.send(best)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
