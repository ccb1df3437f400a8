"""Calls of modules are followed, and ``nn.Module.__call__`` is itself all the while."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import measure, trace
from pytest_torchmem.torch_private.module_calls import module_calls


class Net(nn.Module):
    """Two layers, of which the second is called from a method that is not ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_who_saved_the_function_is_followed_too() -> None:
    saved: Callable[..., Any] = nn.Module.__call__
    net = Net()
    profile = trace(lambda: saved(net, torch.ones(2, 4)))
    modules = {allocation.origin.module for allocation in profile.timeline.allocations}
    assert {"Net.first", "Net.second"} <= modules


@pytest.mark.parametrize("captures", [False, True])
def test_a_function_that_others_put_there_stays(captures, monkeypatch):
    original: Any = nn.Module.__call__
    calls: list[nn.Module] = []
    names = {"original": original, "calls": calls}
    text = "def call(self, *args, **kwargs):\n calls.append(self)\n return original(self, *args)"
    exec(text, names)

    def capturing(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return original(self, *args, **kwargs)

    call: Any = capturing if captures else names["call"]
    monkeypatch.setattr(nn.Module, "__call__", call)
    trace(Net(), torch.ones(2, 4))
    assert len(calls) == 3
    assert nn.Module.__call__ is call


def test_an_error_gives_the_code_back_and_other_threads_call_the_original() -> None:
    function: Any = nn.Module.__call__
    code, seen = function.__code__, []

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(threading.get_ident())
            return original(self, *args, **kwargs)

        return call

    def broken() -> None:
        with module_calls(instead):
            assert nn.Identity()(1) == 1
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert seen == [threading.get_ident()]
    assert function.__code__ is code
    assert nn.Identity()(2) == 2
    assert len(seen) == 1


def test_a_method_that_calls_its_superclass_is_replaced_without_a_walk_through_subclasses() -> None:
    function: Any = nn.Module.__delattr__
    code, deleted = function.__code__, []

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def delete(self: nn.Module, name: str) -> None:
            deleted.append(name)
            original(self, name)

        return delete

    model = nn.Linear(2, 2)
    model.note = 1
    with module_calls(instead, "__delattr__"):
        assert nn.Module.__delattr__ is function  # to set it, Python would visit all subclasses
        del model.note, model.bias
    assert deleted == ["note", "bias"]
    assert not hasattr(model, "note")
    assert not hasattr(model, "bias")
    assert function.__code__ is code


def test_a_module_is_called_with_images_inside_of_vmap() -> None:
    def step() -> None:
        layer, images = nn.Conv2d(3, 4, 3), torch.randn(2, 5, 3, 8, 8)
        weights = dict(layer.named_parameters())

        def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layer, weights, (x,)).square().mean()

        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, images)
        torch.func.vmap(layer)(images)

    assert trace(step, host="here").figures() == measure(step).figures()


def test_a_module_that_prints_its_weights_to_describe_itself_takes_nothing_for_it() -> None:
    def step() -> None:
        bag = nn.EmbeddingBag(50, 16, mode="sum")
        bag(torch.zeros(8, 3, dtype=torch.long)).sum().backward()

    profile = trace(step, host="here")
    assert "aten::abs" not in {made.origin.operator for made in profile.timeline.allocations}
    assert profile.figures() == measure(step).figures()
