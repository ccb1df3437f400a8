"""How long it takes to register what a trace registers, and to take it away again.

    python -m benchmarks.registration_time

Both write the dispatch table of every operator anew, so the time is the memory's: the second line
is of tables that other work has driven out of the processor's caches.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from tabulate import tabulate

from benchmarks.conformance.report import machine
from pytest_torchmem.torch_private.dispatcher import interception

ROUNDS = 51
SWEPT = 64 * 1024**2


def rounds(before: Callable[[], object]) -> list[tuple[float, float]]:
    """Return the milliseconds of registering and of undoing it, after ``before`` each time."""
    found = []
    for _ in range(ROUNDS):
        before()
        start = time.perf_counter()
        with interception(lambda operator, *args, **kwargs: None):
            registered = time.perf_counter()
        found.append((1000 * (registered - start), 1000 * (time.perf_counter() - registered)))
    return found


def main() -> int:
    """Print the medians."""
    memory = torch.zeros(SWEPT, dtype=torch.uint8)
    rows = []
    for name, before in (("at once", lambda: None), ("after 64 MiB", lambda: memory.add_(1))):
        registered, undone = zip(*rounds(before), strict=True)
        medians = (statistics.median(registered), statistics.median(undone))
        rows.append((name, *(f"{median:.2f}" for median in medians)))
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(tabulate(rows, headers=("", "registered ms", "undone ms"), disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
