"""What compares the operators of a real run with those of its trace."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import operator_lists
from benchmarks.comparison import Status
from benchmarks.isolation.sample import Sample
from benchmarks.operator_lists import differences, recorded_in_trace, run_sample
from pytest_torchmem.interception.values.contents import Values, ValuesBudget
from tests.modules import Parts


def test_lists_that_differ() -> None:
    assert differences(["aten::mm", "aten::add_.Tensor"], ["aten::mm", "aten::add.Tensor"]) == ()
    assert differences(["a", "b", "c"], ["a", "c"]) == ("-b",)
    assert differences(["a", "c"], ["a", "b", "c"]) == ("+b",)
    assert differences(["a", "b"], ["b", "a"]) == ("+b", "-b")
    assert differences(["a", "a"], ["a"]) == ("-a",)
    assert differences([], ["a"]) == ("+a",)
    assert differences(["dropout", "sum"], ["native_dropout", "sum"]) == (
        "-dropout",
        "+native_dropout",
    )


class _Step(Parts):
    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


STEPS = {
    "linear": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), (4, 8), {}),
    "convolution": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 8, 8), {}),
    "lstm": (_Step(body=nn.LSTM(8, 4, 2)), (5, 2, 8), {"loss_fn": lambda output: output[0].sum()}),
    "used three times": (_Step(body=lambda x: (x * 2) * (x * 3) + x), (4, 4), {}),
    "composite bodies": (_Step(body=lambda x: torch.linalg.pinv(x) + x.t()), (4, 4), {}),
    "numbers": (_Step(body=lambda x: torch.where(x > 0, x, 0.5).clamp(0.1) ** 2), (4, 4), {}),
    "lazy": (nn.LazyLinear(3), (2, 4), {}),
    "forward": (nn.Linear(3, 3), (2, 3), {"backward": False}),
    "optimizer": (nn.Linear(3, 3), (2, 3), {"optimizer": torch.optim.AdamW}),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_cpu_runs_what_its_trace_runs(name: str) -> None:
    module, shape, options = STEPS[name]
    sample = Sample(0, module, (torch.randn(shape, requires_grad=True),), options=options)
    found = run_sample(name, sample, lambda: None, "cpu", None)
    assert (found.status, found.error) == (Status.EXACT, "")


def test_another_device_is_told_apart() -> None:
    """What fake cuda runs is not what the CPU does, and the comparison says so."""
    sample = Sample(0, nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), (torch.randn(4, 8),))
    traced = recorded_in_trace(sample, "cuda", "a100")
    found = differences(operator_lists.recorded_for_real(sample, "cpu"), traced)
    assert "+aten::native_dropout" in found
    assert "+aten::native_dropout_backward" in found
    assert "-aten::bernoulli_.float" in found


def test_a_step_that_fails_is_skipped_and_a_trace_that_fails_is_not(monkeypatch):
    monkeypatch.setattr(Values, "budget", lambda self: ValuesBudget(0, 0))
    monkeypatch.setattr(ValuesBudget, "CHEAP", 0)

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")

    def asks(x: torch.Tensor) -> torch.Tensor:
        return x * int(x.long().sum().item())

    for body, status in ((fails, Status.SKIPPED), (asks, Status.UNSUPPORTED)):
        sample = Sample(0, _Step(body=body), (torch.full((2000,), 2.0, requires_grad=True),))
        assert run_sample("", sample, lambda: None, "cpu", None).status is status


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert operator_lists.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out
