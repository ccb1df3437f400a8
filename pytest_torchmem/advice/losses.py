"""Losses of large vocabularies without the logits: fused, or in chunks that are computed again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.advice.function_mode import FunctionMode
from pytest_torchmem.advice.observed import CROSS_ENTROPY, LINEAR, PASSING
from pytest_torchmem.torch_private.tensors.autograd import current_graph_task

CHUNKS = 8
_ELEMENTS = 8
"""At least one of the widest type, whatever type they are of."""
HAS_FUSED = hasattr(F, "linear_cross_entropy")
"""Since torch 2.13."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A linear layer that is not computed until the loss."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class LossMode(FunctionMode):
    """Computes linear layers and the cross entropy of their output together.

    What the program has in between is a number, expanded to the shape of the logits.
    """

    def __init__(self, numbers: Collection[int], fused: bool) -> None:
        super().__init__()
        self._numbers, self._fused = frozenset(numbers), fused
        self._linears = 0
        self._layers = WeakIdKeyDictionary()

    def called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if func is LINEAR and current_graph_task() == -1:
            self._linears += 1
            if self._linears in self._numbers:
                return self._put_off(*args, **kwargs)
        if not isinstance(first, Tensor) or first not in self._layers:
            return func(*args, **kwargs)
        layer = self._layers[first]
        if func is CROSS_ENTROPY:
            return self._loss(layer, *args, **kwargs)
        if func not in PASSING:
            return func(*args, **kwargs)
        # Without memory of the logits' size: what it became is asked of a tensor on meta.
        shape = func(first.to("meta"), *map(_on_meta, args[1:]), **kwargs)
        stand_in = _stand_in(layer.hidden, shape.dtype, shape.shape)
        self._layers[stand_in] = layer
        return stand_in

    def _put_off(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = hidden.dtype
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        stand_in = _stand_in(hidden, dtype, (*hidden.shape[:-1], weight.shape[0]))
        self._layers[stand_in] = _Layer(hidden, weight, bias)
        return stand_in

    def _loss(self, layer: _Layer, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        rows = layer.hidden.reshape(-1, layer.hidden.shape[-1])[: len(logits)]
        if self._fused:
            for old in ("size_average", "reduce"):
                options.pop(old, None)
            return F.linear_cross_entropy(
                rows,
                layer.weight,
                target,
                linear_bias=layer.bias,
                options=nn.LinearCrossEntropyOptions(),
                **options,
            )
        options["reduction"] = "sum"

        def part(some: Tensor, wanted: Tensor) -> Tensor:
            found = F.linear(some, layer.weight, layer.bias).to(logits.dtype)
            return F.cross_entropy(found, wanted, **options)

        parts = [
            checkpoint(part, some, wanted, use_reentrant=False)
            for some, wanted in zip(rows.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        ]
        return torch.stack(parts).sum() / len(rows)


def _stand_in(like: Tensor, dtype: torch.dtype, shape: Any) -> Tensor:
    """Return a tensor of a shape and type without memory of its own, on that of another."""
    like = like.detach()
    if like.numel() < _ELEMENTS or not like.is_contiguous():
        return like.new_empty((), dtype=dtype).expand(shape)
    return like.view(-1)[:_ELEMENTS].view(dtype)[0].expand(shape)


def _on_meta(argument: Any) -> Any:
    return argument.to("meta") if isinstance(argument, Tensor) else argument
