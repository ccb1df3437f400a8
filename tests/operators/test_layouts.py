"""Outputs are laid out as the CPU's kernels lay them out, whatever the layout of the inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_torchmem import trace
from tests.results import result_of

aten = torch.ops.aten


def turned(*shape: int) -> Tensor:
    """Return a tensor whose first dimension is the densest."""
    return torch.rand(shape).transpose(0, -1).contiguous().transpose(0, -1)


def rows(*shape: int) -> Tensor:
    return torch.rand(shape)


OPERATORS: dict[str, Callable[[], Any]] = {
    "abs": lambda: turned(4, 5).abs(),
    "isinf": lambda: turned(4, 5).isinf(),
    "add": lambda: turned(4, 5) + rows(4, 5),
    "add the other way": lambda: rows(4, 5) + turned(4, 5),
    "logical_and": lambda: torch.logical_and(turned(4, 5), rows(4, 5)),
    "logical_and broadcast": lambda: torch.logical_and(rows(5), turned(4, 5)),
    "copysign": lambda: torch.copysign(turned(4, 5), rows(4, 5)),
    "dropout backward": lambda: aten.native_dropout_backward(turned(4, 5), rows(4, 5) > 0, 2.0),
    "hardswish backward": lambda: aten.hardswish_backward(rows(4, 5), turned(4, 5)),
    "softplus backward": lambda: aten.softplus_backward(rows(4, 5), turned(4, 5), 1, 20),
    "gelu backward": lambda: aten.gelu_backward(rows(4, 5), turned(4, 5)),
    "mse_loss": lambda: aten.mse_loss(turned(4, 5), rows(4, 5), 0),
    "mse_loss backward": lambda: aten.mse_loss_backward(rows(4, 5), turned(4, 5), rows(4, 5), 0),
    "cross entropy of probabilities": lambda: aten.binary_cross_entropy(
        turned(4, 5), rows(4, 5), None, 0
    ),
    "its backward": lambda: aten.binary_cross_entropy_backward(
        rows(4, 5), turned(4, 5), turned(4, 5), None, 0
    ),
    "log_softmax backward": lambda: aten._log_softmax_backward_data(
        turned(4, 5), rows(4, 5), 1, torch.float32
    ),
    "softmax": lambda: turned(4, 5).softmax(1),
    "layer norm": lambda: aten.native_layer_norm(turned(4, 5, 6), [6], None, None, 1e-5),
    "layer norm backward": lambda: aten.native_layer_norm_backward(
        rows(4, 5, 6),
        turned(4, 5, 6),
        [6],
        rows(4, 5, 1),
        rows(4, 5, 1),
        rows(6),
        rows(6),
        [True] * 3,
    ),
    "layer norm backward of turned rows": lambda: aten.native_layer_norm_backward(
        rows(2, 5, 6).transpose(1, 2),
        rows(2, 5, 6).transpose(1, 2),
        [5],
        rows(2, 6, 1),
        rows(2, 6, 1),
        rows(5),
        rows(5),
        [True] * 3,
    ),
    "batch norm": lambda: aten.native_batch_norm(
        turned(4, 5, 6), None, None, None, None, True, 0.1, 1e-5
    ),
    "batch norm of turned rows": lambda: aten.native_batch_norm(
        rows(4, 6, 5).transpose(1, 2), None, None, None, None, True, 0.1, 1e-5
    ),
    "batch norm backward": lambda: aten.native_batch_norm_backward(
        rows(4, 5, 6), turned(4, 5, 6), None, None, None, rows(5), rows(5), True, 1e-5, [True] * 3
    ),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_layouts(operator: str) -> None:
    def strides() -> list[tuple[int, ...]]:
        made = OPERATORS[operator]()
        tensors = [made] if isinstance(made, Tensor) else [t for t in made if t is not None]
        return [tensor.stride() for tensor in tensors]

    assert result_of(strides) == strides()


def test_on_the_host_the_order_is_that_of_what_is_returned():
    profile = trace(lambda: torch.native_dropout(torch.ones(4096), 0.5, True), device="cpu")
    sizes = [
        allocation.nbytes
        for allocation in profile.timeline.allocations
        if "dropout" in allocation.origin.operator
    ]
    assert sizes[:2] == [16_384, 4096]
