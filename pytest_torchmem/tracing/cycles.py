"""What is alive because Python has not collected garbage, and the program's objects in that."""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import cast

from torch import Tensor

from pytest_torchmem.interception.attribution import is_own
from pytest_torchmem.interception.facts import is_installed

_MOST = 20_000
"""Objects that are followed from one."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def collect(address_of: Callable[[Tensor], int], wanted: Iterable[int]) -> dict[int, str]:
    """Collect garbage; return by the addresses ``wanted`` the program's objects in it that hold
    what is there.
    """
    left, flags = set(wanted), gc.get_debug()
    found: dict[int, str] = {}
    known = len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)  # gc.garbage has then all that was found
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    garbage = gc.garbage[known:]
    del gc.garbage[known:]
    for one in sorted(garbage, key=lambda one: not issubclass(type(one), BaseException)):
        if name := _name_of(one):
            here = left & {address_of(tensor) for tensor in _tensors_below(one)}
            found.update(dict.fromkeys(here, name))
            left -= here
    if found:  # what a graph in a cycle has saved is no object of Python's
        found = dict.fromkeys(left, next(iter(found.values()))) | found
    del garbage
    gc.collect()
    return found


def _name_of(one: object) -> str:
    """Return what one of the program's own objects is, "" for any other."""
    kind = type(one)  # to ask an object for its class may run code of its own
    if issubclass(kind, BaseException):
        return f"the traceback of {kind.__qualname__}"
    if issubclass(kind, FunctionType):
        code = cast(FunctionType, one).__code__
        is_program = not is_own(code) and _is_of_program(code.co_filename)
        return cast(FunctionType, one).__qualname__ if is_program else ""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__qualname__ if isinstance(file, str) and _is_of_program(file) else ""


def _is_of_program(file: str) -> bool:
    return not (is_installed(file) or file.startswith((_STANDARD_LIBRARY, "<")))


def _is_globals(one: object) -> bool:
    return type(one) is dict and "__builtins__" in cast(dict[object, object], one)


def _tensors_below(one: object) -> list[Tensor]:
    """Return the tensors that an object leads to."""
    seen, waiting, found = {id(one)}, [one], []
    while waiting and len(seen) < _MOST:
        for other in gc.get_referents(waiting.pop()):
            kind = type(other)
            if id(other) in seen or issubclass(kind, type | ModuleType) or _is_globals(other):
                continue
            seen.add(id(other))
            if issubclass(kind, Tensor):
                found.append(cast(Tensor, other))
            waiting.append(other)
    return found
