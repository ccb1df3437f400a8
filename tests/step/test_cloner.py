"""What a step's clone is of: copied as ``copy.deepcopy`` copies, with other tensors."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pytest_torchmem.step.clone import Cloner

Pair = namedtuple("Pair", ["first", "second"])


class PlainCloner(Cloner):
    """Clones tensors as torch does."""

    def clone_strided(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def clone_compressed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def clone_special(self, tensor: Tensor) -> Tensor:
        return self.copy_as_torch_does(tensor)


class Color(Enum):
    RED = 1


@dataclass
class Options:
    """Nothing but attributes."""

    sizes: list[int] = field(default_factory=lambda: [1, 2])
    scale: Any = None


class Slotted:
    """Attributes that are not in a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class WithRule:
    """Says itself what a copy of it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> WithRule:
        made = WithRule(copy.deepcopy(self.value, memo))
        made.copied = True  # type: ignore[attr-defined]
        return made


class WithState:
    """Leaves out what is not to be copied, as ``nn.Module`` does."""

    def __init__(self, value: Any) -> None:
        self.value, self.cache = value, object()

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value, "made": [1, [2]]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, cache=None)


class WithArguments:
    """Is made with arguments."""

    def __new__(cls, value: Any) -> WithArguments:
        made = super().__new__(cls)
        made.value = value  # type: ignore[attr-defined]
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.value,)  # type: ignore[attr-defined]


class Named(dict):  # type: ignore[type-arg]
    """A dictionary with attributes."""


def makers() -> list[Any]:
    """Return what makes an object around another."""
    return [
        lambda one: [one, one],
        lambda one: (one, 1),
        lambda one: {"key": one, 2: [one]},
        lambda one: OrderedDict(a=one),
        lambda one: defaultdict(list, a=[one]),
        lambda one: deque([one]),
        lambda one: Pair(one, [one]),
        lambda one: Options(scale=one),
        Slotted,
        WithRule,
        WithState,
        WithArguments,
        lambda one: Named(a=one),
        lambda one: Counter("ab") if one is None else [one],
        lambda one: frozenset({1, "a"}) if one is None else (one,),
        lambda one: {1, "a"} if one is None else {"a": one},
        lambda one: module_of(one),
    ]


def module_of(value: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    module.value = value
    module.register_buffer("known", torch.arange(3))
    module[0].register_forward_hook(WithRule(value))
    return module


values = st.recursive(
    st.sampled_from([None, 1, 2.5, "text", b"bytes", Color.RED, len, int, torch.float16, 1j])
    | st.builds(lambda: torch.ones(2))
    | st.builds(Options)
    | st.builds(dict)
    | st.builds(object),
    lambda inner: st.builds(lambda make, one: make(one), st.sampled_from(makers()), inner),
    max_leaves=4,
)


def shape_of(value: Any, seen: dict[int, int]) -> Any:
    """Return what a copy has in common with what it is a copy of, the identities within included.

    Classes and what does not change are the same; all else is numbered as it is found.
    """
    if isinstance(value, (type, str, bytes, int, float, complex, Enum, torch.dtype)):
        return value
    if value is None or value is len:
        return value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        return (type(value), value.tolist(), value.requires_grad, shape_of(vars(value), seen))
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [(shape_of(key, seen), shape_of(one, seen)) for key, one in value.items()]
    elif isinstance(value, (set, frozenset)):
        parts += sorted(map(repr, value))
    elif isinstance(value, (list, tuple, deque)):
        parts += [shape_of(one, seen) for one in value]
    attributes = {**getattr(value, "__dict__", {})}
    if hasattr(value, "__slots__") and isinstance(value, Slotted):
        attributes["value"] = value.value
    parts += [(name, shape_of(one, seen)) for name, one in attributes.items()]
    return (type(value), parts)


def ids_in(value: Any) -> Iterator[int]:
    seen: dict[int, int] = {}
    shape_of(value, seen)
    return iter(seen)


@settings(max_examples=150, deadline=None)
@given(values)
def test_a_copy_is_what_python_makes(value: Any) -> None:
    expected = copy.deepcopy(value)
    made = PlainCloner(None).clone(value)
    assert shape_of(made, {}) == shape_of(expected, {})
    # What is shared with the original is what ``copy.deepcopy`` shares: tuples of what is the same.
    kept = {*ids_in(value)}
    assert len(kept & {*ids_in(made)}) == len(kept & {*ids_in(expected)})


def test_cycles_and_shared_parts_stay_so() -> None:
    value: dict[str, Any] = {"list": [], "options": Options()}
    value["list"].append(value)
    value["options"].scale = value["again"] = (value["list"], value["options"])
    made = PlainCloner(None).clone(value)
    assert made["list"][0] is made
    assert made["again"][0] is made["list"]
    assert made["again"][1] is made["options"]
    assert made["options"].scale is made["again"]
    assert made["list"] is not value["list"]


def test_a_tensor_that_two_hold_is_cloned_once() -> None:
    tensor, other = torch.ones(2), WithRule(None)
    tensor.note = [other]  # type: ignore[attr-defined]
    other.value = tensor
    made = PlainCloner(None).clone([tensor, other, {"a": tensor}])
    assert made[0] is made[1].value is made[2]["a"] is not tensor
    assert made[0].note[0] is made[1]


class Uncopied(Tensor):
    """Has no copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("none")


def test_what_cannot_be_copied_is_shared_but_for_tensors() -> None:
    lock = threading.Lock()
    value = {"a": Options(scale=lock), "b": deque([(lock, [1])])}
    made = PlainCloner(None).clone(value)
    assert made["a"] is not value["a"]
    assert made["a"].scale is lock is made["b"][0][0]
    assert made["b"][0][1] is not value["b"][0][1]
    with pytest.raises(RuntimeError, match="none"):
        PlainCloner(None).copy_as_torch_does(torch.ones(2).as_subclass(Uncopied))
    for kind in {Tensor, nn.Parameter}:
        assert kind.__dict__["__deepcopy__"].__module__.startswith("torch")


def test_a_module_is_whole_when_its_state_is_set() -> None:
    seen: list[list[str]] = []

    class Listening(nn.Module):
        def __setstate__(self, state: dict[str, Any]) -> None:
            seen.append(sorted(state["_parameters"]))
            super().__setstate__(state)

    module = Listening()
    module.weight = nn.Parameter(torch.ones(2))
    PlainCloner(None).clone(nn.Sequential(module))
    assert seen == [["weight"]]
