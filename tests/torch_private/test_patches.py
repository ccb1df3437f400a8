"""Functions and methods of torch are replaced together, and put back exactly as they were."""

import pytest

from pytest_torchmem.errors import UnsupportedTorchError
from pytest_torchmem.torch_private.patches import replaced_all


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
