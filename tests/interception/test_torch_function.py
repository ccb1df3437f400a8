"""Subclasses of tensors with a ``__torch_function__``: asked for what they are asked for really."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

import pytest_torchmem as torchmem
from tests.results import in_a_trace, result_of


class Noted(torch.Tensor):
    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


KEPT = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.requires_grad_}


class Unwrapped(Noted):
    """Is a subclass no longer but after the functions that it knows."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        plain = func not in KEPT and isinstance(result, cls)
        return result.as_subclass(torch.Tensor) if plain else result


def of_a_tensor(device: str) -> list[str]:
    Noted.asked.clear()
    leaf = torch.randn(3, 4).as_subclass(Noted).requires_grad_()
    x = leaf.to(device, torch.float64) * 2
    plain = torch.zeros(4, dtype=torch.float64, device=device)
    plain.copy_(x.sum(0))
    (x.relu() @ x.t() + plain.type_as(x)[:3]).sum().backward()
    assert x.device.type == device
    assert leaf.grad is not None
    assert x.detach().cpu().numpy().shape == (3, 4)
    x.detach().sum(0).tolist(), x.sum().item()
    return list(Noted.asked)


@in_a_trace("cuda")
def test_a_subclass_finds_what_it_knows() -> None:
    x = torch.randn(3).as_subclass(Unwrapped)
    assert type(x.to("cuda")) is Unwrapped
    assert type(x.to("cuda").cpu()) is Unwrapped
    assert type(x.cuda()) is torch.Tensor
    assert type(x + 1) is torch.Tensor
    assert torch.Tensor.to in KEPT
    assert torch.Tensor.cuda not in KEPT


def in_a_backward(device: str) -> list[str]:
    weight = torch.randn(4, 4).as_subclass(Unwrapped).to(device).requires_grad_()
    x = torch.randn(4, 4, device=device, requires_grad=True)
    loss = (x @ weight).relu().sum() + (weight * x.detach()).sum() + (weight * x).sum()
    Unwrapped.asked.clear()
    loss.backward()
    return list(Unwrapped.asked)


class Asked(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def of_a_mode(device: str) -> list[str]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to(device)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.randn(3, 4, device=device)
    with Asked() as mode:
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.zero_grad()
        x.to(x.device, torch.float64).cpu()
        with torch.device(device):
            torch.ones(3) + torch.arange(3)
    return mode.names


@pytest.mark.parametrize("asked", [of_a_tensor, in_a_backward, of_a_mode])
def test_the_same_functions_are_asked_for(asked: Callable[[str], list[str]], device: str) -> None:
    assert result_of(lambda: asked(device), device=device) == asked("cpu")


class Wrapped:
    """No tensor, and not one of torch's classes: what is done for it stands in a table."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.table: dict[Any, Any] = {
            torch.empty_like: lambda x: x.tensor.device,
            torch.full_like: lambda x, value: (x.tensor.device, value),
        }

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        table = args[0].table
        return table[func](*args, **(kwargs or {})) if func in table else NotImplemented


BEFORE = {torch.zeros_like}


@in_a_trace("cuda")
def test_tables_that_a_trace_makes_find_torch_functions() -> None:
    x = Wrapped(torch.ones(3, device="cuda"))
    assert torch.empty_like(x).type == "cuda"
    assert torch.full_like(x, 2) == (x.tensor.device, 2)
    for made_before in (BEFORE, {torch.zeros_like}):
        x.table = dict.fromkeys(made_before, lambda x: "found")
        assert torch.zeros_like(x) == "found"


def test_a_mode_is_asked_for_what_stands_in_torch(device: str) -> None:
    class Named(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
            seen.append(next((name for name in names if getattr(torch, name) is func), func))
            return func(*args, **(kwargs or {}))

    def body(device: str) -> None:
        seen.clear()
        with Named(), Named():
            torch.tensor([1.0], device=device)
            torch.zeros_like(torch.zeros(3, device=device))
            torch.arange(3), torch.as_tensor([1])

    names = ["tensor", "zeros", "zeros_like", "arange", "as_tensor"]
    seen: list[Any] = []
    body("cpu")
    really = list(seen)
    torchmem.trace(body, device, device=device)
    assert seen == really == [name for name in names for _ in range(2)]


@in_a_trace("cuda")
def test_functions_in_the_place_of_torchs_are_copied_and_pickled_as_these() -> None:
    assert copy.deepcopy([torch.zeros])[0] is torch.zeros
    assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros


class Sub(torch.Tensor):
    """A tensor of a program's own class."""


@in_a_trace("cuda")
def test_a_tensor_of_a_subclass_that_moves_is_a_plain_one() -> None:
    """``torch.as_tensor`` moves it in C++, which asks no subclass."""
    on_host = torch.ones(3).as_subclass(Sub)
    on_gpu = torch.ones(3, device="cuda").as_subclass(Sub)
    for function in (torch.as_tensor, torch.asarray):
        assert type(function(on_host, device="cuda")) is torch.Tensor
        assert type(function(on_gpu, dtype=torch.float64, device="cuda")) is torch.Tensor
        assert function(on_gpu, device="cuda") is on_gpu
    torch.asarray(on_gpu, copy=True, device="cuda").add_(1)
    assert on_gpu.tolist() == [1, 1, 1]
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    assert not torch.asarray(leaf, requires_grad=False, device="cuda").requires_grad
