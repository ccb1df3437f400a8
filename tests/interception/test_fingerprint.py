"""The fingerprint of what a step works on: the same for the same work, however it is come by."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import trace
from pytest_torchmem.profile.timeline import Kind


class Net(nn.Module):
    def __init__(self, width: int = 16, copies: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, width), nn.Linear(width, 2)])
        self.register_buffer("scale", torch.ones(8))
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x * self.scale)
        for _ in range(self.copies):
            hidden = hidden.exp()
        return self.layers[1](hidden)


def built(width: int = 16, batch: int = 4, copies: int = 1) -> Callable[[], None]:
    def program() -> None:
        Net(width, copies)(torch.randn(batch, 8)).sum().backward()

    return program


def fingerprint(program: Any, device: str = "cpu") -> str:
    return trace(program, device=device).workload


def test_the_same_work_has_the_same_fingerprint() -> None:
    model = Net()

    def several_steps() -> None:
        net = Net()
        for _ in range(3):
            net(torch.zeros(4, 8)).sum().backward()

    def on_cuda() -> None:
        Net().cuda()(torch.randn(4, 8).cuda()).sum().backward()

    def recomputed() -> None:
        x = torch.randn(4, 8, requires_grad=True)
        checkpoint(Net(), x, use_reentrant=False).sum().backward()

    same = fingerprint(built())
    assert same
    assert fingerprint(built(copies=5)) == same, "more memory for the same work"
    assert fingerprint(several_steps) == same
    assert fingerprint(on_cuda, "cuda") == same
    assert fingerprint(recomputed) == same
    assert fingerprint(lambda: model(torch.randn(4, 8)).sum().backward()) == same


@pytest.mark.parametrize("other", [built(width=17), built(batch=5)])
def test_other_work_has_another_fingerprint(other: Callable[[], None]) -> None:
    assert fingerprint(other) != fingerprint(built())


def test_programs_without_modules() -> None:
    weight = torch.randn(8, 8, requires_grad=True)

    def functional(x: Tensor) -> None:
        (x @ weight).sum().backward()

    def made(batch: int) -> Callable[[], None]:
        return lambda: torch.randn(batch, 8, requires_grad=True).exp().sum().backward()

    first = trace(functional, torch.randn(4, 8)).workload
    assert first == trace(functional, torch.zeros(4, 8)).workload
    assert first != trace(functional, torch.zeros(5, 8)).workload
    assert fingerprint(made(3)) == fingerprint(made(3)) != fingerprint(made(4))
    assert fingerprint(lambda: None) == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("where", ["target", "built", "brought"])
def test_parameters_and_buffers_belong_to_their_module(where: str, device: str) -> None:
    model = Net()

    def program() -> None:
        net = (model if where == "brought" else Net()).to(device)
        net(torch.randn(4, 8, device=device)).sum().backward()

    target = (model, torch.randn(4, 8)) if where == "target" else (program,)
    found = {
        (a.kind, a.label, a.origin.module) for a in trace(*target, device=device).live_at_peak()
    }
    assert (Kind.PARAMETER, "layers.0.weight", "Net.layers.0") in found
    assert (Kind.PARAMETER, "layers.1.bias", "Net.layers.1") in found
    assert (Kind.BUFFER, "scale", "Net") in found


def test_a_model_that_is_dropped_is_not_kept_alive() -> None:
    def program() -> None:
        Net(1000)(torch.randn(4, 8)).sum().backward()
        torch.randn(3)

    assert trace(program).end == 0


class WithoutOptions(torch.nn.Linear):
    """As the losses of torchrl do."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


def test_a_module_that_lists_its_parameters_by_itself() -> None:
    assert trace(lambda: WithoutOptions(2, 2)(torch.ones(1, 2)).sum().backward()).peak


class InGroups(nn.Linear):
    """A layer whose parameters are asked for by group."""

    def parameters(self, group: str) -> Any:  # type: ignore[override]
        return [one for name, one in self.named_parameters() if name.startswith(group)]


def test_a_module_that_gives_its_parameters_in_groups() -> None:
    assert trace(lambda: InGroups(2, 2)(torch.ones(1, 2)).sum().backward()).peak
