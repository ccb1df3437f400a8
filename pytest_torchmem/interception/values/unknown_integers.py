"""What stands for an integer that a trace does not know, such as how many answers were right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_torchmem.errors import UnknownValueError


class UnknownInteger(float):
    """A number to add up, compare and print, and none to make a shape, an index or a range with.

    It counts as 1, and so does what is computed from it: a float, which torch and Python take for
    no size. Asked for an integer after all it raises ``UnknownValueError``.
    """

    _unknown: Callable[[str], UnknownValueError]

    def __new__(cls, value: float, unknown: Callable[[str], UnknownValueError]) -> UnknownInteger:
        made = super().__new__(cls, value)
        made._unknown = unknown
        return made

    def _refuse(self, *_: Any) -> Any:
        __tracebackhide__ = True
        raise self._unknown("an unknown integer is used as a size, an index or a whole number")

    __index__ = __int__ = __trunc__ = __floor__ = __ceil__ = _refuse

    def __round__(self, digits: Any = None) -> Any:
        return self._refuse() if digits is None else self

    def __format__(self, form: str) -> str:
        return format(1, form)

    def __repr__(self) -> str:
        return "1"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return float, (1.0,)


def _arithmetic(name: str) -> Callable[[UnknownInteger, Any], Any]:
    compute: Callable[[float, Any], Any] = getattr(float, name)

    def method(self: UnknownInteger, other: Any) -> Any:
        found = compute(self, other)
        return found if found is NotImplemented else UnknownInteger(found, self._unknown)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    for _side in ("__{}__", "__r{}__"):
        setattr(UnknownInteger, _side.format(_name), _arithmetic(_side.format(_name)))
