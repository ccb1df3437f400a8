"""What steps on cuda have in the host's memory, against torch's own CPU allocator."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pytest_torchmem as torchmem
from pytest_torchmem.targets.gpus import find_gpu

pytestmark = pytest.mark.skipif(
    os.environ.get("STAND_IN_NAME") != find_gpu("a100-80gb").product,
    reason="runs by: torchmem stand-in --gpu a100-80gb -- pytest tests/stand_in",
)


def offloads() -> None:
    layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
    with torch.autograd.graph.save_on_cpu():
        y = layers(torch.randn(64, 256, device="cuda")).relu().sum()
    y.backward()


def converts() -> None:
    torch.randn(1000, 100).to("cuda", torch.float16).to("cpu", torch.float32)


def trains() -> None:
    model = nn.Linear(100, 100).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(5, 100).cuda()).sum().backward()
        optimizer.step()
    {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def loads() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(64, 100), torch.randint(0, 5, (64,)))
    for x, _ in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
        x.cuda().sum()


@pytest.mark.parametrize("program", [offloads, converts, trains, loads])
def test_the_hosts_peak_is_that_of_the_real_host(program: Callable[[], None]) -> None:
    program()
    measured = torchmem.measure(program, device="cpu")
    assert torchmem.trace(program, device="cuda", gpu="a100-80gb").host_peak == measured.peak
