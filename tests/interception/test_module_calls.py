"""Functions in the place of torch's are made once, for the trace that runs; calls of modules."""

import gc
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.torch_private.module_calls import ModuleMethods
from tests.modules import Parts
from tests.results import as_measured, result_of


class Net(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def two_layers() -> nn.Module:
    return Net(first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def test_who_saved_the_function_is_followed_too() -> None:
    saved: Callable[..., Any] = nn.Module.__call__
    net = two_layers()
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
    trace(two_layers(), torch.ones(2, 4))
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
        with ModuleMethods({"__call__": instead}):
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
    with ModuleMethods({"__delattr__": instead}):
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

    as_measured(step)


def test_a_module_that_prints_its_weights_to_describe_itself_takes_nothing_for_it() -> None:
    def step() -> None:
        bag = nn.EmbeddingBag(50, 16, mode="sum")
        bag(torch.zeros(8, 3, dtype=torch.long)).sum().backward()

    made = as_measured(step).timeline.allocations
    assert "aten::abs" not in {one.origin.operator for one in made}


def ask(found: list[int], device: str) -> None:
    tensor = torch.empty(3, device=device)
    found.append(tensor.untyped_storage().nbytes() + torch.tensor([tensor.shape[0]]).item())


def test_another_function_that_was_put_there_between_traces_is_called(device, monkeypatch):
    own, called = torch.tensor, []

    def another(*args: object, **kwargs: object) -> torch.Tensor:
        called.append(args)
        return own(*args, **kwargs)

    found: list[int] = []
    trace(lambda: ask(found, device), device=device)
    monkeypatch.setattr(torch, "tensor", another)
    trace(lambda: ask(found, device), device=device)
    assert torch.tensor is another
    assert len(called) == 1
    monkeypatch.undo()
    trace(lambda: ask(found, device), device=device)
    assert len(called) == 1
    assert found == [15, 15, 15]


def test_a_function_that_a_program_keeps_belongs_to_no_trace_afterwards(device: str) -> None:
    make, item = result_of(lambda: (torch.empty, torch.Tensor.item), device=device)
    assert item(make(2).fill_(3.0).sum()) == 6.0


def test_traces_between_those_with_threads_have_the_same_figures(device: str) -> None:
    def beside() -> None:
        torch.empty(5, device=device).sum().item()

    def program(threads: int) -> None:
        started = [threading.Thread(target=beside) for _ in range(threads)]
        for one in started:
            one.start()
        for one in started:
            one.join()
        beside()

    peaks = [trace(program, threads, device=device).peak for threads in (0, 2, 0, 1, 0)]
    assert peaks[0] == peaks[2] == peaks[4]


def test_a_trace_that_is_over_is_freed(device: str) -> None:
    model, input = nn.Linear(4, 4), torch.randn(2, 4)
    for _ in range(3):
        trace(model, input, device=device)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(20):
        trace(model, input, device=device)
    gc.collect()
    assert len(gc.get_objects()) - before < 20


def test_a_module_that_was_imported_anew_makes_its_own() -> None:
    """Runs of pytest within a process, as plugins' tests have them, import modules again."""
    name = "pytest_torchmem.fake_cuda.api.session"
    available: list[bool] = []

    def ask_for_cuda() -> None:
        available.append(torch.cuda.is_available())

    trace(ask_for_cuda, device="cuda")
    before = {one: module for one, module in sys.modules.items() if one.startswith("pytest_torch")}
    kept = ("pytest_torchmem.torch_private", "pytest_torchmem.interception.context")
    try:
        for one in before:
            if not one.startswith(kept):
                del sys.modules[one]
        importlib.import_module("pytest_torchmem").trace(ask_for_cuda, device="cuda")
        assert sys.modules[name] is not before[name]
    finally:
        sys.modules.update(before)
    trace(ask_for_cuda, device="cuda")
    assert available == [True, True, True]
