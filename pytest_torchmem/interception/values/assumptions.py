"""What a trace assumes of values that it does not know, where a program decides by them.

All values count as finite, so ``torch.isfinite(loss)`` is true and ``torch.isnan(x).any()`` is not.
They compare as 1 would, so that ``max(1e-3, scale)`` is ``scale``, and ``weight.any()`` finds
something; integers equal no others, so that a generated token does not end its sentence. Positions
that were found (``argmax``, ``topk``, a sample) are the first. These are guesses, which the profile
warns of.

An assumption is one value for all elements of a boolean storage, or of one with positions. It is
not a known value: nothing is computed from it but other assumptions, and what needs data for a
shape still asks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.values.assumption import Assumption
from pytest_torchmem.interception.values.contents import Contents
from pytest_torchmem.torch_private.storages import storage_address

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
    f"aten::{name}{kind}"
    for name in ("any", "all", "_is_any_true", "_is_all_true")
    for kind in ("", ".dim", ".dims")
)
_TOGETHER = frozenset(
    f"aten::{name}{kind}"
    for name in ("logical_and", "logical_or", "bitwise_and", "bitwise_or", "mul")
    for kind in ("", ".Tensor")
)
_NOT = frozenset({"aten::logical_not", "aten::bitwise_not"})
_FOUND = {
    "aten::argmax": 0,
    "aten::argmin": 0,
    "aten::max.dim": 1,
    "aten::min.dim": 1,
    "aten::multinomial": 0,
    "aten::sort": 1,
    "aten::sort.stable": 1,
    "aten::topk": 1,
}
"""Operators that find positions, and which of their outputs those are."""
_CARRIED = frozenset(
    f"aten::{name}"
    for name in ("_to_copy", "amax", "amin", "cat", "clone", "index_select", "max", "min")
)
"""Operators that put what they are given elsewhere; those on views need none of this."""
_IS_IN = frozenset(
    f"aten::isin.{kind}" for kind in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
)
OPERATORS = frozenset(
    {*_CLASSES, *_COMPARISONS, *_ANY_OR_ALL, *_TOGETHER, *_NOT, *_FOUND, *_CARRIED, *_IS_IN}
)
"""The operators whose boolean outputs, and positions, may be assumed."""


def assumed_output(name: str, result: Any) -> torch.Tensor | None:
    """Return the output of an operator that something may be assumed of."""
    if isinstance(result, torch.Tensor):
        return result
    position = _FOUND.get(name)
    return None if position is None else result[position]


def assume(call: Call, contents: Contents) -> Assumption | None:
    """Return what is assumed of the output of an operator whose inputs are not all known."""
    name, tensors, records = call.operator.name, call.tensors, call.records
    if name in _FOUND:
        return Assumption.FIRST
    if name in _CARRIED:
        return _carried(call, contents)
    if name in _CLASSES:
        return Assumption.TRUE if _CLASSES[name] else Assumption.FALSE
    if name in _COMPARISONS:
        return _compared(call, contents)
    if name in _ANY_OR_ALL and tensors[0].dtype.is_floating_point:
        return Assumption.GUESSED_TRUE
    if name in _IS_IN:
        return Assumption.GUESSED_FALSE
    pairs = zip(tensors, records, strict=True)
    told = [assumed for pair in pairs if (assumed := _told(*pair, contents)) is not None]
    if not told or len(told) < len(records) or any(is_floating(t) for t in tensors):
        return None
    if name in _NOT and tensors[0].dtype is not torch.bool:
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


def is_floating(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has real or complex numbers."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _told(tensor: torch.Tensor, record: StorageRecord, contents: Contents) -> Assumption | None:
    """Return what is assumed of a storage, or known of all its elements: that it is 0, or 1."""
    known = contents.known(record)
    if known is None:
        assumed = contents.assumed(record)
        return assumed if assumed is not Assumption.FIRST else None
    if is_floating(tensor) or not known.numel():
        return None
    numbers = known.view(tensor.dtype)
    least, most = numbers.min(), numbers.max()
    return _settled(bool(most)) if least == most and most in (0, 1) else None


def _carried(call: Call, contents: Contents) -> Assumption | None:
    """Return what stands for all of several storages, or for one of another type."""
    unknown = [record for record in call.records if contents.known(record) is None]
    told = {contents.assumed(record) for record in unknown}
    (only,) = told if len(told) == 1 else (None,)
    if only is not Assumption.FIRST and len(unknown) < len(call.records):
        return None
    dtype = call.kwargs.get("dtype") or call.tensors[0].dtype
    if dtype.is_floating_point or dtype.is_complex:
        return None
    return None if only is Assumption.FIRST and dtype is torch.bool else only


def _compared(call: Call, contents: Contents) -> Assumption | None:
    """Return what a comparison gives with itself, with infinity, or of numbers that count as 1."""
    name, tensors = call.operator.name, call.tensors
    kind = name.removeprefix("aten::").partition(".")[0]
    compare = _PYTHON[kind]
    if any(tensor.is_complex() for tensor in tensors):
        return None
    floating = any(tensor.dtype.is_floating_point for tensor in tensors)
    if len(tensors) == 2 and is_same(*tensors):
        return _settled(compare(1.0, 1.0))
    unknown = [record for record in call.records if contents.known(record) is None]
    counts = any(contents.assumed(one) in (None, Assumption.FIRST) for one in unknown)
    if not floating and counts and kind in ("eq", "ne"):
        return Assumption((kind == "ne", True))
    first, second = (_number(call, position, contents) for position in (0, 1))
    if floating and any(math.isinf(number) for number in (first, second)):
        return _settled(compare(first, second))
    return Assumption((compare(first, second), True))


def _number(call: Call, position: int, contents: Contents) -> float:
    """Return the number that an argument of a comparison counts as."""
    argument = call.args[position]
    if isinstance(argument, (int, float)):
        return argument
    for tensor, record in zip(call.tensors, call.records, strict=True):
        assumed = contents.assumed(record)
        if tensor is argument and assumed is not None:
            return float(assumed.answer)
    return 1.0


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
