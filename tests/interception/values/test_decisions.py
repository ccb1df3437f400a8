"""A program never decides by an unknown value without being told: it decides as for real, is warned
of, or ends in one sentence.

Programs are drawn: operators on random numbers, operators that make a mask of them, operators on
masks, and a decision in Python.
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pytest_torchmem import trace
from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.values.contents import Values, ValuesBudget
from tests.results import result_of


def every_third(mask: Tensor) -> Tensor:
    return torch.tensor([index % 3 == 0 for index in range(len(mask))], device=mask.device)


def with_first(mask: Tensor, value: bool) -> Tensor:
    changed = mask.clone()
    changed[0] = value
    return changed


NUMBERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "minus one": lambda x: x - 1,
    "times zero": lambda x: x * 0,
    "relu": torch.relu,
    "sort": lambda x: x.sort()[0],
    "cumsum": lambda x: x.cumsum(0),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "sum": lambda x: x.sum().reshape(1),
    "max": lambda x: x.max().reshape(1),
    "min": lambda x: x.min().reshape(1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "where of numbers": lambda x: torch.where(x > 0, 1.0, -1.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "cat": lambda x: torch.cat([x, torch.zeros(2, device=x.device)]),
    "softmax": lambda x: x.softmax(0),
    "in place": lambda x: x.clone().mul_(2).sub_(3),
    "copy": lambda x: torch.zeros_like(x).copy_(x),
    "of a position": lambda x: x.argmax(0, keepdim=True).float(),
    "of a mask": lambda x: (x > 0).float(),
    "gather": lambda x: x.gather(0, x.argsort()),
    "half": lambda x: x[: max(1, len(x) // 2)],
    "of a number": lambda x: torch.full((2,), x.sum().item(), device=x.device),
    "maximum": lambda x: torch.maximum(x, -x),
}
MASKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gt": lambda x: x > 0,
    "lt": lambda x: x < 0,
    "eq": lambda x: x == 0,
    "ne": lambda x: x != 0,
    "itself": lambda x: x == x,
    "isfinite": torch.isfinite,
    "isnan": torch.isnan,
    "bool": lambda x: x.bool(),
    "mean": lambda x: x > x.mean(),
    "isclose": lambda x: torch.isclose(x, torch.zeros_like(x)),
    "signbit": torch.signbit,
    "isin": lambda x: torch.isin(x, torch.zeros(2, device=x.device)),
    "logical_not": torch.logical_not,
    "is the largest": lambda x: x == x.max(),
    "is at the largest": lambda x: torch.arange(len(x), device=x.device) == x.argmax(),
    "order": lambda x: x.argsort() > 0,
    "out": lambda x: torch.gt(x, 0, out=torch.empty(0, dtype=torch.bool, device=x.device)),
}
OF_MASKS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "not": torch.bitwise_not,
    "and": lambda m: m & every_third(m),
    "or": lambda m: m | every_third(m),
    "and False": lambda m: m & False,
    "or True": lambda m: m | True,
    "xor": lambda m: m ^ every_third(m),
    "any": lambda m: m.any().reshape(1),
    "all": lambda m: m.all().reshape(1),
    "cat": lambda m: torch.cat([m, every_third(m)[:3]]),
    "where": lambda m: torch.where(m, False, True),
    "sum": lambda m: (m.sum() > 1).reshape(1),
    "cumsum": lambda m: m.cumsum(0) > 1,
    "prod": lambda m: (m.prod() > 0).reshape(1),
    "min": lambda m: m.min().reshape(1),
    "set an element": lambda m: with_first(m, False),
    "argmax": lambda m: (m.int().argmax() > 0).reshape(1),
    "gather": lambda m: m.gather(0, torch.zeros(2, dtype=torch.long, device=m.device)),
    "times": lambda m: m * every_third(m),
    "plus one": lambda m: (m.long() + 1) > 1,
    "masked_fill": lambda m: m.masked_fill(every_third(m), True),
    "in place": lambda m: m.clone().__iand__(every_third(m)),
    "equal": lambda m: torch.tensor([torch.equal(m, m.clone())], device=m.device),
    "of elements": lambda m: torch.Tensor([m[0], m[-1]]).to(m.device) > 0,
}


def halvings(x: Tensor) -> int:
    count, value = 0, x.sum().abs()
    while value > 0.1 and count < 50:
        value, count = value * 0.5, count + 1
    return count


def asserted(mask: Tensor) -> bool:
    try:
        assert mask.all()
    except AssertionError:
        return False
    return True


DECISIONS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "any": lambda m, x: bool(m.any()),
    "all": lambda m, x: bool(m.all()),
    "not": lambda m, x: not m[0],
    "and": lambda m, x: bool(m[0] and m[-1]),
    "or": lambda m, x: bool(m[0] or m[-1]),
    "if": lambda m, x: 1 if m[0] else 2,
    "while": lambda m, x: halvings(x),
    "assert": lambda m, x: asserted(m),
    "item": lambda m, x: m[0].item(),
    "number": lambda m, x: x.sum().item() > 0,
    "between": lambda m, x: 0 < x.sum().item() < 1,
    "is one": lambda m, x: x.sum().item() == 1,
    "max": lambda m, x: max(0.0, float(x.sum())) > 0,
    "min": lambda m, x: min(0.0, float(x.sum())) < 0,
    "truth": lambda m, x: bool(x.sum()),
    "argmax": lambda m, x: int(x.argmax()),
    "tolist": lambda m, x: m.tolist(),
    "numbers": lambda m, x: [value > 0 for value in x.tolist()],
    "how many": lambda m, x: int(m.sum()),
    "sorted": lambda m, x: sorted([(float(x.sum()), 0), (0.0, 1)])[0][1],
    "whole number": lambda m, x: int(x.sum()),
    "floor": lambda m, x: math.floor(x.sum().item()),
    "nonzero": lambda m, x: m.nonzero().shape[0],
    "select": lambda m, x: x[m[: len(x)]].shape[0] if len(m) >= len(x) else 0,
    "unique": lambda m, x: len(m.unique()),
    "in a list": lambda m, x: True in list(m),
    "any of a list": lambda m, x: any(m),
    "key": lambda m, x: {True: 1, False: 2}[m[0].item()],
    "element": lambda m, x: [1, 2][m[0].item()],
    "slice": lambda m, x: len(list(range(10))[: int(m.sum())]),
    "numpy": lambda m, x: bool(m.cpu().numpy().any()),
    "equal": lambda m, x: torch.equal(x, torch.zeros_like(x)),
    "allclose": lambda m, x: torch.allclose(x, torch.zeros_like(x)),
    "new tensor": lambda m, x: bool(torch.tensor([m[0], m[-1]]).any()),
    "bincount": lambda m, x: len(m.long().bincount()),
    "repeat": lambda m, x: len(x[:1].repeat_interleave(m.long()[:1])),
}

Steps = tuple[list[str], str, list[str], str]
steps: st.SearchStrategy[Steps] = st.tuples(
    st.lists(st.sampled_from(sorted(NUMBERS)), max_size=3),
    st.sampled_from(sorted(MASKS)),
    st.lists(st.sampled_from(sorted(OF_MASKS)), max_size=3),
    st.sampled_from(sorted(DECISIONS)),
)


def decided(drawn: Steps, seed: int, device: str, elements: int) -> str:
    numbers, mask_of, of_masks, decision = drawn
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(elements, generator=generator).to(device) * torch.ones(elements, device=device)
    for name in numbers:
        x = NUMBERS[name](x)
    mask = MASKS[mask_of](x)
    for name in of_masks:
        mask = OF_MASKS[name](mask)
    try:
        return str(DECISIONS[decision](mask, x))
    except IndexError:
        return "IndexError"


def check(drawn: Steps, seed: int, device: str, elements: int, values: str) -> None:
    found: list[str] = []

    def program(device: str) -> None:
        found.append(decided(drawn, seed, device, elements))

    try:
        profile = trace(program, device, device=device, values=values)
    except UnknownValueError:
        return
    program("cpu")
    assert found[-2] == found[-1] or profile.warnings


@settings(max_examples=40)
@given(steps, st.integers(0, 1000), st.sampled_from(["cpu", "cuda"]))
def test_without_values(drawn: Steps, seed: int, device: str) -> None:
    check(drawn, seed, device, 1200, "none")


@settings(max_examples=40)
@given(steps, st.integers(0, 1000), st.sampled_from(["cpu", "cuda"]), st.integers(0, 60_000))
def test_where_the_budget_ends(drawn: Steps, seed: int, device: str, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ValuesBudget, "CHEAP", most // 100)
        patch.setattr(Values, "budget", lambda _: ValuesBudget(most * 4, most))
        check(drawn, seed, device, 300, "auto")


def test_positions_of_a_batch_are_known_where_a_model_is_too_large(monkeypatch):
    """As ``find_packed_sequence_indices`` of transformers asks, of positions that are many."""
    monkeypatch.setattr(Values, "budget", lambda _: ValuesBudget(1 << 20, 1 << 20))

    def program() -> None:
        hidden = torch.randn(16, 1024, 32)
        hidden = hidden @ torch.randn(32, 32)  # more than the budget
        positions = torch.arange(1024)[None].expand(16, -1)
        steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
        assert bool(((steps != 1).cumsum(-1)[:, -1] == 0).all())
        with pytest.raises(UnknownValueError):
            bool((hidden.cumsum(-1)[:, -1] == 0).all())

    trace(program)


@settings(max_examples=40)
@given(steps, st.integers(0, 1000), st.sampled_from(["cpu", "cuda"]))
def test_with_values(drawn: Steps, seed: int, device: str) -> None:
    elements = random.Random(seed).choice([1, 5, 200])
    given = (drawn, seed, device, elements)
    found = result_of(lambda: decided(*given), device=device, values="real")
    assert found == decided(drawn, seed, "cpu", elements)


@pytest.mark.parametrize("values", ["none", "auto"])
def test_an_operator_decides_the_same_at_each_call(device: str, values: str) -> None:
    """The first is made of others, for what it allocates; later ones follow its plan."""

    def program() -> None:
        for known in (1, 2, 1):
            tokens = torch.tensor([3, known, 7], device=device)
            ends = torch.isin(tokens, torch.tensor([2, 5], device=device))
            assert bool(ends.any()) is (known == 2)

    assert trace(program, device=device, values=values).warnings == ()


def test_numbers_settle_what_masks_count_as(device: str) -> None:
    """``mask | True`` is made of others at its first call, and follows a plan at the second."""

    def program() -> None:
        for _ in range(2):
            unknown = torch.randn(5000, device=device).cumsum(0) * 2.5
            mask = torch.isnan(unknown)
            assert bool((mask | True)[0])
            assert not bool((mask & True)[0])
            assert not bool(torch.bitwise_not(mask | True)[0])

    assert trace(program, device=device, values="none").warnings == ()
