"""Trace and measure random programs.

python -m benchmarks.programs --count 2000           count and list what differs
python -m benchmarks.programs --shrink               find the simplest program that differs
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from hypothesis import given, seed, settings
from tabulate import tabulate

from benchmarks.comparison import PHASES, Comparison, Status, compare, error_table
from benchmarks.conformance import report
from benchmarks.isolation.supervisor import Limits, Supervisor
from benchmarks.programs.drawing import QUIET, Chunk, samples
from benchmarks.programs.program import Program
from benchmarks.programs.strategies import programs

CHUNK = 50


def shrunk(start: int, count: int) -> None:
    """Raise ``AssertionError`` with the simplest program found that differs, if there is one."""

    @seed(start)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=QUIET)
    @given(programs())
    def agree(program: Program) -> None:
        torch.manual_seed(0)
        found = compare("", program)
        assert found.status in (Status.EXACT, Status.SKIPPED), (
            f"traced {found.traced}\nmeasured {found.measured}\n{found.error}"
        )

    agree()


def differences_table(comparisons: Sequence[Comparison], rows: int) -> str:
    """Return what the programs that differ have in common, and the shortest ones in full."""
    wrong = [c for c in comparisons if c.status not in (Status.EXACT, Status.SKIPPED)]
    share: Counter[str] = Counter()
    overall: Counter[str] = Counter()
    for found in comparisons:
        names = set(re.findall(r"kind='(\w+)', name='(\w*)'", found.detail))
        for name in {"/".join(pair) for pair in names}:
            overall[name] += 1
            share[name] += found in wrong
    common = sorted(share, key=lambda name: -share[name] / overall[name])[:rows]
    first = tabulate(
        [
            (name, share[name], overall[name], f"{share[name] / overall[name]:.0%}")
            for name in common
        ],
        headers=("step", "in programs that differ", "in all", "share"),
    )
    second = tabulate(
        [
            (
                found.status.value,
                *(f"{found.difference(phase) or 0:+,}" for phase in PHASES[:2]),
                found.error[:80],
                found.detail[:300],
            )
            for found in sorted(wrong, key=lambda found: len(found.detail))[:rows]
        ],
        headers=("status", "forward", "backward", "error", "program"),
        disable_numparse=True,
    )
    return f"{first}\n\n{second}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs; return 1 if any differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", action="store_true", help="stop at the first, simplified")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--output", type=Path, help="JSON file for every comparison")
    options = parser.parse_args(arguments)
    if options.shrink:
        warnings.simplefilter("ignore")
        shrunk(options.seed, options.count)
        return 0
    chunks = [
        Chunk(options.seed * 1_000_000 + start, min(CHUNK, options.count - start))
        for start in range(0, options.count, CHUNK)
    ]
    kept: list[Comparison] = []
    limits = Limits(units_per_process=20)
    Supervisor(chunks, samples, limits, kept.append).run(options.processes)
    if options.output:
        report.write(options.output, kept)
    counts = {status.value: sum(1 for c in kept if c.status is status) for status in Status}
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()))
    print(f"{len(kept)} programs:", ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    print(f"\n{differences_table(kept, options.rows)}\n\n{error_table(kept)}")
    return int(any(found.status not in (Status.EXACT, Status.SKIPPED) for found in kept))


if __name__ == "__main__":
    sys.exit(main())
