"""Mocks of fixtures and tests that have checks, and a directory that a test has removed."""

from .conftest import Project


def test_mocks_hold_in_checks_and_a_directory_that_is_gone_is_no_obstacle(project: Project) -> None:
    project.write(
        test_net="""
import pytest, torch
from unittest.mock import patch
from torch import nn

@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

@pytest.fixture
def net():
    return nn.Linear(8, 8).cuda()

@pytest.mark.memory_budget("1 GiB", device="cuda")
@pytest.mark.parametrize("turn", range(2))
def test_marked(net, four, turn):
    assert torch.cuda.device_count() == 4
    net(torch.ones(1, 8).cuda()).sum().backward()

@pytest.mark.memory_budget("1 GiB", device="cuda")
@patch("torch.cuda.device_count", return_value=3)
def test_decorated(counted, net):
    assert torch.cuda.device_count() == 3
    net(torch.ones(1, 8).cuda()).sum().backward()
    counted.assert_called()

@pytest.mark.parametrize("there", [False, True])
def test_checked(torchmem, four, there):
    with patch("torch.cuda.is_available", return_value=there):
        torchmem.check(nn.Linear(8, 8), torch.ones(1, 8), device="cpu")
        torchmem.check(nn.Linear(8, 8), torch.ones(1, 8), device="cuda", name="gpu")

@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_nothing_is_left(net):
    assert torch.cuda.device_count() == 1
    net(torch.ones(1, 8).cuda()).sum().backward()

def test_real():
    assert torch.cuda.device_count.__globals__["__name__"] == "torch.cuda"
    assert torch.cuda.is_available.__globals__["__name__"] == "torch.cuda"
""",
        test_other="""
import os, torch

def test_there(torchmem, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    torchmem.check(lambda: torch.ones(8, requires_grad=True).sum().backward())
    os.chdir(tmp_path)
""",
    )
    project.run("--torchmem-update", passed=8)
