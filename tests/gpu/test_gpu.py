"""A trace runs the operators that a real GPU runs, counts what it counts, and leaves it alone.

python -m pytest tests/gpu                             all operators and modules, 3 samples of each
TORCHMEM_SHARD=2/8 python -m pytest tests/gpu          an eighth of them
TORCHMEM_SAMPLES=0 python -m pytest tests/gpu -k conv  all samples of some

``python -m benchmarks.operator_lists`` gives the operators as one report.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.comparison import Status
from benchmarks.conformance.samples import samples, shard, units
from benchmarks.operator_lists import gpu_here, run_sample
from pytest_torchmem import calibrate, measure, trace
from pytest_torchmem.measurement.device import cuda_device
from pytest_torchmem.targets.gpus import gpu_names, registered_gpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
computes = pytest.mark.skipif("STAND_IN_NAME" in os.environ, reason="needs kernels that compute")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Ask for torch's samples, which takes seconds, only where they can run."""
    if "unit" not in metafunc.fixturenames:
        return
    found: list[Any] = []
    if torch.cuda.is_available():
        part, parts = (int(number) for number in os.environ.get("TORCHMEM_SHARD", "1/1").split("/"))
        found = shard(units(layouts=("contiguous",)), part - 1, parts)
    metafunc.parametrize("unit", found, ids=lambda unit: unit.case)


def test_the_same_operators(unit: Any) -> None:
    gpu = gpu_here()
    bad = []
    ran = 0
    for sample in samples(unit, int(os.environ.get("TORCHMEM_SAMPLES", "3"))):
        found = run_sample(f"{unit.case}/{sample.index}", sample, lambda: None, "cuda", gpu)
        ran += found.status is not Status.SKIPPED
        if found.status not in (Status.EXACT, Status.SKIPPED):
            bad.append(f"{found.case} {sample.detail[:200]}\n  {found.status.value}: {found.error}")
    assert not bad, "\n".join(["real only (-), traced only (+)", *bad])
    if not ran:
        pytest.skip("no sample of it runs on this GPU")


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
assert trace(torch.compile(torch.nn.Linear(2, 2)), torch.ones(1, 2), device="cuda").peak > 0
assert not torch.cuda.is_initialized()
assert not torch._C._cuda_hasPrimaryContext(0)
torch.ones(3, device="cuda").sum().item()
"""


def test_no_context_is_made() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


@computes
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


CLOSE = 0.02


class Spectrum(nn.Module):
    """A transform along a size that cuFFT has no plan without workspace for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


def _images() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU())
    return nn.Sequential(model, nn.Conv2d(64, 64, 3)), torch.randn(16, 3, 128, 128)


def _channels_last() -> tuple[nn.Module, Tensor]:
    model, x = _images()
    layout = torch.channels_last
    return model.to(memory_format=layout), x.to(memory_format=layout)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "images": _images,
    "channels last": _channels_last,
    "recurrent": lambda: (nn.LSTM(64, 256, 2), torch.randn(50, 16, 64)),
    "gated": lambda: (nn.GRU(64, 256, bidirectional=True), torch.randn(50, 16, 64)),
    "spectrum": lambda: (Spectrum(), torch.randn(64, 10_007, requires_grad=True)),
}


@computes
@pytest.mark.parametrize("name", MODELS)
def test_a_calibrated_trace_is_what_the_gpu_counts(name: str) -> None:
    model, x = MODELS[name]()
    calibration = calibrate(model, x)
    gpu = cuda_device().gpu()
    with registered_gpus(*([] if gpu.name in gpu_names() else [gpu])):
        traced = trace(model, x, device="cuda", gpu=gpu.name, calibration=calibration)
    real = measure(model, x, device="cuda")
    assert traced.questions
    assert not traced.unknown_workspaces
    for figure in ("forward_peak", "backward_peak", "retained"):
        expected = getattr(real, figure)
        assert abs(getattr(traced, figure) - expected) <= CLOSE * expected, figure
