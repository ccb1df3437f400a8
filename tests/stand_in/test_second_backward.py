"""A backward of a backward runs its nodes in the order of the engine's thread for a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import pytest_torchmem as torchmem
from pytest_torchmem.checks.gpu import find_parting

MEASURED = {"peak": 17_267_812, "backward_peak": 17_267_812, "end": 17_039_360}
"""What torch's own CUDA code took for ``penalised`` under the stand-in, in a process of its own."""


def penalised(device: str = "cuda") -> None:
    """Two steps with a penalty on the gradient, as of a WGAN, and a step through a step (MAML)."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    critic.append(nn.Linear(64, 1)).to(device)
    parameters = dict(critic.named_parameters())
    optimizer = torch.optim.Adam(parameters.values())
    for _ in range(2):
        x = torch.randn(8, 32, device=device, requires_grad=True)
        y = critic(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.mean() + ((gradient.norm(2, 1) - 1) ** 2).mean()
        inner = torch.autograd.grad(critic(x).mean(), [*parameters.values()], create_graph=True)
        stepped = {name: p - g for (name, p), g in zip(parameters.items(), inner, strict=True)}
        loss = loss + torch.func.functional_call(critic, stepped, (x,)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_the_figures_are_those_of_torchs_cuda_code() -> None:
    figures = torchmem.trace(penalised, device="cuda", gpu="a100-80gb").figures()
    assert {name: figures[name] for name in MEASURED} == MEASURED


@pytest.mark.skipif("STAND_IN_NAME" not in os.environ, reason="runs by: torchmem stand-in")
def test_requests_come_in_the_same_order() -> None:
    """In a new process, since the engine's thread counts nodes as long as the process lives."""
    subprocess.run([sys.executable, __file__], check=True)


if __name__ == "__main__":
    measured = torchmem.measure(penalised, device="cuda")
    traced = torchmem.trace(penalised, device="cuda", gpu="a100-80gb", memory="unlimited")
    print({name: measured.figures()[name] for name in MEASURED})
    assert len(measured.timeline.events) > 100
    assert find_parting(traced, measured) is None
    assert traced.figures().items() >= measured.figures().items()
