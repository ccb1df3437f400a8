"""A trace has nothing to do with the real GPU's context."""

import os
import subprocess
import sys

import pytest
import torch

from pytest_torchmem import trace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROGRAM = """
import torch
from pytest_torchmem import trace

def step():
    layers = torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.LSTM(8, 8)
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda"):
        loss = model(torch.randn(4, 3, 8, device="cuda"))[0].sum()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()

assert not torch.cuda.is_initialized()
assert trace(step, device="cuda").peak > 0
assert trace(torch.nn.Linear(2, 2), torch.ones(1, 2), device="cuda").peak > 0
assert not torch.cuda.is_initialized()
assert not torch._C._cuda_hasPrimaryContext(0)
torch.ones(3, device="cuda").sum().item()
"""


def test_no_context_is_made() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


@pytest.mark.skipif("STAND_IN_NAME" in os.environ, reason="needs kernels that compute")
def test_a_context_that_is_there_is_left_alone() -> None:
    held = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()

    def step() -> None:
        weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
        (weight * 2).sum().backward()
        assert torch.cuda.memory_allocated() > 0

    # The weight and its double; in the backward its gradient is there instead.
    assert trace(step, device="cuda", gpu="a100").peak == (2 << 22) + 520
    assert torch.cuda.memory_stats() == before
    assert torch.cuda.is_initialized()
    assert held.sum().item() == 1024
