"""Trace and measure the training steps of whole models, and print how far apart they are.

python -m benchmarks.zoo                      all models, AdamW and SGD with momentum
python -m benchmarks.zoo -k 'bert|lstm'       models whose name matches
python -m benchmarks.zoo --published          models of published width, in four ways
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from benchmarks import command
from benchmarks.comparison import PHASES, Comparison, Status, error_table
from benchmarks.conformance import report
from benchmarks.isolation.supervisor import Limits, Supervisor
from benchmarks.zoo import models, published


def models_table(comparisons: Sequence[Comparison]) -> str:
    """Return one line per step that is not exact in every phase, the furthest first."""
    rows = []
    inexact = [found for found in comparisons if found.status in (Status.CLOSE, Status.DIFFERENT)]
    for found in sorted(inexact, key=_error, reverse=True):
        differences = [found.difference(phase) for phase in PHASES]
        relative = [found.relative(phase) for phase in PHASES[:2]]
        rows.append(
            (
                f"{found.case} {found.detail}",
                *("-" if d is None else f"{d:+,}" for d in differences),
                *("-" if r is None else f"{r:+.3%}" for r in relative),
                "; ".join(found.causes[:2])[:120],
            )
        )
    headers = ("step", *(f"{phase} bytes" for phase in PHASES))
    headers += ("forward error", "backward error", "real only (-), traced only (+)")
    align = ("left", *("right",) * 5, "left")
    return tabulate(rows, headers=headers, disable_numparse=True, colalign=align if rows else None)


def _error(found: Comparison) -> float:
    return max(abs(found.relative(phase) or 0.0) for phase in PHASES[:2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the zoo and print its tables; return 1 if a peak is more than 0.1 % off."""
    parser = command("zoo", __doc__)
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--published", action="store_true", help="models of published width")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for one step")
    parser.add_argument("--output", type=Path, help="JSON file for every comparison")
    options = parser.parse_args(arguments)
    kept: list[Comparison] = []
    limits = Limits(0, options.seconds, options.threads)
    if options.published:
        wide = published.models(options.pattern)
        Supervisor(wide, published.samples, limits, kept.append).run(options.processes)
    else:
        small = models.models(options.pattern)
        Supervisor(small, models.samples, limits, kept.append).run(options.processes)
    kept.sort(key=lambda comparison: comparison.case)
    if options.output:
        report.write(options.output, kept)
    counts = {status.value: sum(1 for c in kept if c.status is status) for status in Status}
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()))
    print(f"{len(kept)} steps:", ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    lost = (Status.UNSUPPORTED, Status.CRASHED, Status.SKIPPED)
    print(f"\n{models_table(kept)}\n\n{report.errors_table(kept, lost)}\n\n{error_table(kept)}")
    return int(any(found.status in lost or _error(found) > 0.001 for found in kept))


if __name__ == "__main__":
    sys.exit(main())
