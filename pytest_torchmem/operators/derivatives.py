"""The values of a backward that only cuda has a kernel of, by torch's own derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.torch_private.dispatch.keys import with_autograd


def gradients_of(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], gradients: Sequence[Any]
) -> list[Tensor | None]:
    """Return the gradients of ``function(*inputs)`` by its floating inputs, ``None`` for others.

    ``gradients`` are those of its outputs; an output whose gradient is ``None`` counts for nothing.
    """
    with torch.inference_mode(False), with_autograd(), torch.enable_grad():
        leaves = [None if one is None else one.detach().clone() for one in inputs]
        wanted = [one for one in leaves if one is not None and one.is_floating_point()]
        for leaf in wanted:
            leaf.requires_grad_()
        found = function(*leaves)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        pairs = [
            (output, gradient.to(output.dtype).clone())
            for output, gradient in zip(outputs, gradients, strict=False)
            if gradient is not None and output.requires_grad
        ]
        computed = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        )
        return [
            None if one is None or not one.is_floating_point() else next(computed) for one in leaves
        ]


def run_plainly(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function as on a thread that has no trace and no autocast, without gradients."""
    with with_autograd(), torch.no_grad():
        return function(*args)
