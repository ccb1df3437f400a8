"""Copies on which the tensors of a step lie, on the real CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem.measurement.copies import on_copies
from pytest_torchmem.step.step import Step

CPU = torch.device("cpu")


class Holder:
    """Something with tensors that is neither a module nor a container."""

    def __init__(self) -> None:
        self.leaf = torch.ones(3, requires_grad=True)
        self.computed = self.leaf * 2


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


def addresses(*tensors: Tensor) -> list[int]:
    return [one.untyped_storage().data_ptr() for one in tensors]


def test_tensors_are_found_in_any_object() -> None:
    holder = Holder()
    before = addresses(holder.leaf, holder.computed)
    with on_copies(CPU, print, (holder,), {}, Step()):
        assert not {*addresses(holder.leaf, holder.computed)} & {*before}
        assert torch.equal(holder.computed, torch.full((3,), 2.0))
        assert holder.computed.is_leaf
        assert holder.computed.requires_grad
        with torch.no_grad():
            holder.leaf.zero_()
    assert addresses(holder.leaf, holder.computed) == before
    holder.computed.sum().backward()
    assert torch.equal(holder.leaf.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert holder.leaf._version == 0


def test_what_shares_a_storage_shares_its_copy() -> None:
    x = torch.ones(3)
    part = x[:2]
    with on_copies(CPU, print, (x, [part]), {"again": {"x": x}}, Step()):
        assert len({*addresses(x, part)}) == 1
        x.zero_()
        assert part.sum() == 0
    assert part.sum() == 2


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:TypedStorage:UserWarning")
def test_tensors_of_other_classes() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    given = (Scaled(torch.ones(2)), quantized, torch.ones(2, dtype=torch.complex64).conj().imag)
    values = [one.detach().clone() for one in given]
    with on_copies(CPU, print, given, {}, Step()):
        assert isinstance(given[0], Scaled)
        assert given[0].requires_grad
        assert all(map(torch.equal, given, values))
        with torch.no_grad():
            given[0].zero_()
            given[2].zero_()
    assert all(map(torch.equal, given, values))


def test_lazy_modules_are_lazy_again() -> None:
    lazy = nn.LazyLinear(4)
    with on_copies(CPU, lazy, (torch.ones(2, 3),), {}, Step()) as run:
        run()
        assert type(lazy) is nn.Linear
    assert type(lazy) is nn.LazyLinear
    assert lazy(torch.ones(2, 5)).shape == (2, 4)


@pytest.mark.parametrize("refers", [torch._C._WeakTensorRef, lambda one: one])
def test_what_cpp_refers_to_weakly(refers: Callable[[Tensor], object]) -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    held, gradient, value = refers(layer.weight), layer.weight.grad, layer.weight.clone()
    with on_copies(CPU, layer, (torch.ones(1, 2),), {}, Step(optimizer=torch.optim.SGD)) as run:
        run()
        assert not torch.equal(layer.weight, value)
    assert torch.equal(layer.weight, value)
    assert layer.weight.grad is gradient
    del held
