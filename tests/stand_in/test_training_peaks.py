"""Traces of steps whose models are on the GPU before, against the real runs."""

import os

import pytest
import torch
from torch import nn

from pytest_torchmem import measure, trace
from pytest_torchmem.integrations.training import REAL, TRACED, RunPeaks

pytestmark = pytest.mark.skipif(
    "STAND_IN_NAME" not in os.environ, reason="runs by: torchmem stand-in"
)


class Loss(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


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


def test_a_function_counts_what_it_uses_of_the_gpu() -> None:
    """Its model, the optimizer's states and views of one storage; they lie there afterwards."""
    model, table = nn.Linear(8, 8).cuda(), torch.zeros(64, 64, device="cuda")
    optimizer, view = torch.optim.AdamW(model.parameters()), table.T

    def train() -> None:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, device="cuda")).sum() + view.sum() + table.sum()
        loss.backward()
        optimizer.step()

    train()
    places = [one.data_ptr() for one in (*model.parameters(), table, view)]
    traced = trace(train, device="cuda")
    assert places == [one.data_ptr() for one in (*model.parameters(), table, view)]
    assert traced.baseline == 4 * (4 * (64 + 8) + 64 * 64)
    measured = measure(train, device="cuda").figures()
    for name in ("forward_peak", "backward_peak", "optimizer_peak", "end"):
        assert traced.figures()[name] - traced.baseline == measured[name], name


def test_a_compiled_step() -> None:
    """Graphs are compiled while it is measured: what the engine runs for that is no backward."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))
        compiled = torch.compile(model.cuda())
        compiled(torch.ones(32, 64, device="cuda")).sum().backward()

    first = measure(train, device="cuda").figures()  # with what Inductor tries its kernels on
    again, traced = measure(train, device="cuda").figures(), trace(train, device="cuda").figures()
    assert first["forward_peak"] >= again["forward_peak"] == traced["forward_peak"] > 300_000
    assert {name: traced[name] for name in again} == again
