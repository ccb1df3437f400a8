"""Compare the values that a trace on fake cuda computes with those of the CPU; no GPU is needed.

python -m benchmarks.conformance_values                       four samples of each operator
python -m benchmarks.conformance_values -k 'conv|lstm'        names that match
python -m benchmarks.conformance_values --suites optimizer    torch's optimizers alone

torch's own samples of its operators, modules and optimizers run for real on the CPU, and on fake
cuda with ``values="real"``: outputs, gradients, and three steps of each optimizer with each of its
implementations. A sample is skipped if it fails for real, if two real runs differ, or if torch has
no kernel of its operator for CUDA.
"""

from __future__ import annotations

import argparse
import copy
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

import pytest_torchmem as torchmem
from benchmarks.comparison import Comparison, Status, describe
from benchmarks.conformance import report
from benchmarks.conformance import samples as conformance
from benchmarks.conformance.samples import DTYPES, units
from benchmarks.isolation.sample import NothingToDifferentiate, Sample, Unit
from benchmarks.isolation.supervisor import Limits, Supervisor
from pytest_torchmem.step.trees import replace_leaves, tensors_in

SUITES = ("op", "module", "optimizer")
_FAILED = (Status.DIFFERENT, Status.UNSUPPORTED, Status.CRASHED)
_STEPS = 3
_TOLERANCES = {"float32": (1e-4, 1e-5), "bfloat16": (2e-2, 2e-2)}


class Differs(Exception):
    """A traced value is not what the CPU has."""


@dataclass(frozen=True, slots=True)
class OptimizerUnit:
    """All arguments of one optimizer that torch's own tests have."""

    name: str

    @property
    def case(self) -> str:
        """Return the unit's name within a run."""
        return f"optimizer:{self.name}:float32"


def optimizers(pattern: str) -> list[OptimizerUnit]:
    """Return the optimizers whose names match."""
    names = [info.optim_cls.__name__ for info in _optimizers()]
    return [OptimizerUnit(name) for name in names if re.search(pattern, name)]


@functools.cache
def _optimizers() -> list[Any]:
    from torch.testing._internal.common_optimizers import optim_db

    return [*optim_db]


def samples(unit: Unit, limit: int) -> Iterator[Sample]:
    """Yield the samples of an operator, a module or an optimizer."""
    if isinstance(unit, OptimizerUnit):
        return _of_optimizer(unit)
    assert isinstance(unit, conformance.Unit)
    return conformance.samples(unit, limit)


def _of_optimizer(unit: OptimizerUnit) -> Iterator[Sample]:
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


def _step(sample: Sample, device: str) -> list[Any]:
    """Run a sample's forward and backward on ``device``; return its outputs and gradients."""
    module = copy.deepcopy(sample.target).to(device)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device).requires_grad_(tensor.requires_grad)

    args, kwargs = replace_leaves((sample.args, dict(sample.kwargs)), Tensor, moved)
    torch.manual_seed(0)
    output = module(*args, **kwargs)
    results: list[Any] = [*tensors_in(output)]
    wanted = [*module.parameters(), *tensors_in((args, kwargs))]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    try:
        loss = sample.options["loss_fn"](output)
    except NothingToDifferentiate:
        return results
    return [*results, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def run_sample(case: str, sample: Sample, announce: Callable[[], None]) -> Comparison:
    """Run one sample on the CPU and on fake cuda, and compare what it computes."""
    is_optimizer = case.startswith("optimizer:")
    run = sample.target if is_optimizer else functools.partial(_step, sample)
    tolerance = _TOLERANCES[next(name for name in _TOLERANCES if name in case)]
    try:
        real, again = run("cpu"), run("cpu")
        _check(real, again, tolerance)
    except Exception as error:
        return Comparison(case, Status.SKIPPED, error=describe(error), detail=sample.detail[:400])
    announce()  # what crashes from here on is the trace's fault

    def traced() -> None:
        _check(real, run("cuda"), tolerance)

    found = Comparison(case, Status.EXACT)
    try:
        torchmem.trace(traced, device="cuda", values="real")
    except Differs as error:
        found = Comparison(case, Status.DIFFERENT, error=describe(error))
    except NotImplementedError as error:
        is_missing = str(error).startswith("Could not run")
        status = Status.SKIPPED if is_missing else Status.UNSUPPORTED
        found = Comparison(case, status, error=describe(error))
    except Exception as error:
        found = Comparison(case, Status.UNSUPPORTED, error=describe(error))
    return Comparison(case, found.status, error=found.error, detail=sample.detail[:400])


def _check(real: Sequence[Any], other: Sequence[Any], tolerance: tuple[float, float]) -> None:
    if len(real) != len(other):
        raise Differs(f"{len(other)} results, and {len(real)} on the CPU")
    for position, (expected, found) in enumerate(zip(real, other, strict=True)):
        if isinstance(expected, Tensor) and isinstance(found, Tensor):
            _check_tensor(position, _dense(expected), _dense(found).cpu(), tolerance)
        elif expected != found:
            raise Differs(f"result {position} is {found}, and {expected} on the CPU")


def _check_tensor(
    position: int, expected: Tensor, found: Tensor, tolerance: tuple[float, float]
) -> None:
    about = f"result {position}, {conformance.geometry(expected)}"
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        raise Differs(f"{about}, is {conformance.geometry(found)}")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    relative, absolute = tolerance
    if not torch.allclose(expected.to(wide), found.to(wide), relative, absolute, equal_nan=True):
        raise Differs(f"{about}, has other values")


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the samples and print what differs; return 1 if anything does."""
    options = _parser().parse_args(arguments)
    tested = [suite for suite in options.suites if suite != "optimizer"]
    found: list[Unit] = [*units(options.pattern, tested, options.dtypes, ("contiguous",))]
    if "optimizer" in options.suites:
        found.extend(optimizers(options.pattern))
    limits = Limits(options.samples, options.seconds, options.threads)
    kept: list[Comparison] = []
    Supervisor(found, samples, limits, kept.append, run_sample).run(options.processes)
    print(", ".join(f"{name} {value}" for name, value in report.machine().items()))
    counts = Counter((one.case.partition(":")[0], one.status) for one in kept)
    statuses = (Status.EXACT, *_FAILED, Status.SKIPPED)
    rows = [[suite, *(counts[suite, status] for status in statuses)] for suite in options.suites]
    names = ("equal", "different", "unsupported", "crashed", "skipped")
    print(tabulate(rows, headers=("samples", *names)))
    print(report.errors_table(kept, _FAILED))
    return int(any(one.status in _FAILED for one in kept))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conformance_values",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("-k", dest="pattern", default="", help="regular expression for the names")
    parser.add_argument("--samples", type=int, default=4, help="per operator, 0 for all")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=SUITES)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=list(DTYPES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for one sample")
    return parser


if __name__ == "__main__":
    sys.exit(main())
