"""A GPU that is named: what is traced has to fit on it."""

import re
from typing import Any

from pytest_torchmem.targets.gpus import find_gpu
from tests.plugin.conftest import Project, checking

MODEL = """
import pytest, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1000, 1000)

    def forward(self, x):
        return self.inner(x).relu()

def rows(count):
    return torch.empty(count, 1000, device="meta")

def net():
    return Net().to("meta")

"""
TOO_MUCH, ENOUGH = "rows(1 << 21)", "rows(1 << 10)"


def run(project: Project, body: str, *options: str, **outcomes: int) -> Any:
    return project.checks(*options, test_it=MODEL + body, **outcomes)


NAMED = f"""
T4 = pytest.mark.memory_budget(gpu="t4")

@T4
def test_marker(torchmem):
    torchmem.check(net(), {TOO_MUCH})

@pytest.mark.memory_budget("60 GiB", gpu="t4")
def test_limit(torchmem):
    torchmem.check(net(), {TOO_MUCH})

def test_argument(torchmem):
    torchmem.check(net(), {TOO_MUCH}, gpu="t4")

@T4
def test_body():
    model = Net().cuda()
    model(torch.randn(1 << 21, 1000, device="cuda")).sum().backward()

@T4
def test_that_tries_again():
    model, batch = Net().cuda(), 1 << 22
    while True:
        try:
            model(torch.randn(batch, 1000, device="cuda")).sum().backward()
        except torch.OutOfMemoryError:
            batch //= 2
        else:
            break

@T4
def test_that_fits(torchmem):
    torchmem.check(net(), {ENOUGH})
"""


def test_what_does_not_fit_fails_with_who_asked(project: Project) -> None:
    _, checks = run(project, NAMED, failed=4, passed=2)
    *_, body, _, fits = checks
    for record in checks[:3]:
        assert record["outcome"] == "over budget"
        assert record["headroom"] is None
        message = record["message"]
        assert "does not fit on t4 (14.74 GiB): aten::addmm requested 7.81 GiB" in message
        assert "in the forward, in module Net.inner, at test_it.py:" in message
        assert re.search(r"Alive at the peak: .* GiB, of which .* GiB has to go\n", message)
        assert "7.81 GiB  float32[2097152, 1000], input: input 0\n" in message
    assert "does not fit on t4" in body["message"]
    gpu = find_gpu("t4")
    room = gpu.memory - gpu.context
    assert fits["limits"] == {"reserved_peak": room}
    assert fits["headroom"] == room - fits["figures"]["reserved_peak"] > 0


def test_what_the_allocator_counts_has_limits(project: Project) -> None:
    three = 'def three():\n    return [torch.empty(1, device="cuda") for _ in range(3)]\n'
    body = checking("three", head=f"{three}@pytest.mark.memory_budget({{}}=1535)\n")
    run(project, body.format("peak=1535, device='cuda', retained"), passed=1)
    for name, needed in (("allocated", "1.50 KiB"), ("reserved", "2.00 MiB")):
        _, checks = run(project, body.format(name), failed=1)
        assert [check["device"] for check in checks] == ["cuda"]
        assert checks[0]["message"].startswith(f"{needed} {name} peak exceeds the budget of 1.50")


def test_a_snapshot_from_before_a_figure_was_judged_passes(project: Project) -> None:
    body = checking(f"net(), {ENOUGH}, device='cuda'")
    run(project, body, "--torchmem-update")
    (file,) = (project.path / "__torchmem__").glob("*.json")
    text = file.read_text()
    file.write_text("".join(one for one in text.splitlines(True) if "allocated_peak" not in one))
    _, checks = run(project, body, passed=1)
    verdicts = {one["figure"]: one["verdict"] for one in checks[0]["snapshot"]["changes"]}
    assert verdicts.pop("allocated_peak") == "new"
    assert set(verdicts.values()) == {"same", "shown"}
    run(project, body, "--torchmem-update")
    assert file.read_text() == text


def test_the_ini_file_names_a_gpu_and_the_default_has_no_end(project: Project) -> None:
    body = checking("net(), rows(1 << 24), device='cuda'")
    body += "    assert torchmem.trace(net(), rows(1 << 24), device='cuda').peak > 100 << 30\n"
    _, checks = run(project, body, "--torchmem-update", passed=1)
    assert checks[0]["headroom"] is None
    project.ini("torchmem_gpu = a100-80gb")
    _, checks = run(project, body, failed=1)
    assert "does not fit on a100-80gb" in checks[0]["message"]
    unlimited = body.replace("device='cuda')", "device='cuda', memory='unlimited')")
    run(project, unlimited, passed=1)


def test_options_of_the_allocator(project: Project) -> None:
    fragmented = """
def fragmented():
    for size in (30, 50):
        torch.empty(size << 20, dtype=torch.int8, device="cuda")
"""
    body = checking("fragmented, device='cuda'", head=fragmented)
    _, checks = run(project, body, "--torchmem-update")
    assert checks[0]["figures"]["reserved_peak"] == 80 << 20
    project.ini("torchmem_allocator = expandable_segments:True")
    _, checks = run(project, body)
    assert checks[0]["figures"]["reserved_peak"] == 60 << 20
    result = project.run("--torchmem-allocator=expandable:True")
    result.is_refused("*Unrecognized key 'expandable' in CUDA allocator config*")


def test_a_segment_more_is_no_growth(project: Project) -> None:
    step = "lambda: torch.empty(1 << 20, dtype=torch.int8, device='cuda')"
    body = checking(f"{step}, device='cuda', tolerance='2 MiB'")
    run(project, body, "--torchmem-update")
    _, checks = run(project, body.replace("1 << 20", "(1 << 20) + 1"), passed=1)
    changes = {change["figure"]: change for change in checks[0]["snapshot"]["changes"]}
    assert changes["reserved_peak"]["before"] == 2 << 20
    assert changes["reserved_peak"]["now"] == 20 << 20
    assert changes["reserved_peak"]["verdict"] == "within tolerance"
