"""Compare the values that traces on both fake devices compute with those of the CPU.

python -m benchmarks.conformance_values                       four samples of each operator
python -m benchmarks.conformance_values -k 'conv|lstm'        names that match
python -m benchmarks.conformance_values --suites optimizer    torch's optimizers alone

torch's own samples of its operators, modules and optimizers, as they are, with changed tensors
(``EDGES``) and in other ways (``MODES``), run for real on the CPU, and on fake cpu and fake cuda
with ``values="real"``: outputs, gradients of a sum and of a weighted one, three steps of each
optimizer with each of its implementations, and drawn programs (``benchmarks.programs``). Equal is
also what is no further from the same in float64 than four times what the CPU is, as torch compares
its fused kernels (test/test_transformers.py, ``fudge_factor``). A sample is told if the trace says
that it does not know the values. It is skipped if it fails for real, if two real runs differ, or if
torch has no kernel of its operator for CUDA.
"""

import argparse
import copy
import functools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.autograd import forward_ad

import pytest_torchmem as torchmem
from benchmarks import command
from benchmarks.comparison import Comparison, Status, describe
from benchmarks.conformance import report
from benchmarks.conformance import samples as conformance
from benchmarks.conformance.samples import (
    DTYPES,
    EDGES,
    LAYOUTS,
    MODES,
    USUAL_DTYPES,
    VARIANTS,
    real_sum,
    units,
)
from benchmarks.isolation.sample import NothingToDifferentiate, Sample, Unit
from benchmarks.isolation.supervisor import Limits, Supervisor
from benchmarks.programs.__main__ import CHUNK
from benchmarks.programs.drawing import drawn
from benchmarks.programs.program import Program
from pytest_torchmem.step.trees import replace_leaves, tensors_in

SUITES = ("op", "module", "optimizer", "program")
_FAILED = (Status.DIFFERENT, Status.UNSUPPORTED, Status.CRASHED)
_STEPS, _SEEDS = 3, 8
_TOLERANCES = {torch.float32: 1e-5, torch.complex64: 1e-5}
"""Those of other types are their resolution."""


class Differs(Exception):
    """A traced value is not what the CPU has."""


@dataclass(frozen=True, slots=True)
class WholeUnit:
    """All arguments of one optimizer that torch's own tests have, or programs of a seed."""

    suite: str
    name: str

    @property
    def case(self) -> str:
        """Return the unit's name within a run."""
        return f"{self.suite}:{self.name}:float32"


def whole(pattern: str, suites: Sequence[str]) -> list[WholeUnit]:
    """Return the optimizers whose names match, and the seeds of programs."""
    names = [info.optim_cls.__name__ for info in _optimizers()]
    found = [WholeUnit("optimizer", name) for name in names if re.search(pattern, name)]
    found += [WholeUnit("program", str(seed)) for seed in range(_SEEDS)]
    return [unit for unit in found if unit.suite in suites]


@functools.cache
def _optimizers() -> list[Any]:
    from torch.testing._internal.common_optimizers import optim_db

    return [*optim_db]


def samples(unit: Unit, limit: int) -> Iterator[Sample]:
    """Yield the samples of an operator, a module or an optimizer."""
    if isinstance(unit, WholeUnit):
        if unit.suite == "optimizer":
            return _of_optimizer(unit)
        runs = ((functools.partial(_on_default_device, p), p) for p in drawn(int(unit.name), CHUNK))
        return (Sample(index, run, detail=str(p)) for index, (run, p) in enumerate(runs))
    assert isinstance(unit, conformance.Unit)
    return conformance.samples(unit, limit)


def _of_optimizer(unit: WholeUnit) -> Iterator[Sample]:
    (info,) = (one for one in _optimizers() if one.optim_cls.__name__ == unit.name)
    implementations: list[dict[str, bool]] = [{}]
    implementations += [{"foreach": True}] if "foreach" in info.supported_impls else []
    implementations += [{"fused": True}] if "fused" in info.supported_impls else []
    index = 0
    for given in info.optim_inputs_func(device="cpu"):
        if given.params is not None:
            continue
        for implementation in implementations:
            options = {**given.kwargs, **implementation}
            make = functools.partial(_trained, info, options)
            yield Sample(index, make, detail=f"{given.desc} {implementation}")
            index += 1


def _on_default_device(program: Program, device: str) -> list[Any]:
    torch.manual_seed(0)
    with torch.device(device):
        made = program()
    return [part for tensor in made for part in (tensor.detach(), tensor.grad)]


