"""Quantized tensors are real, and programs with them run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization

from pytest_torchmem import trace
from pytest_torchmem.errors import UnknownValueError
from tests.modules import Parts
from tests.results import as_measured, result_of

pytestmark = pytest.mark.filterwarnings("ignore")


class Network(Parts):
    """What is quantized: a convolution and a product."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.relu(self.convolution(self.quant(x))).mean((2, 3))
        return self.dequant(self.linear(x))


def tensors(device: str) -> Any:
    x = torch.linspace(0, 1, 9, device=device).view(3, 3)
    whole = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    assert whole.device.type == x.device.type
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 0, 0])
    rows = torch.quantize_per_channel(x.cpu(), scales, zeros, 0, torch.qint8)
    made = (whole.t()[0], whole.cpu().clone(), rows)
    read = [one.dequantize().tolist() for one in made]
    return whole.int_repr().tolist(), torch.relu(whole).q_scale(), read


def dynamic(device: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LSTM(8, 4))
    found = quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM}, dtype=torch.qint8)
    return found(torch.ones(2, 3, 8))[0].tolist()


def trained(device: str) -> Any:
    torch.manual_seed(0)
    stubs = {"quant": quantization.QuantStub(), "dequant": quantization.DeQuantStub()}
    layers = {"convolution": nn.Conv2d(1, 4, 3), "relu": nn.ReLU(), "linear": nn.Linear(4, 2)}
    model = Network(**stubs, **layers).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 1, 8, 8, device=device)).square().mean().backward()
        optimizer.step()
    converted = quantization.convert(model.cpu().eval())
    return converted(torch.ones(2, 1, 8, 8)).tolist()


@pytest.mark.parametrize("program", [tensors, dynamic, trained])
def test_numbers_are_those_of_the_real_run(program: Callable[[str], Any], device: str) -> None:
    assert result_of(lambda: program(device), device=device, values="real") == program("cpu")


def test_what_is_made_is_counted() -> None:
    def program() -> torch.Tensor:
        x = torch.full((1000, 1000), 0.5, device="cuda")
        return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)

    profile = trace(program, device="cuda")
    assert [one.nbytes for one in profile.timeline.allocations] == [4_000_000, 1_000_000]
    assert profile.peak == 5_000_000


def test_values_that_are_not_known_are_told_of() -> None:
    def program() -> None:
        torch.quantize_per_tensor(torch.randn(1000, 1000), 0.1, 0, torch.quint8)

    with pytest.raises(UnknownValueError, match="quantized tensors of unknown values"):
        trace(program, values="none")


def test_what_views_share_is_counted_once() -> None:
    def program() -> tuple[int, ...]:
        x = torch.quantize_per_tensor(torch.ones(4, 8, 6, 6), 0.1, 0, torch.quint8)
        rows = x.contiguous(memory_format=torch.channels_last).reshape(4, -1)
        return tuple(rows.dequantize().shape)

    as_measured(program)
