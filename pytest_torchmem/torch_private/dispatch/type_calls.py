"""Types of C++ that a program calls, whose objects are made in another way for a while.

Programs hold ``torch.device`` and ``safetensors.safe_open`` by themselves (``from torch import
device``, ``type(x) is torch.device``), so that no other class can take their place, and their
``__new__`` cannot be replaced and put back. Calling a type is up to the type's own type, which is
exchanged here and put back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from pytest_torchmem.torch_private.names import unsupported

_TYPE_OF = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)
"""Where an object says what its type is: the last field of CPython's ``PyObject``."""

_making: dict[type, Callable[..., Any]] = {}


def make(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Return what ``kind`` itself makes of its arguments."""
    return type.__call__(kind, *args, **kwargs)


@contextmanager
def made_by(kind: type, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``kind(...)`` return what ``function`` does, in the whole process."""
    place, original = ctypes.c_void_p.from_address(id(kind) + _TYPE_OF), type(kind)
    if place.value != id(original):
        raise unsupported(f"{kind.__name__} does not say what its type is where others do")
    _making[kind] = function
    place.value = id(_type_of(kind))
    try:
        yield
    finally:
        place.value = id(original)
        del _making[kind]


@cache
def _type_of(kind: type) -> type:
    module, original = kind.__module__, type(kind)
    place = ctypes.c_void_p.from_address(id(kind) + _TYPE_OF)

    class Made(original):  # type: ignore[misc,valid-type]
        """The type of ``kind`` while something else makes its objects."""

        __slots__ = ()
        #: Pickling asks for that of ``torch.device``, which has none of its own.
        __module__ = property(lambda cls: module)

        def __new__(mcs, *args: Any, **kwargs: Any) -> Any:
            # A class that derives from ``kind`` meanwhile is of the type that it always is of.
            place.value = id(original)
            try:
                return original(*args, **kwargs)
            finally:
                place.value = id(mcs)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            # Another thread may be in here when the type is put back, so nothing is asked of it.
            function = _making.get(cls)
            return make(cls, *args, **kwargs) if function is None else function(*args, **kwargs)

    return Made
