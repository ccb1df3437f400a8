"""Trace and measure training steps of other libraries' models, and print how far apart they are.

python -m benchmarks.libraries                  all models, on the CPU
python -m benchmarks.libraries -k 'peft|timm'   models whose name matches
python -m benchmarks.libraries --device cuda    traced on fake cuda: does it come to its end

The libraries are not installed with this project; a model whose library is not there is skipped.
``names.json`` has the names to install.
"""

import functools
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from tabulate import tabulate

from benchmarks import command
from benchmarks.comparison import Comparison, Status, error_table
from benchmarks.conformance import report
from benchmarks.conformance_cuda import run_sample
from benchmarks.isolation.supervisor import Limits, Supervisor
from benchmarks.libraries.registry import import_steps, models, samples
from benchmarks.zoo.__main__ import models_table

_BAD = (Status.DIFFERENT, Status.UNSUPPORTED, Status.CRASHED)


def libraries_table(kept: Sequence[Comparison]) -> str:
    """Return one line per library: its version, and what came of its models."""
    rows = []
    for library in sorted({found.case.partition("/")[0] for found in kept}, key=str.lower):
        counts = Counter(c.status for c in kept if c.case.partition("/")[0] == library)
        counted = (counts[status] for status in Status)
        rows.append((library, _version(library), *counted))
    used = [i for i, status in enumerate(Status) if any(row[2 + i] for row in rows)]
    headers = ("library", "version", *([*Status][i].value for i in used))
    return tabulate([(*row[:2], *(row[2 + i] for i in used)) for row in rows], headers=headers)


def _version(library: str) -> str:
    try:
        return version({"open_clip": "open_clip_torch"}.get(library, library))
    except PackageNotFoundError:
        return "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the models and print the tables; return 1 for a step that differs or cannot be traced."""
    parser = command("libraries", __doc__)
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu", default="a100-80gb", help="the GPU that fake cuda stands for")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for one step")
    options = parser.parse_args(arguments)
    kept: list[Comparison] = []
    limits = Limits(0, options.seconds, options.threads, units_per_process=20)
    run = functools.partial(run_sample, gpu=options.gpu) if options.device == "cuda" else None
    import_steps()
    found = models(options.pattern)
    Supervisor(found, samples, limits, kept.append, run).run(options.processes)
    kept.sort(key=lambda comparison: comparison.case.lower())
    machine = ", ".join(f"{name} {value}" for name, value in report.machine().items())
    print(machine, f"gpu {options.gpu}" if options.device == "cuda" else "")
    print(f"\n{libraries_table(kept)}\n")
    if options.device == "cpu":
        print(f"{models_table(kept)}\n\n{error_table(kept)}\n")
    lost = (Status.UNSUPPORTED, Status.CRASHED, Status.SKIPPED)
    print(report.errors_table(kept, lost))
    return int(any(comparison.status in _BAD for comparison in kept))


if __name__ == "__main__":
    sys.exit(main())
