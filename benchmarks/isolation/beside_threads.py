"""Real training in four threads beside traces on fake cuda.

    python -m benchmarks.isolation.beside_threads [--traces 10000] [--seconds S]

Every result of the threads is compared with what the same step gave before the first trace, bit by
bit; dropout, whose numbers are random, by what holds for all.
"""

import argparse
import math
import os
import sys
import time

from benchmarks.conformance.report import machine
from tests.tracing.test_threads import train_beside


def main() -> int:
    """Print what the threads found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
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


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
