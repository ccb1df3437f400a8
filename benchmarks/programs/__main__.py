"""Trace and measure random programs.

python -m benchmarks.programs --count 2000           count and list what differs
python -m benchmarks.programs --shrink               find the simplest program that differs
"""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from hypothesis import given, seed, settings
from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks import command
from benchmarks.comparison import PHASES, Comparison, Status, compare, error_table
from benchmarks.conformance import report
from benchmarks.conformance.explain import side_by_side
from benchmarks.isolation.supervisor import Limits, Supervisor
from benchmarks.programs.drawing import QUIET, Chunk, drawn, programs, samples
from benchmarks.programs.program import Program

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
    wrong = [c for c in comparisons if c.status in (Status.CLOSE, Status.DIFFERENT)]
    share: Counter[str] = Counter()
    overall: Counter[str] = Counter()
    for found in comparisons:
        for name in set(re.findall(r"(\w+/\w*)\(", found.detail)):
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
                found.case,
                *(f"{found.difference(phase) or 0:+,}" for phase in PHASES[:2]),
                "; ".join(found.causes[:2])[:120],
                found.detail[:200],
            )
            for found in sorted(wrong, key=lambda found: len(found.detail))[:rows]
        ],
        headers=("case", "forward", "backward", "real only (-), traced only (+)", "program"),
        disable_numparse=True,
    )
    return f"{first}\n\n{second}"


def explained(case: str) -> str:
    """Return the events of a program given as ``"seed/index"``."""
    start, index = (int(number) for number in case.split("/"))
    program = drawn(start, CHUNK)[index]
    torch.manual_seed(0)
    measured = torchmem.measure(program)
    return f"{program}\n\n{side_by_side(torchmem.trace(program, host='here'), measured)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs; return 1 if any differs."""
    parser = command("programs", __doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", action="store_true", help="stop at the first, simplified")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--output", type=Path, help="JSON file for every comparison")
    parser.add_argument("--explain", metavar="SEED/INDEX", help="one program's allocations")
    options = parser.parse_args(arguments)
    if options.explain:
        warnings.simplefilter("ignore")
        print(explained(options.explain))
        return 0
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
    lost = (Status.UNSUPPORTED, Status.CRASHED)
    print(f"\n{differences_table(kept, options.rows)}\n\n{report.errors_table(kept, lost)}")
    print(f"\n{error_table(kept)}")
    compared = [found for found in kept if found.status is not Status.SKIPPED]
    return int(not compared or any(found.status is not Status.EXACT for found in compared))


if __name__ == "__main__":
    sys.exit(main())
