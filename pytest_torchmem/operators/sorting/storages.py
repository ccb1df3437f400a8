"""Outputs that CUDA kernels make as large as they can become, and then resize to what they are.

``resize_`` to fewer elements keeps the storage: what is left of it stays as long as the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator

_TRUTHS = 2


def _on_storage(output: Tensor, elements: int) -> Tensor:
    """Return ``output`` at the beginning of a storage for ``elements``."""
    found = output.new_empty(max(elements, output.numel()))[: output.numel()]
    return found.copy_(output)


def _unique(outputs: Sequence[Tensor], input: Tensor, return_counts: bool) -> tuple[Tensor, ...]:
    """Values, and counts where they are asked for, as many as the input has elements.

    native/cuda/UniqueCub.cu, ``compute_unique``; of booleans two.
    """
    values, *others = outputs
    elements = _TRUTHS if input.dtype is torch.bool else input.numel()
    found = [_on_storage(values, elements), *others]
    if return_counts:
        found[2] = _on_storage(found[2], elements)
    return tuple(found)


@operator("aten::_unique", "aten::_unique2").storages("cuda")
def unique(
    outputs: Sequence[Tensor], input: Tensor, return_counts: bool = False
) -> tuple[Tensor, ...]:
    """native/cuda/UniqueCub.cu, ``_unique_cuda`` and ``_unique2_cuda``."""
    return _unique(outputs, input, return_counts)


@operator("aten::unique_consecutive").storages("cuda")
def unique_consecutive(
    outputs: Sequence[Tensor],
    input: Tensor,
    return_counts: bool = False,
    dim: int | None = None,
) -> tuple[Tensor, ...]:
    """As ``unique``; along a dimension they are selected by index."""
    if dim is not None:
        return tuple(outputs)
    return _unique(outputs, input, return_counts)
