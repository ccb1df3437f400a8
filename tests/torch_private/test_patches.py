"""Functions of torch are replaced together, also where other modules hold them, and put back."""

import pytest

from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private.patches import replaced_all
from tests.processes import run_program


class Base:
    def name(self) -> str:
        return "base"


class Derived(Base):
    pass


class Owner:
    def __init__(self, label: str) -> None:
        self.label = label

    def name(self, value: Base, suffix: str = "") -> str:
        return f"{self.label} of {type(value).__name__}{suffix}"


def test_a_bound_method_becomes_a_method_of_the_class() -> None:
    with replaced_all([(Base, {"name": Owner("name").name})]):
        assert Base().name() == "name of Base"
        assert Derived().name(suffix="!") == "name of Derived!"
    assert Base().name() == "base"


def test_an_attribute_of_instances_becomes_a_property_for_a_while() -> None:
    owner = Owner("own")
    with replaced_all([(Owner, {"label": property(lambda owner: "another")})]):
        assert owner.name(Base()) == "another of Base"
    assert owner.name(Base()) == "own of Base"
    fails = replaced_all([(Owner, {"gone": property(lambda owner: "another")})])
    with pytest.raises(UnsupportedTorchError, match=r"Owner\.gone"), fails:
        pass


def test_what_was_inherited_is_inherited_again() -> None:
    with replaced_all([(Derived, {"name": lambda self: "derived"})]):
        assert Derived().name() == "derived"
        assert Base().name() == "base"
    assert "name" not in vars(Derived)


def test_nothing_stays_replaced_where_replacing_fails() -> None:
    own = Base.name
    fails = replaced_all([(Base, {"name": Owner.name}), (int, {"real": None})])
    with pytest.raises(TypeError), fails:
        pass
    assert Base.name is own


PROGRAM = """
import sys
from torch import Generator, as_tensor, tensor
import torch
import torch.cuda as gpu
from torch.cuda import Event, Stream, device_count, is_available, max_memory_allocated as most
from pytest_torchmem import trace

originals = tensor, is_available, Stream

def body():
    import held_later
    assert is_available() and device_count() == 1 and gpu.is_available()
    x = tensor(1.0, device="cuda") + as_tensor([2.0], device="cuda")
    assert str(x.device) == "cuda:0" and most() == 3 * 512
    assert held_later.made().device == x.device
    torch.rand(2, generator=Generator("cuda").manual_seed(0), device="cuda")
    Stream(), Event()

for _ in range(2):
    trace(body, device="cuda")
    assert (tensor, is_available, Stream) == originals
    assert not is_available()
    assert sys.modules["held_later"].tensor is torch.tensor
"""


def test_they_are_replaced_there_too_and_put_back(tmp_path, monkeypatch):
    (tmp_path / "held_later.py").write_text(
        "from torch import tensor\n\ndef made():\n    return tensor([1], device='cuda')\n"
    )
    monkeypatch.chdir(tmp_path)
    run_program(PROGRAM)
