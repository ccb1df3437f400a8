"""What stands for a number that a trace does not know, such as a loss or how many were right."""

import dis
import functools
import math
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

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
