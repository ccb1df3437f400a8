"""Answers to a program that asks for values: known ones, a guess, or an error.

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

import ctypes
import dis
import functools
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.attribution import Attribution, asking_frame
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.plan import Call, Output
from pytest_torchmem.interception.values.contents import (
    Assumption,
    Contents,
    Values,
    ValuesNeeded,
    is_count,
    is_floating,
)
from pytest_torchmem.interception.values.messages import Mailbox
from pytest_torchmem.interception.values.random_numbers import RandomNumbers
from pytest_torchmem.operators.registry import UnknownOutputs
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step import generators, trees
from pytest_torchmem.torch_private.tensors import TensorBase, storage_address

_MODULO_OF_BINARY = (6, 19)
"""``NB_REMAINDER`` and ``NB_INPLACE_REMAINDER``, from Python 3.11 on (Include/opcode.h)."""
_FORM = re.compile(r"(?:(.)?([<>=^]))?[-+ ]?#?0?(\d*)")
"""The fill, the alignment and the width of a format; Python's "Format specification mini-language".
"""
_SETTLED_BY_INFINITY = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")

Undecided: TypeAlias = Callable[[str, Any], Any]


class UnknownNumber(float):
    """A number to add up and print, and none to decide by or to make a shape or an index of.

    It counts as 1, and so does what is computed from it: a float, which torch and Python take for
    no size. Whatever decides by it is asked of the trace. All unknown numbers are finite. It is
    printed as nan, or as ``?`` where it is an integer; ``%`` reads the 1 (Objects/unicodeobject.c,
    ``formatfloat``). One that outlives its trace is nan for whoever reads it, C included. Each
    trace has classes of its own, so that ``type(number)(…)`` is another of the same.
    """

    AS_SIZE = "an unknown number is used as a size, an index or a whole number"
    _integer: ClassVar[bool]
    _living: ClassVar[WeakValueDictionary[int, UnknownNumber]]

    def __new__(cls, value: Any = 0.0) -> UnknownNumber:
        made = super().__new__(cls, value)
        cls._living[id(made)] = made
        return made

    @staticmethod
    def _undecided(what: str, answer: Any) -> Any:
        """Raise; in its trace, return the answer that is given, which is that of 1, or raise."""
        raise UnknownValueError(
            f"{what}: it was read in a trace that has ended and did not compute it, in a line that "
            "the profile warns of. Pass values='real' to the trace, which computes every value, "
            "and mode='aot' if it is one of compiled code"
        )

    def _as_integer(self, convert: Callable[[float], int]) -> int:
        value = float.__float__(self)
        answer = convert(value) if math.isfinite(value) and not self._integer else None
        return self._undecided(self.AS_SIZE, answer)  # type: ignore[no-any-return]

    def __index__(self) -> int:
        if not self._integer:
            raise TypeError("'float' object cannot be interpreted as an integer")
        return self._as_integer(int)

    def __int__(self) -> int:
        # ``"%d" % number``: numbers that ``%`` divides are not asked for an integer
        frame = sys._getframe(1)
        code, at = frame.f_code.co_code, frame.f_lasti
        operation = dis.opname[code[at]]
        binary = operation == "BINARY_OP" and code[at + 1] in _MODULO_OF_BINARY
        if (binary or "MODULO" in operation) and math.isfinite(self):
            return int(float.__float__(self))
        return self._as_integer(int)

    __trunc__ = __int__

    def __floor__(self) -> int:
        return self._as_integer(math.floor)

    def __ceil__(self) -> int:
        return self._as_integer(math.ceil)

    def __round__(self, digits: Any = None) -> Any:
        return self._as_integer(round) if digits is None else self

    def __bool__(self) -> bool:
        return bool(self._undecided("an unknown number decides", True))

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

    def __hash__(self) -> int:
        return hash(self._undecided("an unknown number is looked up", 1))

    def __reduce__(self) -> Any:
        torch.serialization.add_safe_globals([float])  # to read it back with ``weights_only``
        return float, (math.nan,)

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [float.__float__(one) if isinstance(one, UnknownNumber) else one for one in inputs]
        found = getattr(function, method)(*plain, **options)
        return self._undecided("numpy computes with an unknown number", found)


def _compute_with(name: str) -> Callable[..., Any]:
    compute: Callable[..., Any] = getattr(float, name)

    def method(self: UnknownNumber, *others: Any) -> Any:
        try:
            found = compute(self, *others[:1])
        except ZeroDivisionError:  # by an unknown number that counts as 1 - 1
            return self._undecided("a number is divided by an unknown one", type(self)(1.0))
        if found is NotImplemented:
            return found
        if isinstance(found, tuple):
            return tuple(map(type(self), found))
        return type(self)(found) if isinstance(found, float) else found

    method.__name__ = name
    return method


def _compare_by(name: str) -> Callable[..., Any]:
    compare: Callable[[float, Any], Any] = getattr(float, name)

    def method(self: UnknownNumber, other: Any) -> Any:
        answer = compare(self, other)
        if answer is NotImplemented or self is other:  # ``x != x`` asks whether it is nan
            return answer
        plain = isinstance(other, float) and not isinstance(other, UnknownNumber)
        if plain and math.isfinite(self) and not math.isfinite(other):
            return answer
        return self._undecided("an unknown number is compared", answer)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"):
    for _side in ("__{}__", "__r{}__"):
        setattr(UnknownNumber, _side.format(_name), _compute_with(_side.format(_name)))
for _name in ("__neg__", "__pos__", "__abs__", "conjugate"):
    setattr(UnknownNumber, _name, _compute_with(_name))
for _name in ("__copy__", "__deepcopy__"):
    setattr(UnknownNumber, _name, lambda number, *_: number)
for _name in _SETTLED_BY_INFINITY:
    setattr(UnknownNumber, _name, _compare_by(_name))


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
        unknown = next((one for one in args if isinstance(one, UnknownNumber)), None)
        if unknown is None:
            return function(*args, **kwargs)
        try:
            found = function(*args, **kwargs)
        except (ValueError, OverflowError, ZeroDivisionError):
            found = 1.0
        if isinstance(found, bool):
            return unknown._undecided(f"math.{function.__name__} of an unknown number", found)
        return type(unknown)(found) if isinstance(found, float) else found

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
    if spec.writes or spec.record.unknown_outputs not in _OF_NUMBERS:
        return spec.changes_values
    return not all(is_floating(one.dtype) for one in (*tensors, *trees.argument_tensors(result)))


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
    if not told or len(told) < len(records) or any(is_floating(t.dtype) for t in tensors):
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


def _told(tensor: torch.Tensor, record: StorageRecord, contents: Contents) -> Assumption | None:
    """Return what is assumed of a storage, or known of all its elements: that it is 0, or 1."""
    known = contents.known(record)
    if known is None:
        assumed = record.assumption
        return assumed if assumed is not Assumption.FIRST else None
    if is_floating(tensor.dtype) or not known.numel():
        return None
    numbers = known.view(tensor.dtype)
    least, most = map(TensorBase.item, numbers.aminmax())
    return _settled(bool(most)) if least == most and most in (0, 1) else None


def _carried(call: Call, contents: Contents) -> Assumption | None:
    """Return what stands for all of several storages, or for one of another type."""
    unknown = [record for record in call.records if contents.known(record) is None]
    told = {record.assumption for record in unknown}
    (only,) = told if len(told) == 1 else (None,)
    if only is not Assumption.FIRST and len(unknown) < len(call.records):
        return None
    dtype = call.kwargs.get("dtype") or call.tensors[0].dtype
    if is_floating(dtype):
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
    counts = any(one.assumption in (None, Assumption.FIRST) for one in unknown)
    if not floating and counts and kind in ("eq", "ne"):
        return Assumption((kind == "ne", True))
    first, second = (_number(call, position) for position in (0, 1))
    if floating and any(math.isinf(number) for number in (first, second)):
        return _settled(compare(first, second))
    return Assumption((compare(first, second), True))


def _number(call: Call, position: int) -> float:
    """Return the number that an argument of a comparison counts as."""
    argument = call.args[position]
    if isinstance(argument, (int, float)):
        return argument
    for tensor, record in call.pairs():
        assumed = record.assumption
        if tensor is argument and assumed is not None:
            return float(assumed.answer)
    return 1.0


def _settled(answer: bool) -> Assumption:
    return Assumption.TRUE if answer else Assumption.FALSE


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements of the same storage."""
    same = storage_address(first) == storage_address(second)
    return same and Output.of(first) == Output.of(second)


