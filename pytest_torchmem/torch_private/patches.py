"""Attributes replaced for the length of a trace, and put back exactly as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import MethodType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor

from pytest_torchmem.torch_private.holders import HOLDERS
from pytest_torchmem.torch_private.names import Missing, find, private, unsupported
from pytest_torchmem.torch_private.overrides import of_tensors

_ABSENT = object()
_STANDING: dict[int, list[tuple[Any, str, Any]]] = {}
"""What stood before in the place of what is replaced now: owners, names and originals."""

Replacements: TypeAlias = Sequence[tuple[Any, Mapping[str, Any]]]
"""Classes or modules, and their attributes by name.

A bound method among the attributes of a class becomes a method of that class: what the class is
called with follows the object that the method is bound to. Those of ``torch.Tensor`` ask its
subclasses first (``overrides.py``).
"""


class Replaceable:
    """A private attribute of torch that is replaced, by its dotted path."""

    def __init__(self, path: str) -> None:
        self._found = private(path)
        owner, _, self._name = path.rpartition(".")
        self._owner = find(owner)

    @property
    def original(self) -> Any:
        """What is there now."""
        missing = isinstance(self._found, Missing)
        return self._found if missing else getattr(self._owner, self._name)

    def by(self, replacement: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return one of ``Replacements``."""
        return self._owner, {self._name: replacement}


@contextmanager
def replaced(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a class or module; inherited ones are inherited again afterwards."""
    with replaced_all([(owner, replacements)]):
        yield


@contextmanager
def replaced_all(replacements: Replacements) -> Iterator[None]:
    """Replace attributes of several classes and modules together, which all must be there."""
    _check(replacements)
    before: list[tuple[Any, str, Any]] = []
    of_modules = [
        (original, replacement)
        for owner, attributes in replacements
        if isinstance(owner, ModuleType)
        for name, replacement in attributes.items()
        if callable(original := owner.__dict__.get(name))
    ]
    held = _held_elsewhere(of_modules)
    given = {id(replacement): original for original, replacement in of_modules}
    HOLDERS.note(given)
    _STANDING[id(before)] = before
    try:
        for owner, attributes in (*replacements, *held):
            own = vars(owner)
            for name, replacement in attributes.items():
                before.append((owner, name, own.get(name, _ABSENT)))
                if isinstance(replacement, MethodType) and isinstance(owner, type):
                    replacement = _unbound(replacement)
                if owner is Tensor:
                    replacement = of_tensors(name, replacement)
                setattr(owner, name, replacement)
        yield
    finally:
        del _STANDING[id(before)]
        if given:
            HOLDERS.give_back(given)
            HOLDERS.forget(given)
        _put_back(before)


def _put_back(before: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, original in reversed(before):
        if vars(owner).get(name, _ABSENT) is original:
            continue  # it could not be replaced
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def nothing_replaced() -> Iterator[None]:
    """Put back all that is replaced, for a while.

    What is imported meanwhile, and keeps functions of torch in tables, has torch's own.
    """
    everything = [place for before in _STANDING.values() for place in before]
    now = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in everything]
    _put_back(everything)
    try:
        yield
    finally:
        _put_back(now[::-1])


@contextmanager
def added(additions: Mapping[Any, Mapping[str, Any]]) -> Iterator[None]:
    """Give modules attributes that they do not have, for a while."""
    done: list[tuple[Any, str]] = []
    try:
        for owner, attributes in additions.items():
            for name, value in attributes.items():
                if not hasattr(owner, name):
                    done.append((owner, name))
                    setattr(owner, name, value)
        yield
    finally:
        for owner, name in done:
            if name in vars(owner):
                delattr(owner, name)


def _held_elsewhere(of_modules: Sequence[tuple[Any, Any]]) -> Replacements:
    """Return the replacements of functions and classes that other modules hold by their own names.

    ``of_modules`` are the originals and what replaces them. A module that is imported meanwhile
    holds the replacement, and is given the original afterwards.
    """
    if not of_modules:
        return []
    by_original = {id(original): replacement for original, replacement in of_modules}
    return [
        (module, {name: by_original[id(original)]})
        for module, name, original in HOLDERS.of([original for original, _ in of_modules])
    ]


def _check(replacements: Replacements) -> None:
    """Raise ``UnsupportedTorchError`` for attributes that are not there, or of another kind."""
    unknown = [
        name
        for owner, attributes in replacements
        for name in _unknown(owner, tuple(attributes), tuple(map(callable, attributes.values())))
    ]
    if unknown:
        raise unsupported(f"it has no {', '.join(unknown)} that can be replaced")


@cache
def _unknown(owner: Any, names: tuple[str, ...], callables: tuple[bool, ...]) -> list[str]:
    """Return the attributes that are not there, or are functions where none is expected."""
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for name, function in zip(names, callables, strict=True)
        if (found := getattr(owner, name, _ABSENT)) is _ABSENT or callable(found) is not function
    ]


def _unbound(method: MethodType) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return method(*args, **kwargs)

    return function


def is_another(known: Callable[..., Any] | None, function: Callable[..., Any]) -> bool:
    """Return whether a registry's entry would be replaced by a function from another place.

    A module that is imported anew, as under pytester in one process, registers its own again.
    """
    return known is not None and (known.__module__, known.__qualname__) != (
        function.__module__,
        function.__qualname__,
    )
