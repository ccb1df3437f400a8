"""Functions for the geometry of outputs, by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_torchmem.torch_private.patches import is_another

MetaFunction = Callable[..., Any]
_F = TypeVar("_F", bound=MetaFunction)

META_FUNCTIONS: dict[str, MetaFunction] = {}
"""By operator, ``"aten::geqrf"`` for every overload; from arguments on ``meta`` to such outputs."""


CPU_META_FUNCTIONS: dict[str, MetaFunction] = {}
"""The same for what is so on the CPU alone; to be asked first where an operator runs there."""


def meta(*operators: str, device: str | None = None) -> Callable[[_F], _F]:
    """Register the geometry of ``operators``, on ``"cpu"`` alone or on every device.

    Raises ``ValueError`` where one has a function already.
    """
    functions = CPU_META_FUNCTIONS if device == "cpu" else META_FUNCTIONS

    def register(function: _F) -> _F:
        for operator in operators:
            if is_another(functions.get(operator), function):
                raise ValueError(f"{operator} already has a function for its geometry")
            functions[operator] = function
        return function

    return register


def like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return an empty contiguous tensor of the type of ``tensor``, of its shape or another."""
    return tensor.new_empty(tuple(tensor.shape if shape is None else shape))


def laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return an empty tensor of the shape and type of ``tensor`` in a layout."""
    return torch.empty_like(tensor, memory_format=memory_format)
