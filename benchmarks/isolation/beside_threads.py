"""Real training in four threads beside traces on fake cuda, and what an operator costs afterwards.

    python -m benchmarks.isolation.beside_threads [traces]

Every result is compared with what the same step gave before the first trace, bit by bit.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

from benchmarks.conformance.report import machine
from pytest_torchmem import trace
from tests.tracing.test_other_threads import train_beside

CALLS = 2_000
ROUNDS = 15


def microseconds() -> list[float]:
    """Return what one call of a small operator takes, and one of a composite one, in each round."""
    x = torch.ones(4, 4)
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            torch.add(x, x)
            nn.functional.dropout(x, 0.5, False)
        found.append(1e6 * (time.perf_counter() - start) / CALLS)
    return found


def main() -> int:
    """Print the cost of operators before and after, and what the threads found."""
    traces = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    microseconds()
    before = microseconds()
    trace(lambda: nn.Linear(4, 4).cuda()(torch.ones(2, 4).cuda()), device="cuda")
    after = microseconds()
    for name, found in (("before the first trace", before), ("after it", after)):
        print(f"an addition and a dropout, {name}: {statistics.median(found):.2f} µs")
    start = time.perf_counter()
    taken, wrong = train_beside(traces)
    print(f"{taken:,} steps beside {traces:,} traces in {time.perf_counter() - start:.0f} s")
    print(f"differences and errors: {len(wrong)}")
    for line in wrong[:10]:
        print(f"  {line}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
