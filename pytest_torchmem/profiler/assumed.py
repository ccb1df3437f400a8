"""What a trace assumes of values that it does not know, where a program decides by them.

All values count as finite, so ``torch.isfinite(loss)`` is true and ``torch.isnan(x).any()`` is not.
A single number compares as 1 would, so that ``max(1e-3, scale)`` is ``scale``, and ``weight.any()``
finds something: guesses, which the profile warns of.

An assumption is one truth value for all elements of a boolean storage. It is not a known value:
nothing is computed from it but other assumptions, and what needs data for a shape still asks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch

from pytest_torchmem.profiler.internals import storage_address

if TYPE_CHECKING:
    from pytest_torchmem.profiler.call import Call


class Assumption(Enum):
    """A truth value that stands for all elements of a storage, and whether it is a guess."""

    TRUE = (True, False)
    FALSE = (False, False)
    GUESSED_TRUE = (True, True)
    GUESSED_FALSE = (False, True)

    @property
    def answer(self) -> bool:
        """The value."""
        return self.value[0]

    @property
    def guessed(self) -> bool:
        """Whether the value may well be the other one in a real run."""
        return self.value[1]


_CLASSES = {
    "aten::isfinite": True,
    "aten::isnan": False,
    "aten::isinf": False,
    "aten::isposinf": False,
    "aten::isneginf": False,
}
"""What holds of a finite number; ``isfinite`` itself is made of comparisons."""

_PYTHON: dict[str, Callable[[float, float], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_COMPARISONS = frozenset(
    f"aten::{name}.{kind}" for name in _PYTHON for kind in ("Tensor", "Scalar")
)
_ANY_OR_ALL = frozenset(
    f"aten::{name}{kind}" for name in ("any", "all") for kind in ("", ".dim", ".dims")
)
_TOGETHER = frozenset(
    f"aten::{name}{kind}"
    for name in ("logical_and", "logical_or", "bitwise_and", "bitwise_or", "mul")
    for kind in ("", ".Tensor")
)
_NOT = frozenset({"aten::logical_not", "aten::bitwise_not"})
OPERATORS = frozenset({*_CLASSES, *_COMPARISONS, *_ANY_OR_ALL, *_TOGETHER, *_NOT})
"""The operators whose boolean outputs may be assumed."""


def assume(call: Call) -> Assumption | None:
    """Return what is assumed of the output of an operator whose inputs are not all known."""
    name, tensors, records = call.operator.name, call.tensors, call.records
    if name in _CLASSES:
        return Assumption.TRUE if _CLASSES[name] else Assumption.FALSE
    if name in _COMPARISONS:
        return _compared(call)
    if name in _ANY_OR_ALL and tensors[0].dtype.is_floating_point:
        return Assumption.GUESSED_TRUE
    told = [record.assumed for record in records if record.assumed is not None]
    if not told or len(told) < len(records) or any(t.dtype is not torch.bool for t in tensors):
        return None
    if name in _NOT:
        return Assumption((not told[0].answer, told[0].guessed))
    if name in _ANY_OR_ALL:
        return told[0]
    every = name.startswith(("aten::logical_and", "aten::bitwise_and", "aten::mul"))
    answer = (all if every else any)(assumption.answer for assumption in told)
    # What is not a guess may settle it: "false and …".
    settled = any(not a.guessed and a.answer is answer is not every for a in told)
    guessed = not settled and any(assumption.guessed for assumption in told)
    return Assumption((answer, guessed))


def _compared(call: Call) -> Assumption | None:
    """Return what a comparison gives with itself, with infinity, or of one number, counted as 1."""
    name, tensors = call.operator.name, call.tensors
    compare = _PYTHON[name.removeprefix("aten::").partition(".")[0]]
    if not all(tensor.dtype.is_floating_point for tensor in tensors):
        return None
    if len(tensors) == 2 and is_same(*tensors):
        return _settled(compare(1.0, 1.0))
    if len(tensors) == 2:
        return Assumption((compare(1.0, 1.0), True)) if _are_numbers(tensors) else None
    number = call.args[1]
    if isinstance(number, (int, float)) and math.isinf(number):
        return _settled(compare(1.0, number))
    if not isinstance(number, (int, float)) or not _are_numbers(tensors):
        return None
    return Assumption((compare(1.0, number), True))


def _are_numbers(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.numel() == 1 for tensor in tensors)


def _settled(answer: bool) -> Assumption:
    return Assumption.TRUE if answer else Assumption.FALSE


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements of the same storage."""
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.storage_offset() == second.storage_offset()
        and storage_address(first) == storage_address(second)
    )
