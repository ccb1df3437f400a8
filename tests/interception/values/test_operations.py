"""The operations that a budget counts are those of torch's own counter, which is not imported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pytest_torchmem import trace
from pytest_torchmem.interception.values import contents


def step(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], None]:
    def program() -> None:
        inputs = [torch.ones(shape, requires_grad=True) for shape in shapes]
        function(*inputs).sum().backward()

    return program


@pytest.mark.parametrize(
    "program",
    [
        step(torch.mm, (3, 5), (5, 7)),
        step(torch.bmm, (2, 3, 5), (2, 5, 7)),
        step(torch.addmm, (7,), (3, 5), (5, 7)),
        step(torch.baddbmm, (2, 3, 7), (2, 3, 5), (2, 5, 7)),
        step(functional.conv1d, (2, 4, 9), (6, 4, 3)),
        step(lambda x, w: functional.conv2d(x, w, stride=2, padding=1), (2, 4, 9, 8), (6, 4, 3, 3)),
        step(lambda x, w: functional.conv2d(x[0], w), (1, 4, 9, 8), (6, 4, 3, 3)),
        step(functional.conv_transpose2d, (2, 4, 5, 6), (4, 3, 2, 2)),
        step(functional.conv3d, (1, 2, 5, 5, 5), (3, 2, 2, 2, 2)),
    ],
    ids=["mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "no batch", "transposed", "conv3d"],
)
def test_multiplications_are_those_of_torch(program, monkeypatch):
    counted: list[int] = []
    original = contents.operations_of

    def operations_of(call: Any, plan: Any) -> int:
        elements = sum(tensor.numel() for tensor in call.tensors)
        elements += sum(
            torch.Size(output.shape).numel()
            for output in contents.argument_leaves(plan.outputs, contents.Output)
        )
        counted.append(original(call, plan) - elements)
        return counted[-1] + elements

    def affords(self: contents.ValuesBudget, live: int, call: Any, plan: Any) -> bool:
        plan.cost = None  # of a call of the same geometry before
        return afforded(self, live, call, plan)

    afforded = contents.ValuesBudget.affords
    monkeypatch.setattr(contents.ValuesBudget, "affords", affords)
    monkeypatch.setattr(contents.ValuesBudget, "is_cheap", lambda self, cost: False)
    monkeypatch.setattr(contents, "operations_of", operations_of)
    trace(program)
    with FlopCounterMode(display=False) as mode:
        program()
    assert 2 * sum(counted) == mode.get_total_flops() > 0
