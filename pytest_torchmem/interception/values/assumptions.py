"""Assumptions about unknown values that a program decides by.

All values count as finite, so ``torch.isfinite(loss)`` is true and ``torch.isnan(x).any()`` is not.
They compare as 1 would, so that ``max(1e-3, scale)`` is ``scale``, and ``weight.any()`` finds
something; integers equal no others, so that a generated token does not end its sentence. Positions
that were found (``argmax``, ``topk``, a sample) are the first. These are guesses, which the profile
warns of.

An assumption is one value for all elements of a boolean storage, or of one with positions. It is
not a known value: nothing is computed from it but other assumptions, and what needs data for a
shape still asks.
"""

import math
import operator
from typing import Any

import torch

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.values.contents import Assumption, Contents
from pytest_torchmem.operators.registry import UnknownOutputs
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.tensors import storage_address

_ALWAYS = {
    UnknownOutputs.TRUE: Assumption.TRUE,
    UnknownOutputs.FALSE: Assumption.FALSE,
    UnknownOutputs.POSITIONS: Assumption.FIRST,
    UnknownOutputs.IS_IN: Assumption.GUESSED_FALSE,
}
_OF_TRUTHS = frozenset({UnknownOutputs.AND, UnknownOutputs.OR, UnknownOutputs.NOT})
_OF_NUMBERS = _OF_TRUTHS | {UnknownOutputs.CARRIED}
"""What takes numbers, too, of which it then tells nothing."""


def may_be_assumed(spec: OperatorSpec, tensors: list[torch.Tensor], result: Any) -> bool:
    """Return whether something is to be noted of an operator's outputs, or of what it writes to,
    when their values are not computed.

    It depends on the operator and its arguments' geometry alone. Nothing is assumed of floating
    numbers that come of such, but by operators that ask what they are like.
    """
    written = spec.mutated or spec.mutated_names or spec.record.also_writes
    if written or spec.record.unknown_outputs not in _OF_NUMBERS:
        return spec.changes_values
    return not all(map(is_floating, (*tensors, *argument_tensors(result))))


def assumed_output(rule: UnknownOutputs, result: Any) -> torch.Tensor | None:
    """Return the output of an operator that something may be assumed of."""
    if isinstance(result, torch.Tensor):
        return result
    return result[1] if rule is UnknownOutputs.POSITIONS else None


def assume(rule: UnknownOutputs, call: Call, contents: Contents) -> Assumption | None:
    """Return what is assumed of the output of an operator whose inputs are not all known."""
    if rule in _OF_TRUTHS and call.tensors[0].dtype.is_floating_point:
        return None  # as it would come out below; most of a step's operators are such
    if rule in _ALWAYS:
        return _ALWAYS[rule]
    if rule is UnknownOutputs.CARRIED:
        return _carried(call, contents)
    if rule is UnknownOutputs.COMPARED:
        return _compared(call, contents)
    if rule is UnknownOutputs.ANY_OR_ALL and call.tensors[0].dtype.is_floating_point:
        return Assumption.GUESSED_TRUE
    return _of_truths(rule, call, contents)


def _of_truths(rule: UnknownOutputs, call: Call, contents: Contents) -> Assumption | None:
    """Return what follows of what is assumed of truth values."""
    tensors, records = call.tensors, call.records
    pairs = zip(tensors, records, strict=True)
    told = [assumed for pair in pairs if (assumed := _told(*pair, contents)) is not None]
    if not told or len(told) < len(records) or any(is_floating(t) for t in tensors):
        return None
    # Python numbers, or what C++ wrapped of them: ``mask | True``.
    numbers = [one for one in call.args if isinstance(one, (bool, int, float, complex))]
    if rule in (UnknownOutputs.AND, UnknownOutputs.OR) and numbers:
        if any(one not in (0, 1) for one in numbers):
            return None
        told += [_settled(bool(one)) for one in numbers]
    if rule is UnknownOutputs.NOT:
        boolean = tensors[0].dtype is torch.bool
        return Assumption((not told[0].answer, told[0].guessed)) if boolean else None
    if rule is UnknownOutputs.ANY_OR_ALL:
        return told[0]
    every = rule is UnknownOutputs.AND
    answer = (all if every else any)(assumption.answer for assumption in told)
    # What is not a guess may settle it: "false and …".
    settled = any(not a.guessed and a.answer is answer is not every for a in told)
    guessed = not settled and any(assumption.guessed for assumption in told)
    return Assumption((answer, guessed))


def even_counts(counted: int, counts: torch.Tensor) -> torch.Tensor:
    """Return how many there are in each bin, where each has as many as the others, or one less."""
    bins = counts.numel()
    each = torch.full((bins,), counted // max(bins, 1), dtype=counts.dtype)
    each[: counted % max(bins, 1)] += 1
    return each


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
    compare = getattr(operator, kind)
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
