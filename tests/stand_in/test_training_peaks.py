"""Traces on any GPU against torch's own CUDA code: peaks of trainings, requests of programs.

    torchmem stand-in --gpu h100 -- pytest tests/stand_in

CUB's temporary storage differs between generations of GPUs, and with it what sorting requests.
"""

import os

import pytest
import torch
from torch import nn

from pytest_torchmem import measure, trace
from pytest_torchmem.checks.gpu import find_parting
from pytest_torchmem.integrations.training import REAL, TRACED, RunPeaks
from pytest_torchmem.targets.gpus import find_gpu, gpu_names
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.operators.cuda_programs import PROGRAMS

pytestmark = pytest.mark.skipif("STAND_IN_NAME" not in os.environ, reason="by: torchmem stand-in")


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


SINCE = {"counts": (2, 13), "histogram": (2, 12), "samples": (2, 12)}
"""Before these versions, single numbers are requested in another order."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_requests_are_those_of_the_gpu_that_is_described(name: str) -> None:
    if SINCE.get(name, TORCH_VERSION) > TORCH_VERSION:
        pytest.skip("single numbers come in another order")
    gpu = next(one for one in gpu_names() if find_gpu(one).product == os.environ["STAND_IN_NAME"])
    measured = measure(PROGRAMS[name], device="cuda")
    traced = trace(PROGRAMS[name], device="cuda", gpu=gpu, memory="unlimited")
    assert find_parting(traced, measured) is None
