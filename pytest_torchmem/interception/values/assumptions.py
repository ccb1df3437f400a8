"""Assumptions about unknown values that a program decides by, and what stands for a number that a
trace does not know, such as a loss or how many were right.

All values count as finite, so ``torch.isfinite(loss)`` is true and ``torch.isnan(x).any()`` is not.
They compare as 1 would, so that ``max(1e-3, scale)`` is ``scale``, and ``weight.any()`` finds
something; integers equal no others, so that a generated token does not end its sentence. Positions
that were found (``argmax``, ``topk``, a sample) are the first. These are guesses, which the profile
warns of.

An assumption is one value for all elements of a boolean storage, or of one with positions. It is
not a known value: nothing is computed from it but other assumptions, and what needs data for a
shape still asks.
"""

import dis
import functools
import math
import operator
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.interception.plan import Call
from pytest_torchmem.interception.values.contents import Assumption, Contents
from pytest_torchmem.operators.registry import UnknownOutputs
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.tensors import storage_address

_MODULO = ("BINARY_MODULO", "INPLACE_MODULO")
_MODULO_OF_BINARY = (6, 19)
"""``NB_REMAINDER`` and ``NB_INPLACE_REMAINDER``, from Python 3.11 on (Include/opcode.h)."""
_FORM = re.compile(r"(?:(.)?([<>=^]))?[-+ ]?#?0?(\d*)")
"""The fill, the alignment and the width of a format; Python's "Format specification mini-language".
"""
_SETTLED_BY_INFINITY = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


class Undecided(Protocol):
    """What is asked where a program decides by an unknown number."""

    def __call__(self, what: str, answer: Any) -> Any:
        """Return ``answer``, which is that of 1, or raise."""


class UnknownNumber(float):
    """A number to add up and print, and none to decide by or to make a shape or an index of.

    It counts as 1, and so does what is computed from it: a float, which torch and Python take for
    no size. Whatever decides by it is asked of the trace. All unknown numbers are finite. It is
    printed as nan, or as ``?`` where it is an integer; ``%`` reads the 1 (Objects/unicodeobject.c,
    ``formatfloat``).
    """

    AS_SIZE = "an unknown number is used as a size, an index or a whole number"
    _undecided: Undecided
    _integer: bool

    def __new__(
        cls, value: float, undecided: Undecided, *, integer: bool = False
    ) -> "UnknownNumber":
        made = super().__new__(cls, value)
        made._undecided, made._integer = undecided, integer
        return made

    def _with(self, value: float) -> "UnknownNumber":
        return UnknownNumber(value, self._undecided, integer=self._integer)

    def _as_integer(self, convert: Callable[[float], int]) -> Any:
        return self._undecided(
            self.AS_SIZE, None if self._integer else convert(float.__float__(self))
        )

    def __index__(self) -> int:
        if not self._integer:
            raise TypeError("'float' object cannot be interpreted as an integer")
        found: int = self._as_integer(int)
        return found

    def __int__(self) -> int:
        if _is_formatting(sys._getframe(1)):
            return int(float.__float__(self))
        found: int = self._as_integer(int)
        return found

    __trunc__ = __int__

    def __floor__(self) -> int:
        found: int = self._as_integer(math.floor)
        return found

    def __ceil__(self) -> int:
        found: int = self._as_integer(math.ceil)
        return found

    def __round__(self, digits: Any = None) -> Any:
        return self._as_integer(round) if digits is None else self

    def __bool__(self) -> bool:
        found: bool = self._undecided("an unknown number decides", True)
        return found

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __format__(self, form: str) -> str:
        """Return nan, or ``?`` where the format is one of integers: no result to take it for."""
        if not self._integer or form[-1:] in tuple("eEfFgG%"):
            return format(math.nan, form)
        given = _FORM.match(form)
        fill, align, width = given.groups() if given is not None else (None, None, "")
        side = ">" if align in (None, "=") else align
        return format("?", f"{fill or ' '}{side}{width}")

    def __repr__(self) -> str:
        return "?" if self._integer else "nan"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [float.__float__(one) if isinstance(one, UnknownNumber) else one for one in inputs]
        found = getattr(function, method)(*plain, **options)
        return self._undecided("numpy computes with an unknown number", found)


def _is_formatting(frame: FrameType) -> bool:
    """Return whether ``frame`` is about to put a number into a text: ``"%d" % number``.

    Numbers that ``%`` divides are not asked for an integer.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    operation = dis.opname[code[at]]
    return operation in _MODULO or (operation == "BINARY_OP" and code[at + 1] in _MODULO_OF_BINARY)


def _compute_with(name: str) -> Callable[..., Any]:
    compute: Callable[[float, Any], Any] = getattr(float, name)

    def method(self: UnknownNumber, other: Any, *rest: Any) -> Any:
        try:
            found = compute(self, other)
        except ZeroDivisionError:  # by an unknown number that counts as 1 - 1
            return self._undecided("a number is divided by an unknown one", self._with(1.0))
        if found is NotImplemented:
            return found
        if isinstance(found, tuple):
            return tuple(map(self._with, found))
        return self._with(found) if isinstance(found, float) else found

    method.__name__ = name
    return method


def _compare_by(name: str) -> Callable[..., Any]:
    compare: Callable[[float, Any], Any] = getattr(float, name)

    def method(self: UnknownNumber, other: Any) -> Any:
        answer = compare(self, other)
        if answer is NotImplemented or self is other:  # ``x != x`` asks whether it is nan
            return answer
        if isinstance(other, float) and not math.isfinite(other):
            return answer
        return self._undecided("an unknown number is compared", answer)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"):
    for _side in ("__{}__", "__r{}__"):
        setattr(UnknownNumber, _side.format(_name), _compute_with(_side.format(_name)))
for _name in _SETTLED_BY_INFINITY:
    setattr(UnknownNumber, _name, _compare_by(_name))


def _unary(name: str) -> Callable[..., Any]:
    compute: Callable[[float], float] = getattr(float, name)

    def method(self: UnknownNumber) -> UnknownNumber:
        return self._with(compute(self))

    method.__name__ = name
    return method


for _name in ("__neg__", "__pos__", "__abs__"):
    setattr(UnknownNumber, _name, _unary(_name))


#: Functions of ``math`` that ask nothing but what every finite number answers alike.
_KEPT = frozenset({"isfinite", "isinf", "isnan", "floor", "ceil", "trunc"})


@functools.cache
def functions_of_math() -> dict[str, Callable[..., Any]]:
    """Return the functions of ``math``, whose results of unknown numbers are unknown numbers."""
    return {
        name: _carrying(function)
        for name, function in vars(math).items()
        if callable(function) and not name.startswith("_") and name not in _KEPT
    }


def _carrying(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def carrying(*args: Any, **kwargs: Any) -> Any:
        unknown = next((one for one in args if type(one) is UnknownNumber), None)
        if unknown is None:
            return function(*args, **kwargs)
        try:
            found = function(*args, **kwargs)
        except (ValueError, OverflowError, ZeroDivisionError):
            found = 1.0
        if isinstance(found, bool):
            return unknown._undecided(f"math.{function.__name__} of an unknown number", found)
        return unknown._with(found) if isinstance(found, float) else found

    return carrying


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
