"""Clones of what a step is given, on the real CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem.measurement.clone import clone_arguments, clone_to
from pytest_torchmem.step.step import Step

CPU = torch.device("cpu")


class Holder:
    """Something with tensors that is neither a module nor a container."""

    def __init__(self) -> None:
        self.leaf = torch.ones(3, requires_grad=True)
        self.computed = self.leaf * 2


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


def test_tensors_are_found_in_any_object() -> None:
    holder = Holder()
    clone = clone_to(CPU, print, (holder,), {}, Step()).args[0]
    assert clone.leaf is not holder.leaf
    assert torch.equal(clone.computed, holder.computed)
    assert clone.computed.is_leaf
    assert clone.computed.requires_grad


def test_one_tensor_in_two_places_is_one_clone() -> None:
    x = torch.ones(3)
    clones = clone_to(CPU, print, (x, [x[:2]]), {"again": {"x": x}}, Step())
    assert clones.args[0] is clones.kwargs["again"]["x"] is not x
    storages = {t.untyped_storage().data_ptr() for t in (clones.args[0], clones.args[1][0])}
    assert len(storages) == 1


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning", "ignore:TypedStorage:UserWarning")
def test_tensors_of_other_classes() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    given = (Scaled(torch.ones(2)), quantized, torch.ones(2, dtype=torch.complex64).conj().imag)
    scaled, *others = clone_to(CPU, print, given, {}, Step()).args
    assert isinstance(scaled, Scaled)
    assert scaled.requires_grad
    for clone, tensor in zip((scaled, *others), given, strict=True):
        assert clone is not tensor
        assert torch.equal(clone, tensor)


def test_lazy_modules_stay_lazy() -> None:
    clone = clone_to(CPU, nn.LazyLinear(4), (), {}, Step()).target
    assert isinstance(clone, nn.LazyLinear)
    assert clone(torch.ones(2, 3)).shape == (2, 4)


def test_arguments_without_tensors_stay_themselves() -> None:
    plain, module = object(), nn.Linear(2, 2)
    (first, second), _ = clone_arguments((plain, {"model": [module]}), {})
    assert first is plain
    assert second["model"][0] is not module


def test_deep_copies_are_torchs_own_again() -> None:
    original = Tensor.__deepcopy__
    clone_to(CPU, nn.Linear(2, 2), (torch.ones(2),), {}, Step())
    assert Tensor.__deepcopy__ is original
