"""Compare the operators that a real device runs with those that the trace of it runs.

python -m benchmarks.operator_lists                        on the GPU of this machine
torchmem stand-in -- python -m benchmarks.operator_lists   by torch's CUDA code, without a GPU
python -m benchmarks.operator_lists --device cpu           on the CPU
python -m benchmarks.operator_lists -k conv --shard 1/8    a part of it
python -m benchmarks.operator_lists --suites zoo           the models of the zoo

Every operator that reaches a kernel is written down, forward and backward, in order. For real as in
the trace that is the Fake key's place in the dispatcher, below autograd and above the backends: a
``TorchDispatchMode`` would be seen by composite operators, which then take other paths.
"""

import argparse
import ctypes
import difflib
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks import command
from benchmarks.comparison import Comparison, Status, describe
from benchmarks.conformance import report
from benchmarks.conformance.samples import DTYPES, USUAL_DTYPES
from benchmarks.conformance_cuda import SUITES, found_units, samples
from benchmarks.isolation.sample import NothingToDifferentiate, Sample
from benchmarks.isolation.supervisor import Limits, Supervisor
from pytest_torchmem import Gpu
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.plan import remembered_plans
from pytest_torchmem.measurement.measured import on_copies
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.step.step import Step
from pytest_torchmem.targets.gpus import registered_gpus
from pytest_torchmem.torch_private.dispatcher import interception
from pytest_torchmem.torch_private.keys import FAKE, excluded, is_view
from pytest_torchmem.torch_private.self_test import check_torch

HERE = "this-machine"
"""The name by which the GPU of this machine is in the catalogue while it is compared with."""

#: The engine adds gradients with the one or the other, by who else holds them: a recorder does.
_ALIKE = {"aten::add_.Tensor": "aten::add.Tensor"}


def gpu_here() -> Gpu:
    """Return the GPU of this machine as its driver describes it."""
    properties = torch.cuda.get_device_properties(0)
    return Gpu(
        HERE,
        properties.name,
        (properties.major, properties.minor),
        properties.total_memory,
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
    )


