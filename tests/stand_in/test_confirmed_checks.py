"""``--torchmem-measure=stand-in``: a run's checks beside torch's own CUDA code.

torchmem stand-in --gpu a100-80gb -- pytest tests/stand_in
"""

import os

import pytest

pytestmark = pytest.mark.skipif("STAND_IN_NAME" not in os.environ, reason="needs a CUDA build")

SUITE = """
import os
import pytest
import torch
from torch import nn

budget = pytest.mark.memory_budget("1 GiB", device="cuda")

@budget
def test_mlp(torchmem):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    torchmem.check(model, torch.randn(32, 64), optimizer=torch.optim.AdamW)

@pytest.mark.memory_budget("1 GiB", gpu="t4")
def test_body_on_another_gpu():
    nn.Linear(10, 10).cuda()(torch.randn(3, 10).cuda()).sum().backward()

class Chosen(nn.Module):
    def forward(self, x):
        return x[x > 0] * 2

@budget
def test_values(torchmem):
    torchmem.check(Chosen(), torch.randn(64, 64), backward=False)

class Decomposed(nn.Module):
    def forward(self, x):
        return torch.linalg.qr(x)[0]

@budget
def test_library(torchmem):
    torchmem.check(Decomposed(), torch.randn(64, 64), backward=False)

@budget
def test_crashes(torchmem):
    if "TORCHMEM_STAND_IN_GPU" in os.environ:
        os.abort()
    torchmem.check(nn.Linear(8, 8), torch.randn(4, 8))

@budget
def test_after_the_crash(torchmem):
    torchmem.check(nn.Linear(8, 8), torch.randn(4, 8))

@budget
def test_asserts():
    assert torch.ones(3, device="cuda").sum().item() == 3

def test_without_memory():
    assert "TORCHMEM_STAND_IN_GPU" not in os.environ
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_every_check_is_confirmed_or_it_is_told_why_not(pytester, workers):
    pytester.makepyfile(test_net=SUITE)
    result = pytester.runpytest_subprocess("--torchmem-measure=stand-in", *workers)
    result.assert_outcomes(passed=8)
    out = result.stdout
    out.fnmatch_lines(["*a100-80gb (stand-in), measured *as traced*confirmed"])
    out.fnmatch_lines(["*t4 (stand-in), measured *as traced*confirmed"])
    assert sum(line.endswith(" confirmed") for line in result.outlines) == 3
    out.fnmatch_lines(
        [
            "not confirmed: *test_values: first apart at a request of *test_net.py:*; the step "
            "reads values that no kernel has computed"
        ]
    )
    out.fnmatch_lines(["not confirmed: *test_library: *not installed knows cusolver*"])
    out.fnmatch_lines(["not measured: *test_crashes: the process with the stand-in *"])
    out.fnmatch_lines(["not measured: *test_asserts: *the step ended in AssertionError: *"])
