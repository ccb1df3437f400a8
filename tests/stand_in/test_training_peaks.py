"""The real peak of a training on cuda is that of the whole run, and the traced one close to it."""

import os

import pytest
import torch
from torch import nn

from pytest_torchmem.integrations.training import REAL, TRACED, RunPeaks


class Loss(nn.Sequential):
    """The loss of a small model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x).sum()
        return loss


@pytest.mark.skipif("STAND_IN_NAME" not in os.environ, reason="runs by: torchmem stand-in")
def test_the_largest_batch_has_the_peak_of_the_run() -> None:
    loss = Loss(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    optimizer, peaks = torch.optim.AdamW(loss.parameters()), RunPeaks()
    peaks.begin()
    for size in (16, 4096, 8):
        x = torch.zeros(size, 64, device="cuda")
        peaks.see(x)
        loss(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = peaks.compare(loss, optimizer)
    assert figures[REAL] > 16_000_000
    assert figures[TRACED] == pytest.approx(figures[REAL], rel=0.01)