def recorded_for_real(sample: Sample, device: str, **options: Any) -> list[str]:
    """Run a step on a real device and return the operators that reached a kernel, in order."""
    check_torch()
    names: list[str] = []

    def run(overload: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_view(overload):
            names.append(str(overload.name()))
        with excluded(FAKE):
            return overload(*spec_of(overload).with_numbers_as_tensors(args, "cpu"), **kwargs)

    step, moved = Step(**options), device != "cpu"
    given = sample.target, sample.args, {**sample.kwargs}
    with on_copies(torch.device(device), *given, step, moved=moved) as step_there:
        torch.manual_seed(0)
        with torch.enable_grad(), interception(run):
            step_there()
    return names


def recorded_in_trace(sample: Sample, device: Any, gpu: str | None, **options: Any) -> list[str]:
    """Trace a step and return the operators that reached the interception, in order."""
    torchmem.trace(_nothing)  # what the first trace of a process tries out is not the step's
    names: list[str] = []
    remembered_plans.cache_clear()
    with _recording(names), mock.patch.object(Step, "run", _noting_from_here(names)):
        torchmem.trace(
            sample.target,
            *sample.args,
            device=device,
            gpu=gpu,
            host="here",
            **options,
            **sample.kwargs,
        )
    return names


def _noting_from_here(names: list[str]) -> Callable[..., object]:
    """Return ``Step.run`` that forgets the operators that copied the module and its arguments."""
    original = Step.run

    def run(step: Step, *args: Any) -> object:
        names.clear()
        return original(step, *args)

    return run


def _nothing() -> None:
    """Run nothing."""


@contextmanager
def _recording(names: list[str]) -> Iterator[None]:
    """Write down what the interceptor is called for by the program, not by bodies that it runs.

    It looks every operator up by its id as it is called; a function around it would be one frame
    more between it and the autograd engine, which it takes for the program's.
    """
    make: Any = Interceptor.__init__
    entry = Interceptor.__call__.__code__

    class Operators(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            # The caller holds it. Its frame's locals, once asked for, would hold its arguments too.
            overload: Any = ctypes.cast(key, ctypes.py_object).value
            if not is_view(overload) and not _within(sys._getframe(1).f_back, entry):
                names.append(str(overload.name()))
            return super().get(key, default)

    def init(interceptor: Interceptor, *args: Any) -> None:
        make(interceptor, *args)
        interceptor._specs = Operators()

    with mock.patch.object(Interceptor, "__init__", init):
        yield


def _within(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def differences(real: Sequence[str], traced: Sequence[str]) -> tuple[str, ...]:
    """Return what only the real run (``-``) or only the trace (``+``) has, in the order of both."""
    one, other = ([_ALIKE.get(name, name) for name in names] for names in (real, traced))
    found: list[str] = []
    matcher = difflib.SequenceMatcher(a=one, b=other, autojunk=False)
    for tag, start, end, their_start, their_end in matcher.get_opcodes():
        if tag != "equal":
            found.extend(f"-{name}" for name in one[start:end])
            found.extend(f"+{name}" for name in other[their_start:their_end])
    return tuple(found)


def run_sample(
    case: str, sample: Sample, announce: Callable[[], None], device: str, gpu: Gpu | None
) -> Comparison:
    """Record one step for real and in a trace, and compare."""
    start = time.perf_counter()
    options = dict(sample.options)
    try:
        try:
            real = recorded_for_real(sample, device, **options)
        except NothingToDifferentiate:
            options["backward"] = False
            real = recorded_for_real(sample, device, **options)
    except Exception as error:
        return Comparison(case, Status.SKIPPED, error=describe(error))
    announce()
    try:
        with registered_gpus(*([gpu] if gpu else [])):
            traced = recorded_in_trace(sample, device, gpu.name if gpu else None, **options)
    except Exception as error:
        return Comparison(case, Status.UNSUPPORTED, error=describe(error))
    found = differences(real, traced)
    return Comparison(
        case,
        Status.DIFFERENT if found else Status.EXACT,
        error=" ".join(found)[:400],
        seconds=round(time.perf_counter() - start, 4),
        detail=sample.detail[:400],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the samples and print what differs; return 1 if anything does, 2 without a GPU."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu compares with the CPU")
        return 2
    kept: list[Comparison] = []
    limits = Limits(options.samples, options.seconds, options.threads)
    gpu = gpu_here() if options.device == "cuda" else None
    run = functools.partial(run_sample, device=options.device, gpu=gpu)
    Supervisor(found_units(options), samples, limits, kept.append, run).run(options.processes)
    kept.sort(key=lambda comparison: comparison.case)
    if options.output:
        report.write(options.output, kept)
    where = gpu.product if gpu else options.device
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()), f"on {where}")
    return _print(kept)


def _print(kept: Sequence[Comparison]) -> int:
    counts = Counter(comparison.status for comparison in kept)
    rows = [
        ("the same operators", counts[Status.EXACT]),
        ("other operators", counts[Status.DIFFERENT]),
        ("not traced", counts[Status.UNSUPPORTED]),
        ("crashed or hung", counts[Status.CRASHED]),
        ("skipped: the real step fails", counts[Status.SKIPPED]),
    ]
    print(tabulate(rows, headers=("samples", "count")))
    for title, status in (("Real only (-), traced only (+)", Status.DIFFERENT), ("", None)):
        wrong = (status,) if status else (Status.UNSUPPORTED, Status.CRASHED)
        print(f"\n{title or 'Not traced'}\n{report.errors_table(kept, wrong)}")
    failed = len(kept) - counts[Status.EXACT] - counts[Status.SKIPPED]
    return int(failed > 0 or counts[Status.EXACT] == 0)


def _parser() -> argparse.ArgumentParser:
    parser = command("operator_lists", __doc__)
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--samples", type=int, default=12, help="per operator, 0 for all")
    parser.add_argument("--suites", nargs="+", default=["op", "module"], choices=SUITES)
    parser.add_argument("--dtypes", nargs="+", default=list(USUAL_DTYPES), choices=list(DTYPES))
    parser.add_argument("--layouts", nargs="+", default=["contiguous"])
    parser.add_argument("--shard", default="1/1", help="this part of so many, such as 2/4")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for one sample")
    parser.add_argument("--output", type=Path, help="JSON file for every sample")
    return parser


if __name__ == "__main__":
    sys.exit(main())
