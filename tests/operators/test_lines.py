"""Convolutions of one dimension on lines whose channels are the densest (text, speech)."""

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace


class Lines(nn.Module):
    """A convolution between layers that keep channels last."""

    def __init__(self, groups: int, kernel: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(64, 64, kernel, padding=kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.convolution(x.transpose(1, 2))).transpose(1, 2)


@pytest.mark.parametrize("groups", [1, 4, 64])
@pytest.mark.parametrize("kernel", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_turned_lines(groups: int, kernel: int, dtype: torch.dtype) -> None:
    model = Lines(groups, kernel).to(dtype)
    x = torch.rand(2, 49, 64, dtype=dtype, requires_grad=True)
    traced, measured = trace(model, x, host="here"), measure(model, x)
    assert traced.figures() == measured.figures()
