"""How long it takes to switch the interception on and off: the first time of a process, and again.

    python -m benchmarks.registration_time

Only the first time anything is registered, for which the dispatcher writes the table of every
operator anew.
"""

from __future__ import annotations

import statistics
import sys
import time

from tabulate import tabulate

from benchmarks.conformance.report import machine
from pytest_torchmem.torch_private.dispatch.dispatcher import interception

ROUNDS = 51


def switch() -> tuple[float, float]:
    """Return the milliseconds of switching on and off."""
    start = time.perf_counter()
    with interception(lambda operator, *args, **kwargs: None):
        on = time.perf_counter()
    return 1000 * (on - start), 1000 * (time.perf_counter() - on)


def main() -> int:
    """Print the first time, and medians of others."""
    first = switch()
    others = [switch() for _ in range(ROUNDS)]
    medians = [statistics.median(times) for times in zip(*others, strict=True)]
    rows = [
        (name, *(f"{value:.3f}" for value in times))
        for name, times in (("first of the process", first), ("again", medians))
    ]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(tabulate(rows, headers=("", "on ms", "off ms"), disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
