"""Trace torch's own operator and module samples on fake cuda, and measure them where torch can.

No GPU is needed: torch's own CUDA code measures them under the stand-in.

python -m benchmarks.conformance_cuda                       a dozen samples of each operator
python -m benchmarks.conformance_cuda -k 'conv|lstm'        operators whose name matches
python -m benchmarks.conformance_cuda --gpu t4 --shard 1/4  another GPU, a quarter of the units
python -m benchmarks.conformance_cuda --suites zoo          the models of the zoo
torchmem stand-in --gpu t4 -- python -m benchmarks.conformance_cuda --gpu t4      measured as well

A sample counts as completed when its forward and backward are traced to the end, and, where torch
finds a GPU, when all its figures, requested and reserved bytes, are those that were measured. Where
a trace fails, the step is run for real: one that fails there as well is skipped, as is one of an
operator that torch has no kernel of for CUDA.
"""

import argparse
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks import command
from benchmarks.comparison import Comparison, Status, describe, of_device
from benchmarks.conformance import report
from benchmarks.conformance import samples as conformance
from benchmarks.conformance.samples import DTYPES, LAYOUTS, USUAL_DTYPES, units
from benchmarks.isolation.sample import Named, NothingToDifferentiate, Sample, Unit
from benchmarks.isolation.supervisor import Limits, Supervisor
from benchmarks.zoo import models as zoo
from pytest_torchmem.checks.gpu import find_parting
from pytest_torchmem.figures import FIGURES, HOST
from pytest_torchmem.measurement.device import cuda_device

SUITES = ("op", "module", "zoo")
_FIGURES = tuple(name for name in FIGURES if name != HOST)
_FAILED = (Status.UNSUPPORTED, Status.CRASHED)


def run_sample(case: str, sample: Sample, announce: Callable[[], None], gpu: str) -> Comparison:
    """Trace one sample, and where that fails find out whether the real step runs."""
    announce()  # what crashes here is the trace's fault
    start = time.perf_counter()
    options = {**sample.options, **sample.kwargs}
    trace = _confirmed if torch.cuda.is_available() else _traced
    found = trace(case, sample, options, gpu)
    if found.error.startswith(NothingToDifferentiate.__name__):
        options["backward"] = False
        found = trace(case, sample, options, gpu)
    if found.error.startswith("NotImplementedError: Could not run"):
        found = Comparison(case, Status.SKIPPED, error=found.error)
    if found.status is Status.UNSUPPORTED:
        try:
            torchmem.measure(sample.target, *sample.args, **options)
        except NothingToDifferentiate:
            pass  # its forward ran
        except Exception as error:
            found = Comparison(case, Status.SKIPPED, error=describe(error))
    return Comparison(
        case,
        found.status,
        found.traced,
        found.measured,
        error=found.error,
        causes=found.causes,
        seconds=round(time.perf_counter() - start, 4),
        detail=sample.detail[:400],
    )


def _traced(case: str, sample: Sample, options: dict[str, Any], gpu: str) -> Comparison:
    try:
        profile = torchmem.trace(sample.target, *sample.args, device="cuda", gpu=gpu, **options)
    except Exception as error:
        return Comparison(case, Status.UNSUPPORTED, error=describe(error))
    made = Counter(allocation.origin.operator for allocation in profile.timeline.allocations)
    operators = tuple(f"{count} {name}" for name, count in sorted(made.items()))
    return Comparison(case, Status.EXACT, of_device(profile), causes=operators)


def _confirmed(case: str, sample: Sample, options: dict[str, Any], gpu: str) -> Comparison:
    """Trace a sample beside what torch's CUDA code takes for it."""
    device = cuda_device()
    device.take_untold()
    try:
        measured = torchmem.measure(sample.target, *sample.args, device="cuda", **options)
    except Exception as error:
        return Comparison(case, Status.SKIPPED, error=describe(error))
    untold = (*device.take_untold(), *measured.warnings)
    try:
        traced = torchmem.trace(sample.target, *sample.args, device="cuda", gpu=gpu, **options)
    except Exception as error:
        figures, why = measured.figures(), describe(error)
        return Comparison(case, Status.UNSUPPORTED, {}, figures, error=why)
    figures = measured.figures()
    judged = {name: size for name, size in traced.figures().items() if name in figures}
    found = Comparison(case, Status.EXACT, judged, figures)
    if judged == figures:
        return found
    causes = (*untold, str(find_parting(traced, measured)))
    return replace(found, status=Status.NOT_JUDGED if untold else Status.DIFFERENT, causes=causes)


