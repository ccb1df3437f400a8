"""Outputs that CUDA kernels make as large as they can become, and then resize to what they are.

``resize_`` to fewer elements keeps the storage: what is left of it stays as long as the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_TRUTHS = 2


def _on_storage(output: Tensor, elements: int) -> Tensor:
    """Return ``output`` at the beginning of a storage for ``elements``."""
    found = output.new_empty(max(elements, output.numel()))[: output.numel()]
    return found.copy_(output)


def unique(
    outputs: Sequence[Tensor], input: Tensor, sorted: bool = True, *returns: bool
) -> tuple[Tensor, ...]:
    """Values, and counts where they are asked for, as many as the input has elements.

    native/cuda/UniqueCub.cu, ``compute_unique``; of booleans two.
    """
    values, *others = outputs
    elements = _TRUTHS if input.dtype is torch.bool else input.numel()
    found = [_on_storage(values, elements), *others]
    if len(returns) == 2 and returns[1]:
        found[2] = _on_storage(found[2], elements)
    return tuple(found)


def unique_consecutive(
    outputs: Sequence[Tensor],
    input: Tensor,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, ...]:
    """As ``unique``; along a dimension they are selected by index."""
    if dim is not None:
        return tuple(outputs)
    return unique(outputs, input, False, return_inverse, return_counts)


CUDA_STORAGES: dict[str, Callable[..., Any]] = {
    "aten::_unique": unique,
    "aten::_unique2": unique,
    "aten::unique_consecutive": unique_consecutive,
}
"""By operator: a function of real outputs and the arguments that returns such outputs."""
