"""The peak of the host's memory in snapshots and budgets."""

import pytest

from tests.plugin.conftest import Project

TESTS = """
import numpy as np, os, pytest, torch

TIMES = int(os.environ.get("TIMES", "1"))

@pytest.mark.memory_budget(tolerance="1%", device="cuda")
def test_offloads():
    kept = [torch.randn(1000, 100, device="cuda") for _ in range(2)]
    kept = [one.cpu() for one in kept * TIMES]

@pytest.mark.memory_budget(tolerance="1%", device="cpu")
def test_loads():
    batch = torch.from_numpy(np.zeros((1000, 100 * TIMES)))

@pytest.mark.memory_budget(host="1 MiB", device="cuda")
def test_host_budget():
    kept = [torch.randn(1000, 100, device="cuda") for _ in range(2)]
    kept = [one.cpu() for one in kept * TIMES]

@pytest.mark.memory_budget("1 MiB", device="cpu")
def test_budget():
    batch = torch.from_numpy(np.zeros((1000, 100 * TIMES)))

@pytest.mark.memory_budget(growth="0", device="cuda")
def test_steps():
    weight, kept = torch.ones(100, 100, device="cuda", requires_grad=True), []
    for _ in range(4):
        (weight * 2).sum().backward()
        if TIMES > 1:
            kept.append(weight.grad.cpu())
"""


def test_what_grows_on_the_host_fails(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write(test_net=TESTS)
    project.run("--torchmem-update", passed=5)
    project.run(passed=5)
    monkeypatch.setenv("TIMES", "3")
    project.run(failed=5).tells(
        "*+1.53 MiB (+200.0 %) host peak, cuda*",
        "*host peak*781.2 KiB*2.29 MiB*",
        "*2.29 MiB peak of host memory exceeds the budget of 1 MiB*",
        "*2.29 MiB peak of host memory exceeds the budget of 1 MiB*cpu*",
        "*+39.06 KiB alive after a step*",
    )


def test_a_snapshot_without_it_had_nothing_there(project, monkeypatch):
    project.write(test_net=TESTS)
    monkeypatch.setenv("TIMES", "0")
    project.run("--torchmem-update", "-k", "offloads", passed=1)
    monkeypatch.setenv("TIMES", "1")
    project.run("-k", "offloads", failed=1).tells("*+781.2 KiB*float32[[]1000, 100[]]*")