def found_units(options: argparse.Namespace) -> list[Unit]:
    """Return the units that the options ask for: pattern, suites, dtypes, layouts, shard."""
    part, parts = (int(number) for number in options.shard.split("/"))
    tested = [suite for suite in options.suites if suite != "zoo"]
    found: list[Unit] = [*units(options.pattern, tested, options.dtypes, options.layouts)]
    if "zoo" in options.suites:
        found.extend(zoo.models(options.pattern))
    return found[part - 1 :: parts]


def samples(unit: Unit, limit: int) -> Iterator[Sample]:
    """Yield the samples of an operator, a module or a model of the zoo."""
    if isinstance(unit, Named):
        return zoo.samples(unit, limit)
    assert isinstance(unit, conformance.Unit)
    return conformance.samples(unit, limit)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the samples and print what did not complete; return 1 for more than one in a hundred."""
    options = _parser().parse_args(arguments)
    found = found_units(options)
    limits = Limits(options.samples, options.seconds, options.threads)
    kept: list[Comparison] = []
    run = functools.partial(run_sample, gpu=options.gpu)
    Supervisor(found, samples, limits, kept.append, run).run(options.processes)
    kept.sort(key=lambda comparison: comparison.case)
    if options.output:
        report.write(options.output, kept)
    if options.record:
        record(options.record, kept, options.gpu)
    return _print(kept, options.gpu)


def record(path: Path, kept: Sequence[Comparison], gpu: str) -> None:
    """Write what torch's CUDA code took, a line a sample: figures in the order of ``_FIGURES``."""
    judged = [one for one in kept if one.status in (Status.EXACT, Status.DIFFERENT)]
    head = {"torch": torch.__version__, "gpu": gpu, "figures": _FIGURES}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines += [
        f"{json.dumps(one.case)}: {json.dumps([one.measured.get(name, 0) for name in _FIGURES])}"
        for one in judged
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _print(kept: Sequence[Comparison], gpu: str) -> int:
    counts = Counter(comparison.status for comparison in kept)
    failed = sum(counts[status] for status in _FAILED)
    traced = len(kept) - counts[Status.SKIPPED]
    rows = [
        ("completed", counts[Status.EXACT]),
        ("different from what was measured", counts[Status.DIFFERENT]),
        ("not judged: by values or sizes that nobody told", counts[Status.NOT_JUDGED]),
        ("unsupported", counts[Status.UNSUPPORTED]),
        ("crashed or hung", counts[Status.CRASHED]),
        ("skipped: the real step fails", counts[Status.SKIPPED]),
    ]
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()), f"gpu {gpu}")
    print(tabulate(rows, headers=("samples", "count")))
    print(f"unsupported: {failed / max(1, traced):.2%} of {traced}")
    print(report.errors_table(kept, _FAILED))
    different = [one for one in kept if one.status is Status.DIFFERENT]
    found = [(one.case, _differences(one), "; ".join(one.causes)) for one in different]
    print(tabulate(found, headers=("different", "traced - measured", "first apart at")))
    return int((failed + len(different)) * 100 > traced)


def _differences(found: Comparison) -> str:
    names = {**found.traced, **found.measured}
    apart = {name: found.traced.get(name, 0) - found.measured.get(name, 0) for name in names}
    return ", ".join(f"{name} {size:+,}" for name, size in apart.items() if size)


def _parser() -> argparse.ArgumentParser:
    parser = command("conformance_cuda", __doc__)
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--gpu", default="a100-80gb")
    parser.add_argument("--samples", type=int, default=12, help="per operator, 0 for all")
    parser.add_argument("--suites", nargs="+", default=["op", "module"], choices=SUITES)
    parser.add_argument("--dtypes", nargs="+", default=list(USUAL_DTYPES), choices=list(DTYPES))
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS[:1], choices=LAYOUTS)
    parser.add_argument("--shard", default="1/1", help="this part of so many, such as 2/4")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for one sample")
    parser.add_argument("--output", type=Path, help="JSON file for every sample")
    parser.add_argument("--record", type=Path, help="JSON file of what was measured, for tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
