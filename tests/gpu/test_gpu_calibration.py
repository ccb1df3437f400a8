"""What a real GPU's libraries take is measured, and a trace that is told agrees with the GPU."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pytest_torchmem as torchmem
from pytest_torchmem.measurement.device import cuda_device
from pytest_torchmem.targets.gpus import gpu_names, registered_gpus

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "STAND_IN_NAME" in os.environ,
    reason="needs a CUDA device, and libraries that run on it",
)

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


@pytest.mark.parametrize("name", MODELS)
def test_a_calibrated_trace_is_what_the_gpu_counts(name: str) -> None:
    model, x = MODELS[name]()
    calibration = torchmem.calibrate(model, x)
    gpu = cuda_device().gpu()
    with registered_gpus(*([] if gpu.name in gpu_names() else [gpu])):
        traced = torchmem.trace(model, x, device="cuda", gpu=gpu.name, calibration=calibration)
    real = torchmem.measure(model, x, device="cuda")
    assert traced.questions
    assert not traced.unknown_workspaces
    for figure in ("forward_peak", "backward_peak", "retained"):
        expected = getattr(real, figure)
        assert abs(getattr(traced, figure) - expected) <= CLOSE * expected, figure
