"""The training step itself: one program, which a trace and a measurement both run.

What a name keeps alive here is part of the result, so the step is written the way a training loop
usually is: ``output`` and ``loss`` are alive until their step ends, and the optimizer is made
before the first forward and outlives the last step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.step.trees import tensors_in


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Step:
    """What is done with a module: its forward, ``backward()`` and the optimizer's step, ``steps``
    times over. A callable does its whole step itself, and is called ``steps`` times.
    """

    loss_fn: Callable[[Any], Any] | None = None
    backward: bool = True
    optimizer: Callable[..., Any] | None = None
    steps: int = 1

    @classmethod
    def taken_from(cls, kwargs: Mapping[str, Any]) -> "tuple[Step, dict[str, Any]]":
        """Return the step that keyword arguments describe, and those that are the target's own."""
        names = {option.name for option in fields(cls)}
        options = {name: value for name, value in kwargs.items() if name in names}
        return cls(**options), {name: kwargs[name] for name in kwargs if name not in names}

    def options(self) -> dict[str, Any]:
        """Return the step as keyword arguments of ``trace`` and ``measure``."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    def check(self, target: Any) -> None:
        """Raise ``UsageError`` where these options contradict each other or ``target``."""
        if not callable(target):
            raise UsageError(f"expected an nn.Module or a callable, not {type(target).__name__}")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise UsageError(f"steps={self.steps!r}: expected a whole number of at least 1")
        if not isinstance(target, nn.Module):
            names = ", ".join(
                f"{option.name}="
                for option in fields(self)
                if option.name != "steps" and getattr(self, option.name) != option.default
            )
            if names:
                raise UsageError(
                    f"{names} only applies to an nn.Module; a callable does its whole step itself"
                )
        elif self.optimizer is not None:
            if not callable(self.optimizer):
                raise UsageError(
                    f"optimizer={type(self.optimizer).__name__} object: expected a class or "
                    "function that makes an optimizer from parameters, such as torch.optim.AdamW"
                )
            if not self.backward:
                raise UsageError(
                    "an optimizer steps on gradients: leave backward=True with optimizer="
                )

    def run(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        begins: Callable[[], None] | None = None,
    ) -> object:
        """Run the steps of a module or a callable, and return what outlives them.

        That is what the callable returned, or the optimizer if there is one; without ``backward``
        the last output, which is then what the forward is for. Whoever wants to know what is live
        at the end holds it until then. Without an optimizer the gradients of several steps
        accumulate. ``begins`` is called before each step but the first where no backward of a
        module's tells that one begins.
        """
        self.check(target)
        if not isinstance(target, nn.Module) or not self.backward:
            for index in range(self.steps):
                if index and begins is not None:
                    begins()
                output: object = target(*args, **kwargs)
            return output
        optimizer = self.optimizer(target.parameters()) if self.optimizer is not None else None
        for index in range(self.steps):
            if index and optimizer is not None:
                optimizer.zero_grad()
            self._run_once(target, args, kwargs, optimizer)
        return optimizer

    def _run_once(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        output = model(*args, **kwargs)
        loss = self._loss_of(output)
        if not torch.is_grad_enabled() and not getattr(loss, "requires_grad", True):
            raise UsageError(_NO_GRADIENTS)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self.loss_fn is None:
            return reduce_to_scalar(output)
        try:
            return self.loss_fn(output)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if str(error).startswith(_SEVERAL_DEVICES):
                error.args = (f"{error}. {_CLOSED_OVER}",)
            raise


#: What torch raises for it (ATen/native/TensorIterator.cpp, compute_types; ATen/TensorUtils.cpp).
_SEVERAL_DEVICES = "Expected all tensors to be on the same device"
_CLOSED_OVER = (
    "The model, its inputs and a loss_fn that is a module are moved to the device, and a tensor "
    "that another loss_fn brings with it is not: write target.to(output.device) in loss_fn"
)


_NO_GRADIENTS = (
    "there is nothing to call backward() on, since gradients are off around the step: leave "
    "torch.no_grad() or torch.inference_mode() first, or pass backward=False"
)


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
    if total is None and not torch.is_grad_enabled():
        raise UsageError(_NO_GRADIENTS)
    if total is None:
        raise UsageError(
            f"the model's output ({type(output).__name__}) holds no floating tensor that requires "
            "grad, so there is nothing to call backward() on: pass loss_fn= or backward=False"
        )
    return total
