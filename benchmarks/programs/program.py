"""A program as data, and what runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.operators import BINARY, UNARY, UPDATES, VIEWS, Doubled

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction; ``first`` and ``second`` choose among the values there are at the time."""

    kind: str
    name: str = ""
    first: int = 0
    second: int = 0
    inner: tuple[Step, ...] = ()

    def __str__(self) -> str:
        """Return the instruction in short, ``"binary/matmul(0, 3)"``."""
        inner = "".join(f" {step}" for step in self.inner)
        braces = f" {{{inner} }}" if inner else ""
        return f"{self.kind}/{self.name}({self.first}, {self.second}){braces}"


@dataclass(frozen=True, slots=True)
class Program:
    """A callable that makes its parameters, runs its steps and ends with a backward pass."""

    size: int
    dtype: str
    parameters: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """Return the program in one line."""
        steps = " ".join(str(step) for step in self.steps)
        return f"{self.parameters} {self.dtype}[{self.size}, {self.size}]: {steps}"

    def __call__(self) -> list[Tensor]:
        """Run the program and return its parameters, which then have gradients."""
        dtype = DTYPES[self.dtype]
        shape = (self.size, self.size)
        parameters = [
            torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(self.parameters)
        ]
        values = [torch.randn(shape, dtype=dtype)]
        values.append(values[0] * parameters[0])
        for step in self.steps:
            run_step(step, values, parameters)
        finish(values)
        return parameters


def run_step(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    """Run one instruction, which changes ``values``."""
    _KINDS[step.kind](step, values, parameters)
    if len(values) > 6:
        values.pop(0)


def finish(values: list[Tensor]) -> None:
    """Call backward on the sum of all values that require grad."""
    losses = [value.sum() for value in values if value.requires_grad]
    if losses:
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        total.backward()


def _pick(tensors: list[Tensor], index: int) -> Tensor:
    return tensors[index % len(tensors)]


def _unary(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    values.append(UNARY[step.name](_pick(values, step.first)))


def _binary(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    values.append(BINARY[step.name](_pick(values, step.first), _pick(values, step.second)))


def _weighted(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    values.append(BINARY[step.name](_pick(values, step.first), _pick(parameters, step.second)))


def _view(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    values.append(VIEWS[step.name](_pick(values, step.first)))


def _update(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    UPDATES[step.name](_pick(values, step.first), _pick(values, step.second))


def _updated_sum(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    fresh = _pick(values, step.first) + _pick(parameters, step.second)
    UPDATES[step.name](fresh, _pick(values, step.second))
    values.append(fresh)


def _drop(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    if len(values) > 1:
        values.pop(step.first % len(values))


def _branch(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    source = _pick(values, step.first)
    results = []
    for inner in step.inner:
        branch = [source]
        run_step(inner, branch, parameters)
        results.append(branch[-1])
    del source
    total = results[0]
    for result in results[1:]:
        total = total + result
    values.append(total)


def _inner(step: Step, parameters: list[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(first: Tensor, second: Tensor) -> Tensor:
        values = [first, second]
        for inner in step.inner:
            run_step(inner, values, parameters)
        return values[-1]

    return run


def _checkpointed(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    function = _inner(step, parameters)
    first, second = _pick(values, step.first), _pick(values, step.second)
    values.append(checkpoint(function, first, second, use_reentrant=step.name == "reentrant"))


def _quiet(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    with torch.no_grad():
        made = _inner(step, parameters)(_pick(values, step.first), _pick(values, step.second))
    values.append(made)


def _saved(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    hooks = (
        save_on_cpu() if step.name == "on_cpu" else saved_tensors_hooks(torch.clone, torch.clone)
    )
    with hooks:
        made = _inner(step, parameters)(_pick(values, step.first), _pick(values, step.second))
    values.append(made)


def _function(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    values.append(Doubled.apply(_pick(values, step.first)))


def _hook(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    value = _pick(values, step.first)
    if not value.requires_grad:
        return
    if step.name == "retains":
        value.retain_grad()
    elif step.name == "replaces":
        # A checkpoint that enters the engine again may give none.
        value.register_hook(lambda gradient: None if gradient is None else gradient * 2.0)
    else:
        value.register_hook(lambda gradient: None)


def _backward(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    value = _pick(values, step.first)
    if not value.requires_grad:
        return
    if step.name == "dense":
        value.backward(torch.ones_like(value), retain_graph=True)
    elif step.name == "mean":
        value.mean().backward(retain_graph=True)
    else:
        # The graph ends here, as between the parts of a sequence that is learnt in pieces.
        value.sum().backward()
        del value
        values[:] = [value.detach() for value in values]


def _gradient(step: Step, values: list[Tensor], parameters: list[Tensor]) -> None:
    value = _pick(values, step.first)
    if not value.requires_grad:
        return
    count = 1 + step.second % len(parameters)
    gradients = torch.autograd.grad(
        (value * value).sum(),
        parameters[:count],
        retain_graph=True,
        create_graph=step.name == "differentiable",
        allow_unused=True,
    )
    values.extend(gradient for gradient in gradients if gradient is not None)


_KINDS: dict[str, Callable[[Step, list[Tensor], list[Tensor]], None]] = {
    "unary": _unary,
    "binary": _binary,
    "weighted": _weighted,
    "view": _view,
    "update": _update,
    "updated_sum": _updated_sum,
    "drop": _drop,
    "branch": _branch,
    "checkpointed": _checkpointed,
    "quiet": _quiet,
    "saved": _saved,
    "function": _function,
    "hook": _hook,
    "backward": _backward,
    "gradient": _gradient,
}
