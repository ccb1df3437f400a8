"""Compare what other tools predict for recorded steps with what the GPU had.

python -m benchmarks.truth.peers benchmarks/truth/recorded/h100
python -m benchmarks.truth.peers DIR --only 'cnn/.*/float32$' --processes 8

A case is its model, two steps of it, and the peak of allocated bytes of both. A tool that wants
less than a program (one input, no autocast, the weights alone) is asked where it can answer.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import command
from benchmarks.comparison import percentile
from benchmarks.truth.compare import recorded_gpu, traced_figures
from benchmarks.truth.recording import PHASES, STEPS, load
from benchmarks.truth.settings import Case, build_inputs, build_model, cases, optimizer_of, run_step
from pytest_torchmem import Gpu

_PLAIN = ("float32", "bfloat16")
"""Settings that are nothing but the type of a model that is trained."""


def pytest_torchmem(case: Case, gpu: Gpu) -> int:
    """Trace the program."""
    return peak_of(traced_figures(case, gpu, tiny=False)[0])


def mem_tracker(case: Case, gpu: Gpu) -> int:
    """``torch.distributed._tools.MemTracker``, the one that torchtitan's estimation uses."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("cuda"), mock.patch.object(nn.Module, "_apply", _apply):
            model, inputs = build_model(case, tiny=False), build_inputs(case, tiny=False)
        optimizer = optimizer_of(model.parameters()) if case.setting.train else None
        tracker = MemTracker()
        tracker.track_external(model, *([optimizer] if optimizer else []), *inputs)
        with tracker:
            for _ in STEPS:
                run_step(model, inputs, optimizer, lambda phase: None)
                if optimizer is not None:
                    optimizer.zero_grad()
                tracker.reset_mod_stats()
        peaks = tracker.get_tracker_snapshot("peak")
    return max(int(sizes["Total"]) for at, sizes in peaks.items() if at.type == "cuda")


def _apply(
    module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Stand for ``Module._apply``, which cannot exchange the weights of a ``FakeTensorMode``."""
    changed: dict[Tensor, Tensor] = {}
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = part._parameters, part._buffers
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor not in changed:
                    with torch.no_grad():
                        made = change(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    changed[tensor] = nn.Parameter(made) if is_parameter else made
                table[name] = changed[tensor]
    return module


def kitsune(case: Case, gpu: Gpu) -> int | None:
    """``torch-kitsune``: models of one input, in one type."""
    from kitsune.predict import predict_memory

    inputs = build_inputs(case, tiny=False)
    if case.setting.name not in _PLAIN or len(inputs) > 1 or not inputs[0].is_floating_point():
        return None
    batch, *shape = inputs[0].shape
    dtype, model = case.setting.dtype, build_model(case, tiny=False)
    found = predict_memory(model, tuple(shape), batch, dtype, optimizer="adamw")
    return int(found.total_bytes)


def accelerate(case: Case, gpu: Gpu) -> int | None:
    """``accelerate estimate-memory``: four times the weights, for training with Adam."""
    from accelerate.utils import calculate_maximum_sizes

    if case.setting.name not in _PLAIN:
        return None
    with torch.device("meta"):
        model: nn.Module = build_model(case, tiny=False)
    return 4 * int(calculate_maximum_sizes(model)[0])


TOOLS = (pytest_torchmem, mem_tracker, kitsune, accelerate)


def peak_of(figures: dict[str, Any]) -> int:
    """Return the peak of allocated bytes of both steps."""
    found = (figures[step][phase] for step in STEPS for phase in PHASES if phase in figures[step])
    return max(int(one["allocated_bytes"]) for one in found)


def _asked(case: Case, gpu: Gpu) -> tuple[str, list[int | str | None]]:
    """Return a case's name, and each tool's figure, its error or None where it cannot be asked."""
    answers: list[int | str | None] = []
    for tool in TOOLS:
        try:
            answers.append(tool(case, gpu))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}"[:100])
    return case.key, answers


def _rows(recorded: dict[str, int], found: dict[str, list[int | str | None]]) -> Iterator[Any]:
    for position, tool in enumerate(TOOLS):
        answers = {key: answers[position] for key, answers in found.items()}
        errors = {
            key: (answer - recorded[key]) / recorded[key]
            for key, answer in answers.items()
            if isinstance(answer, int)
        }
        failed = sum(isinstance(answer, str) for answer in answers.values())
        if not errors:
            yield tool.__name__, 0, failed
            continue
        sizes = [abs(error) for error in errors.values()]
        worst = max(errors, key=lambda key: abs(errors[key]))
        yield (
            tool.__name__,
            len(errors),
            failed,
            sum(not error for error in sizes),
            sum(error <= 0.01 for error in sizes),
            f"{percentile(sizes, 0.5):.2%}",
            f"{percentile(sizes, 0.9):.2%}",
            f"{errors[worst]:+.0%} {worst}",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask all tools about all recorded cases and print their errors."""
    parser = command("truth.peers", __doc__)
    parser.add_argument("recording", type=Path, help="directory that record wrote")
    parser.add_argument("--only", default="", help="regular expression for the cases")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    recording = load(options.recording)
    gpu = recorded_gpu(recording.machine)
    wanted = [case for case in cases() if re.search(options.only, case.key)]
    recorded = {
        case.key: peak_of(figures)
        for case in wanted
        if (figures := recording.figures(case.key)) is not None
    }
    found: dict[str, list[int | str | None]] = {}
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        jobs = [pool.submit(_asked, case, gpu) for case in wanted if case.key in recorded]
        for job in jobs:
            key, answers = job.result()
            found[key] = answers
            print(key, recorded[key], *answers, file=sys.stderr, flush=True)
    headers = ("tool", "answers", "failures", "exact", "within 1 %", "p50", "p90", "worst")
    print(", ".join(f"{name} {value}" for name, value in recording.machine.items()))
    print(tabulate(_rows(recorded, found), headers=headers, disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