#: Initialisers draw again what fell out of bounds (``_no_grad_trunc_normal_``); a trace counts
#: every first draw as accepted.
_INITIALISERS = torch.nn.init.__file__

#: What ``torch.distributions`` is given counts as valid.
_in_torch = partial(os.path.join, os.path.dirname(torch.__file__))
_VALIDATION = tuple(
    _in_torch("distributions", name) for name in ("constraints.py", "distribution.py")
)

#: Observers ask whether the smallest value is larger than the largest, which ends the program.
_BOUNDS_IN_ORDER = _in_torch("ao", "quantization", "utils.py"), "check_min_max_valid"

#: Bytes up to which what stands in for unknown values has an element for each of theirs.
_LARGEST_STAND_IN = 1 << 26

#: Where values come from that nothing computes.
_ORIGIN = (
    "it was computed from tensors on meta or from memory that nobody has written to (torch.empty), "
    "or a launched kernel wrote it. "
)

#: How often one line may ask for what is not known and get the same answer.
_LARGEST_GUESSES = 1_000


class Answers:
    """Answers what a program asks of values, and remembers what was assumed."""

    def __init__(self, ledger: Ledger, attribution: Attribution, mode: Values) -> None:
        self.contents = Contents(ledger)
        self.mode = mode
        self.needed = False
        """Whether the program's way depended on a value that this pass does not compute."""
        self.mailbox: Mailbox | None = None
        """What other processes have sent, in a world of several."""
        self.keeps_all = False
        """Whether elements counted as kept of which values would say it."""
        self.misses = ""
        """Of tensors that the program came with and whose values are not known: what they are, and
        what to do."""
        self.forward_draws = generators.ForwardDraws()
        """What forwards with dropout drew from, for their backwards."""
        self._budget = mode.budget()
        self._failed = ""
        """The first operator whose values could not be computed, and why."""
        self._told: dict[str, None] = {}
        self._evenly = ""
        """The line that counted unknown values, and nobody asked for the counts."""
        self._guesses: dict[str, int] = {}
        self._numbers: dict[bool, type[UnknownNumber]] = {}
        self._ledger = ledger
        self._attribution = attribution
        self.warn = partial(_warn, self._told, attribution)  # no method: this object is not held
        """Lets the profile warn of something, with the line of the program."""
        self._random_numbers = RandomNumbers(mode, self.warn, attribution.user_line)

    @property
    def warnings(self) -> list[str]:
        """What was assumed of unknown values, with the line, in order."""
        return list(self._told)

    @property
    def known_are(self) -> str:
        """Which values were computed, as profiles say it."""
        if self.keeps_all:
            return "guessed"
        if not self.mode.computes:
            return "none"
        spent = self._budget is not None and self._budget.spent
        return "in part" if spent or self._told else "real"

    def item(self, tensor: Tensor, record: StorageRecord) -> Any:
        """Return the number of a tensor of one element, for C++ or a program that needs it now."""
        if self.contents.known(record) is not None:
            self._told_known(record)
            return TensorBase.item(self.contents.value(record, tensor))
        if tensor.dtype is torch.bool:
            return self._truth(record)
        assumed = record.assumption
        if assumed is not None:
            self.guess(
                f"read an unknown position from a {tensor.dtype} tensor",
                f"unknown positions are treated as {assumed.answer}",
            )
            return int(assumed.answer)
        what = f"read an unknown value of a {tensor.dtype} tensor"
        if is_count(tensor.dtype):
            raise self.unknown(what)
        self.tell(what, "unknown values are treated as 1")
        return 1.0

    def number(self, tensor: Tensor) -> UnknownNumber:
        """Return what stands for a number that is not known, where a program may just tell it."""
        integer = is_count(tensor.dtype)
        self.warn(
            f"read an unknown value of a {tensor.dtype} tensor; it is treated as 1, and printed as "
            + ("?" if integer else "nan")
        )
        kind = self._numbers.get(integer)
        if kind is None:
            own = {"_undecided": staticmethod(self._undecided), "_integer": integer}
            own["_living"] = WeakValueDictionary()
            kind = self._numbers[integer] = type("UnknownNumber", (UnknownNumber,), own)
        return kind(1.0)

    def end(self) -> None:
        """Let the numbers of a trace that ends be nan, and nothing be decided by them any more."""
        while self._numbers:
            _, kind = self._numbers.popitem()
            del kind._undecided
            for number in kind._living.values():  # ``PyFloatObject``, Include/cpython/floatobject.h
                ctypes.c_double.from_address(id(number) + object.__basicsize__).value = math.nan

    def _undecided(self, what: str, answer: Any) -> Any:
        """Answer a decision on an unknown number; there is none for ``None``."""
        if answer is None or self.mode is not Values.GUESSED:
            raise self.unknown(what)
        return answer

    def stand_in(self, tensor: Tensor, record: StorageRecord, what: str) -> Tensor:
        """Return a real tensor for one whose values a program takes out of torch.

        What is not known is 1, and a position that was found is 0. Raises ``UnknownValueError`` for
        other integers: they are sizes often enough.
        """
        if self.contents.known(record) is not None:
            self._told_known(record)
            return self.contents.value(record, tensor)
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assumed = record.assumption
        number: float = 1 if assumed is None else assumed.answer
        if assumed is None and is_count(tensor.dtype):
            raise self.unknown(what)
        self.tell(what, f"unknown values are treated as {number}")
        one = torch.full((), number, dtype=tensor.dtype)
        if tensor.numel() * tensor.element_size() > _LARGEST_STAND_IN:
            return one.expand(tensor.shape)
        return one.repeat(tensor.shape) if tensor.dim() else one

    def _truth(self, record: StorageRecord) -> bool:
        """Return what an unknown truth value counts as."""
        assumed = record.assumption or Assumption.GUESSED_TRUE
        if not assumed.guessed:
            return bool(assumed.answer)
        frame = asking_frame()
        file = frame.f_code.co_filename
        if file == _INITIALISERS and not _accepts_all(frame.f_locals):
            why = "an initialiser that draws again what it rejects"
            self._random_numbers.lose(generators.current_generator(), why)
        if file == _INITIALISERS or (file, frame.f_code.co_name) == _BOUNDS_IN_ORDER:
            return False
        if file in _VALIDATION:
            return True
        answer = bool(assumed.answer)
        self.guess(
            "comparison with an unknown value",
            f"unknown values are treated as 1, so the result is {answer}",
        )
        return answer

    def guess(self, what: str, assumed: str) -> None:
        """Take a decision by a guess where that is wanted, and warn of it. Ends a loop that would
        wait for another answer for ever. Raises ``UnknownValueError`` where guesses are not wanted.
        """
        if self.mode is not Values.GUESSED:
            raise self.unknown(what)
        self.warn(f"{what}; {assumed}")
        line = self._attribution.user_line()
        times = self._guesses[line] = self._guesses.get(line, 0) + 1
        if times > _LARGEST_GUESSES:
            raise self.unknown(
                f"the same unknown value was read {_LARGEST_GUESSES:,} times here; a loop is "
                "probably waiting for it to change"
            )

    def cut(self) -> None:
        """Begin to count guesses, and what is computed, anew: another test begins."""
        self._budget = self.mode.budget()
        self._guesses.clear()
        self._told.clear()
        self._evenly = ""

    def keep_all(self, what: str) -> None:
        """Let all elements count as kept where values would say which are, and warn of that. Raises
        ``UnknownValueError`` where guesses are not wanted.
        """
        others = self.mailbox is not None and self.mailbox.needed() is not None
        if not self.mode.may_warn or self._has_another_pass() or others:
            raise self.unknown(what)
        self.warn(
            f"{what}; every element counts as kept, so the memory is at most what is reported"
        )
        self.keeps_all = True

    def tell(self, what: str, assumed: str) -> None:
        """Warn of numbers that were made up and go on into the program. Raises
        ``UnknownValueError`` where nobody would read the warning: tests that are run on a GPU that
        stands between traces have no profile.
        """
        if not self.mode.may_warn or self._has_another_pass():
            raise self.unknown(what)
        what = f"{what}; {assumed}"
        self.warn(f"{what} ({self._failed})" if self._failed else what)

    def _has_another_pass(self) -> bool:
        """Return whether a pass may follow that computes more."""
        spent = self._budget is not None and bool(self._budget.spent)
        return self.mode is Values.ASKED_FOR and (spent or self._random_numbers.left_out)

    def _told_known(self, record: StorageRecord) -> None:
        """Warn of what was made up of known values, now that they are asked for."""
        if self._evenly:
            self._told.setdefault(
                f"{self._evenly}: unknown values are counted; they are taken to be spread evenly"
            )
            self._evenly = ""
        line = self.contents.of_others([record])
        if line:
            self._told.setdefault(
                f"{line}: what other processes have is not known; they are taken to have, and to "
                "send, what this one has and sends"
            )

    def unknown(self, what: str, line: str = "") -> BaseException:
        """Return the error for a value that the trace does not have, naming the user's line. In a
        pass that does not compute values but may be followed by one that does, it is what ends the
        pass.
        """
        missing = None if self.mailbox is None else self.mailbox.needed()
        if missing is not None:
            return missing
        line = line or self._attribution.user_line() or "the traced program"
        if self._has_another_pass():
            self.needed = True
            return ValuesNeeded(f"{line}: {what}")
        return UnknownValueError(
            f"{line}: {what}. This line needs a value that the trace does not have: {self._why()}"
        )

    def _why(self) -> str:
        spent = self._budget.spent if self._budget is not None else ""
        if self.mode.stands and (spent or not (self.misses or self._failed)):
            spent = spent or "uses what was made before it, beyond that budget"
            ways_out = (
                "Run it with --torchmem-values=real, which computes all, or make it smaller"
                if self.mode is Values.OF_SUITE
                else "Make it smaller, compute this on the CPU, where values are real, or do it in "
                "the body of a memory test with values='real'"
            )
            return (
                "what fixtures and tests do on a fake GPU outside of memory tests is computed as "
                f"far as a budget for each test goes, and this test {spent}. {ways_out}"
            )
        if self.mode is Values.GUESSED:
            return (
                "with values='none' it only has the values of small integer and boolean tensors "
                "(token ids, masks, lengths) that are neither random nor computed from parameters. "
                "Trace with values='auto' or values='real', or skip this line while tracing"
            )
        if spent:
            return (
                f"to compute the values of this program {spent}. Pass values='real', "
                "which computes every value for real whatever it takes, or trace a smaller model, "
                "or pass values='none', which guesses: unknown values count as 1"
            )
        if self.misses and not self._failed:
            return (
                f"it was computed from what {self.misses}, or pass values='none', which "
                "guesses: unknown values count as 1"
            )
        why = f"{self._failed}. " if self._failed else _ORIGIN
        return f"{why}Pass tensors that have values, or skip this line while tracing"


def _accepts_all(variables: Mapping[str, Any]) -> bool:
    """Return whether an initialiser draws a normal distribution whose bounds nothing exceeds. What
    ``normal_`` makes of uniform numbers of 53 bits is within 8.6 standard deviations.
    """
    mean, std, least, most = (variables.get(name) for name in ("mean", "std", "a", "b"))
    if mean is None or std is None or least is None or most is None:
        return False
    return bool(min(most - mean, mean - least) > 8.6 * std)


def _warn(told: dict[str, None], attribution: Attribution, what: str) -> None:
    line = attribution.user_line() or "the traced program"
    told.setdefault(f"{line}: {what}")
