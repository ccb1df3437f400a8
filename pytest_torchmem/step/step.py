"""The training step itself: one program, which a trace and a measurement both run.

What a name keeps alive here is part of the result, so the step is written the way a training loop
usually is: ``output`` and ``loss`` are alive until their step ends, and the optimizer is made
before the first forward and outlives the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.step.trees import tensors_in


def run_target(
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
) -> object:
    """Run a module's training step, or a callable as it is, and return what outlives it.

    That is what ``run_step`` returns for a module, and for a callable what it returned; whoever
    wants to know what is live at the end holds it until then.
    """
    __tracebackhide__ = True
    check_step(target, loss_fn, backward, optimizer, steps)
    if isinstance(target, torch.nn.Module):
        return run_step(target, args, kwargs, loss_fn, backward, optimizer, steps)
    result: object = target(*args, **kwargs)
    return result


def check_step(
    target: Any,
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
) -> None:
    """Raise ``UsageError`` where the arguments of a step contradict each other."""
    if not callable(target):
        raise UsageError(f"expected an nn.Module or a callable, not {type(target).__name__}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps={steps!r}: expected a whole number of at least 1")
    if isinstance(target, torch.nn.Module):
        if optimizer is not None and not callable(optimizer):
            raise UsageError(
                f"optimizer={type(optimizer).__name__} object: expected a class or function that "
                "makes an optimizer from parameters, such as torch.optim.AdamW"
            )
        if optimizer is not None and not backward:
            raise UsageError("an optimizer steps on gradients: leave backward=True with optimizer=")
        return
    given = {
        "loss_fn": loss_fn is not None,
        "backward": not backward,
        "optimizer": optimizer is not None,
        "steps": steps != 1,
    }
    names = ", ".join(f"{name}=" for name, is_given in given.items() if is_given)
    if names:
        raise UsageError(
            f"{names} only applies to an nn.Module; a callable does its whole step itself"
        )


def run_step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], Any] | None = None,
    backward: bool = True,
    optimizer: Callable[..., Any] | None = None,
    steps: int = 1,
) -> object:
    """Run ``steps`` training steps of ``model`` and return what outlives them.

    That is the optimizer if there is one; without ``backward`` it is the last output, which is
    then what the forward is for. Without an optimizer the gradients of several steps accumulate.
    """
    __tracebackhide__ = True
    if not backward:
        for _ in range(steps):
            output = model(*args, **kwargs)
        return output
    stepper = optimizer(model.parameters()) if optimizer is not None else None
    for index in range(steps):
        if index and stepper is not None:
            stepper.zero_grad()
        _one_step(model, args, kwargs, loss_fn, stepper)
    return stepper


def _one_step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[[Any], Any] | None,
    stepper: torch.optim.Optimizer | None,
) -> None:
    __tracebackhide__ = True
    output = model(*args, **kwargs)
    loss = loss_fn(output) if loss_fn is not None else reduce_to_scalar(output)
    loss.backward()
    if stepper is not None:
        stepper.step()


def reduce_to_scalar(output: Any) -> torch.Tensor:
    """Return ``output.loss``, or else the sum of the output's floating tensors that require grad.

    A tensor that the output holds twice (a last hidden state, also in a tuple of all of them)
    counts once.
    """
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    seen: set[int] = set()
    total: torch.Tensor | None = None
    for tensor in tensors_in(output):
        if id(tensor) in seen or not tensor.is_floating_point() or not tensor.requires_grad:
            continue
        seen.add(id(tensor))
        part = tensor.sum()
        total = part if total is None else total + part
    if total is None:
        raise UsageError(
            f"the model's output ({type(output).__name__}) holds no floating tensor that requires "
            "grad, so there is nothing to call backward() on: pass loss_fn= or backward=False"
        )
    return total
