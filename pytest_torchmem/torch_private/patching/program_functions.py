"""What a program, or a test, has put in the place of torch's functions itself.

A mock, or a function of its own, is what the program calls in reality, so it stays there. One that
calls the function whose place it has taken (a spy, a wrapper) calls what a trace has in that place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

_LIBRARIES = frozenset({"torch", "safetensors", "pytest_torchmem"})
"""Whose functions are replaced in a trace, and what replaces them."""
_OURS = f"{__name__.partition('.')[0]}."
_DECORATORS = frozenset({"contextlib", "functools", "typing_extensions", "warnings"})
"""Where functions come from that stand for the one that they decorate."""
_OF_PYBIND = "instancemethod"
"""What pybind11 makes of a method (``PyInstanceMethod_New``); Python has no name for the type."""
_IN_C = (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
_DEPTH = 5
"""How far a function's own function is looked for: a spy of ``unittest.mock`` has it in the fourth
place."""


def is_of_program(owner: Any, name: str, found: Any) -> bool:
    """Return whether a program has put ``found`` where torch had a public function or method."""
    if name.startswith("_") or not (callable(found) or isinstance(found, property)):
        return False
    path = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", "")
    package, *inner = str(path).split(".")
    if package not in _LIBRARIES or any(part.startswith("_") for part in inner):
        return False
    return not _is_own(found)


def is_left_over(found: Any) -> bool:
    """Return whether a function is one that this package puts in the place of others."""
    found = _function_in(found)
    if isinstance(found, FunctionType):
        return str(found.__globals__.get("__name__")).startswith(_OURS)
    return not isinstance(found, type) and str(type(found).__module__).startswith(_OURS)


def _function_in(found: Any) -> Any:
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    return found.fget if isinstance(found, property) else found


def _is_own(found: Any) -> bool:
    """Return whether a library has defined a function itself."""
    found = _function_in(found)
    if isinstance(found, type):  # a class that torch's is the base of stands for that
        bases = {str(one.__module__).partition(".")[0] for one in found.__mro__[:-1]}
        return bool(bases & (_LIBRARIES | {"builtins"}))
    while found is not None and not isinstance(found, _IN_C):
        if isinstance(found, MethodType) or type(found).__name__ == _OF_PYBIND:
            found = found.__func__
            continue
        names = found.__globals__ if isinstance(found, FunctionType) else vars(type(found))
        where = str(names.get("__name__" if isinstance(found, FunctionType) else "__module__"))
        package = where.partition(".")[0]
        if package in _LIBRARIES:
            return True
        if package not in _DECORATORS and not isinstance(found, partial):
            return False
        found = found.func if isinstance(found, partial) else _attributes(found).get("__wrapped__")
    return True


class HeldOriginal(NamedTuple):
    """A place in what a program put there that holds the function whose place it has taken."""

    original: Any
    put: Callable[[Any], object]
    """Puts something else into the place."""


def held_originals(found: Any, name: str) -> list[HeldOriginal]:
    """Return the places in a program's function, or mock, that hold torch's own of that name."""
    return list(_held(found, name, set(), _DEPTH))


@contextmanager
def program_functions_aside(
    replacements: Sequence[tuple[Any, Mapping[str, Any]]],
) -> Iterator[bool]:
    """Have torch's own functions there, for a while, where a program's call them and stand in their
    place. Yields whether there are any.
    """
    found = [
        (owner, name, vars(owner)[name])
        for owner, attributes in replacements
        for name in attributes
        if name in vars(owner) and is_of_program(owner, name, vars(owner)[name])
    ]
    calling = [(one, held_originals(one[2], one[1])) for one in found]
    calling = [(one, held) for one, held in calling if held]
    try:
        for (owner, name, _), held in calling:
            setattr(owner, name, held[0].original)
        yield bool(calling)
    finally:
        for (owner, name, function), _ in calling:
            setattr(owner, name, function)


def _held(found: Any, name: str, seen: set[int], depth: int) -> Iterator[HeldOriginal]:
    if id(found) in seen or not depth:
        return
    seen.add(id(found))
    for value, put in _places(found):
        if callable(value) and getattr(value, "__name__", "") == name and _is_own(value):
            yield HeldOriginal(value, put)
        elif isinstance(value, (FunctionType, MethodType)) or _is_mock(value):
            yield from _held(value, name, seen, depth - 1)


def _places(found: Any) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """Yield what a function or a mock calls, with what puts something else there."""
    if isinstance(found, MethodType):
        yield found.__func__, _nowhere
        found = found.__self__
    if isinstance(found, FunctionType):
        for cell in found.__closure__ or ():
            try:
                yield cell.cell_contents, partial(_into_cell, cell)
            except ValueError:  # of a name that is not bound yet
                continue
        names = found.__globals__
        for name in found.__code__.co_names:
            if callable(names.get(name)):
                yield names[name], partial(names.__setitem__, name)
    attributes = _attributes(found)
    for name, value in list(attributes.items()):
        if name != "__wrapped__":  # is only told of
            yield value, partial(attributes.__setitem__, name)


def _attributes(found: Any) -> dict[str, Any]:
    attributes = getattr(found, "__dict__", {})
    return attributes if isinstance(attributes, dict) else {}


def _is_mock(value: Any) -> bool:
    return type(value).__module__ == "unittest.mock"


def _into_cell(cell: CellType, value: Any) -> None:
    cell.cell_contents = value


def _nowhere(_: Any) -> None:
    """Leave what cannot be replaced."""
