"""``copy.deepcopy`` of tensors without memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import Replacements


class Copies:
    """Copies by operators; torch copies a storage's memory."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._original: Any = Tensor.__deepcopy__

    def replacements(self) -> Replacements:
        """Return what takes the place of torch's own."""
        return [
            (Tensor, {"__deepcopy__": self.of_tensor}),
            (nn.Parameter, {"__deepcopy__": self.of_parameter}),
        ]

    def of_tensor(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        """Copy a tensor with its gradient and attributes; torch/_tensor.py, ``__deepcopy__``."""
        if self._trace.record(tensor) is None:
            return self._original(tensor, memo)
        if id(tensor) in memo:
            return memo[id(tensor)]
        if not tensor.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = copy
        if tensor.grad is not None:
            copy.grad = self.of_tensor(tensor.grad, memo)
        copy.__dict__.update(tensor.__dict__)
        return copy

    def of_parameter(self, parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        """Copy a parameter without its gradient; torch/nn/parameter.py, ``__deepcopy__``."""
        if id(parameter) not in memo:
            copy = type(parameter)(parameter.data.clone(), parameter.requires_grad)
            memo[id(parameter)] = copy
        return memo[id(parameter)]
