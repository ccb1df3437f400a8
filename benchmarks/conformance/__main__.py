"""Trace and measure torch's own operator and module samples, and report what differs.

python -m benchmarks.conformance                      a dozen samples of each operator
python -m benchmarks.conformance -k 'conv|lstm'       operators whose name matches
python -m benchmarks.conformance --samples 0          every sample
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command
from benchmarks.comparison import Comparison, Status, error_table
from benchmarks.conformance import report
from benchmarks.conformance.samples import DTYPES, LAYOUTS, USUAL_DTYPES, samples, shard, units
from benchmarks.isolation.supervisor import Limits, Supervisor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the harness and print its report; return 1 if anything was not within 64 bytes."""
    options = _parser().parse_args(arguments)
    part, parts = (int(number) for number in options.shard.split("/"))
    found = shard(
        units(options.pattern, options.suites, options.dtypes, options.layouts, options.variants),
        part - 1,
        parts,
    )
    limits = Limits(options.samples, options.seconds, options.threads)
    kept: list[Comparison] = []
    start = time.monotonic()

    def keep(comparison: Comparison) -> None:
        kept.append(comparison)
        if len(kept) % 500 == 0:
            print(f"{len(kept)} samples, {time.monotonic() - start:.0f} s", file=sys.stderr)

    Supervisor(found, samples, limits, keep).run(options.processes)
    kept.sort(key=lambda comparison: comparison.case)
    if options.output:
        report.write(options.output, kept)
    _print(kept, options.rows)
    good = (Status.EXACT, Status.CLOSE)
    compared = [comparison for comparison in kept if comparison.status is not Status.SKIPPED]
    return int(not compared or any(comparison.status not in good for comparison in compared))


def _print(kept: Sequence[Comparison], rows: int) -> None:
    unsupported = (Status.UNSUPPORTED, Status.CRASHED)
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()))
    for title, table in (
        ("Samples", report.counts_table(kept)),
        ("Errors of the peaks", error_table(kept)),
        ("Different or unsupported, and why", report.reasons_table(kept, True)),
        ("Different or unsupported, not explained", report.reasons_table(kept, False)),
        ("Operators that differ", report.differences_table(kept, rows)),
        ("Alive at a peak by one way only", report.causes_table(kept, rows)),
        ("Unsupported", report.errors_table(kept, unsupported)),
        ("Skipped: the real step fails", report.errors_table(kept, (Status.SKIPPED,))),
    ):
        print(f"\n{title}\n{table}")


def _parser() -> argparse.ArgumentParser:
    parser = command("conformance", __doc__)
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--samples", type=int, default=12, help="per operator, 0 for all")
    parser.add_argument("--suites", nargs="+", default=["op", "module"])
    parser.add_argument("--dtypes", nargs="+", default=list(USUAL_DTYPES), choices=list(DTYPES))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--variants", nargs="+", default=["function"], help="function, inplace")
    parser.add_argument("--shard", default="1/1", help="this part of so many, such as 2/4")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for one sample")
    parser.add_argument("--rows", type=int, default=0, help="operators listed, 0 for all")
    parser.add_argument("--output", type=Path, help="JSON file for every comparison")
    return parser


if __name__ == "__main__":
    sys.exit(main())