def _trained(info: Any, options: dict[str, Any], device: str) -> list[Any]:
    torch.manual_seed(0)
    options = {name: copy.deepcopy(value) for name, value in options.items()}
    model: nn.Module
    if info.only_supports_sparse_grads:
        model, inputs = nn.Embedding(5, 3, sparse=True), torch.tensor([1, 2, 1])
    else:
        # Matrices alone: there are optimizers that take nothing else.
        layers = nn.Linear(4, 5, bias=False), nn.Linear(5, 2, bias=False)
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        inputs = torch.randn(3, 4)
    model, inputs = model.to(device), inputs.to(device)
    optimizer = info.optim_cls(model.parameters(), **options)

    def loss() -> Tensor:
        optimizer.zero_grad()
        found: Tensor = model(inputs).square().sum()
        found.backward()
        return found

    losses = [optimizer.step(loss) for _ in range(_STEPS)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def _step(sample: Sample, mode: str, device: str, *, exactly: bool = False) -> list[Any]:
    """Run a sample's forward and backward on ``device``; return its outputs and gradients."""
    module = copy.deepcopy(sample.target).to(device)
    module = module.double() if exactly else module

    def moved(tensor: Tensor) -> Tensor:
        own = tensor.detach()
        if exactly and (own.is_floating_point() or own.is_complex()):
            own = own.to(_wide(own))
        if own.layout is torch.strided and not own.is_contiguous():
            size = own.untyped_storage().nbytes() // own.element_size()
            whole = own.as_strided((size,), (1,), 0).clone().to(device)
            own = whole.as_strided(own.shape, own.stride(), own.storage_offset()).detach()
        else:
            own = own.clone().to(device)
        return own.requires_grad_(tensor.requires_grad)

    args, kwargs = replace_leaves((sample.args, dict(sample.kwargs)), Tensor, moved)
    torch.manual_seed(0)
    if mode == "forward_ad":
        return _with_tangents(module, args, kwargs)
    lower = torch.autocast(device, torch.bfloat16, enabled=mode == "autocast")
    with torch.set_grad_enabled(mode != "no_grad"), lower:
        output = module(*args, **kwargs)
    results: list[Any] = [*tensors_in(output)]
    wanted = [*module.parameters(), *tensors_in((args, kwargs))]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    try:
        for loss in (real_sum(output), real_sum([*map(_weighted, tensors_in(output))])):
            results += torch.autograd.grad(
                loss, wanted, allow_unused=True, retain_graph=True, create_graph=mode == "twice"
            )
        if mode == "twice":
            of_gradients = real_sum([*map(_weighted, tensors_in(results[-len(wanted) :]))])
            results += torch.autograd.grad(of_gradients, wanted, allow_unused=True)
    except NothingToDifferentiate:
        pass
    return results


def _with_tangents(module: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """Return what ``module`` makes of inputs whose tangents are ones, and the tangents of that."""

    def dual(tensor: Tensor) -> Tensor:
        own = tensor.detach()
        return forward_ad.make_dual(own, torch.ones_like(own)) if tensor.requires_grad else own

    with forward_ad.dual_level():
        args, kwargs = replace_leaves((args, kwargs), Tensor, dual)
        made = tensors_in(module(*args, **kwargs))
        return [part for tensor in made for part in forward_ad.unpack_dual(tensor)]


def _weighted(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or not tensor.requires_grad:
        return tensor
    weights = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device).cos()
    return tensor * weights.view(tensor.shape).to(tensor.dtype)


def run_sample(
    case: str,
    sample: Sample,
    announce: Callable[[], None],
    devices: Sequence[Literal["cpu", "cuda"]],
) -> Comparison:
    """Run one sample on the CPU and on fake devices, and compare what it computes."""
    mode = next((mode for mode in MODES if f":{mode}:" in case), "")
    step = functools.partial(_step, sample, mode)
    run = step if isinstance(sample.target, nn.Module) else sample.target
    detail = sample.detail[:400]
    try:
        real, again = run("cpu"), run("cpu")
        _check(real, again)
        exact = functools.cache(functools.partial(_exact, step, sample, len(real)))
    except Exception as error:
        return Comparison(case, Status.SKIPPED, error=describe(error), detail=detail)
    announce()  # what crashes from here on is the trace's fault
    # Autocast on a GPU lowers other operators than on the CPU.
    for device in devices[: 1 if mode == "autocast" else None]:
        try:
            torchmem.trace(
                lambda where=device: _check(real, run(where), exact), device=device, **_OPTIONS
            )
        except Exception as error:
            why = f"{device}: {describe(error)}"
            return Comparison(case, _status(error), error=why, detail=detail)
    return Comparison(case, Status.EXACT, detail=detail)


_OPTIONS: Any = {"values": "real"}


def _status(error: Exception) -> Status:
    if isinstance(error, Differs):
        return Status.DIFFERENT
    if isinstance(error, torchmem.UnknownValueError):
        return Status.NOT_JUDGED
    is_missing = isinstance(error, NotImplementedError) and str(error).startswith("Could not run")
    return Status.SKIPPED if is_missing else Status.UNSUPPORTED


def _exact(step: Callable[..., list[Any]], sample: Sample, count: int) -> list[Any]:
    """Return what a sample computes in float64; nothing where that cannot be compared."""
    if not isinstance(sample.target, nn.Module):
        return [None] * count
    try:
        exact = step("cpu", exactly=True)
    except Exception:  # torch has no kernel of it for float64
        return [None] * count
    return exact if len(exact) == count else [None] * count


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _check(
    real: Sequence[Any], other: Sequence[Any], exact: Callable[[], list[Any]] | None = None
) -> None:
    if len(real) != len(other):
        raise Differs(f"{len(other)} results, and {len(real)} on the CPU")
    for position, (expected, found) in enumerate(zip(real, other, strict=True)):
        if isinstance(expected, Tensor) and isinstance(found, Tensor):
            expected, found = _dense(expected), _dense(found)
            if not found.is_cpu:  # a GPU's kernels have strides and statistics of their own
                expected, found = expected.contiguous(), found.cpu().contiguous()
                found = found.to(expected.dtype)
            try:
                _check_tensor(position, expected, found)
            except Differs:
                if exact is None or not _is_as_exact(expected, found, exact()[position]):
                    raise
        elif expected != found:
            raise Differs(f"result {position} is {found}, and {expected} on the CPU")


def _check_tensor(position: int, expected: Tensor, found: Tensor) -> None:
    about = f"result {position}, {conformance.geometry(expected)}"
    if conformance.geometry(expected) != conformance.geometry(found):
        raise Differs(f"{about}, is {conformance.geometry(found)}")
    wide = _wide(expected)
    tolerance = 0.0
    if expected.is_floating_point() or expected.is_complex():
        tolerance = _TOLERANCES.get(expected.dtype) or torch.finfo(expected.dtype).resolution
    first, second = expected.to(wide), found.to(wide)
    if not torch.allclose(second, first, tolerance, tolerance, equal_nan=True):
        most = (first - second).abs().nan_to_num(math.inf).max().item()
        raise Differs(f"{about}, has other values, by up to {most:.2g}")


def _is_as_exact(expected: Tensor, found: Tensor, exact: Any) -> bool:
    """Whether what was found is no further from what is exact than four times what the CPU has."""
    if not isinstance(exact, Tensor) or exact.shape != expected.shape or found.dtype == torch.bool:
        return False
    exact = _dense(exact)
    errors = [(one.to(_wide(one)) - exact).norm().item() for one in (expected, found)]
    return math.isfinite(errors[1]) and errors[1] <= 4 * errors[0]


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the samples and print what differs; return 1 if anything does."""
    options = _parser().parse_args(arguments)
    tested = [suite for suite in options.suites if suite in ("op", "module")]
    part, parts = (int(number) for number in options.shard.split("/"))
    kinds = (options.dtypes, options.layouts, options.variants)
    found: list[Unit] = [*units(options.pattern, tested, *kinds)]
    found.extend(whole(options.pattern, options.suites))
    found = found[part - 1 :: parts]
    limits = Limits(options.samples, options.seconds, options.threads)
    kept: list[Comparison] = []
    run = functools.partial(run_sample, devices=options.devices)
    Supervisor(found, samples, limits, kept.append, run).run(options.processes)
    if options.output:
        report.write(options.output, kept)
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()))
    counts = Counter((one.case.partition(":")[0], one.status) for one in kept)
    statuses = (Status.EXACT, *_FAILED, Status.NOT_JUDGED, Status.SKIPPED)
    rows = [[suite, *(counts[suite, status] for status in statuses)] for suite in options.suites]
    names = ("equal", "different", "unsupported", "crashed", "told", "skipped")
    print(tabulate(rows, headers=("samples", *names)))
    print(report.errors_table(kept, _FAILED))
    return int(any(one.status in _FAILED for one in kept))


def _parser() -> argparse.ArgumentParser:
    parser = command("conformance_values", __doc__)
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--samples", type=int, default=4, help="per operator, 0 for all")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=SUITES)
    parser.add_argument("--dtypes", nargs="+", default=[*USUAL_DTYPES], choices=list(DTYPES))
    layouts = (*LAYOUTS, *EDGES, *MODES)
    parser.add_argument("--layouts", nargs="+", default=layouts, choices=layouts)
    parser.add_argument("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--shard", default="1/1", help="this part of so many, such as 2/4")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"], choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, help="JSON file for every sample")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for one sample")
    return parser


if __name__ == "__main__":
    sys.exit(main())
