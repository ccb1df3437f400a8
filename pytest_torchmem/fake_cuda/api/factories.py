"""What stands in for functions and classes of torch while a trace asks for a GPU.

Stand-ins are made once for a process, and a trace lends them its answers: there are more than a
hundred, and to make them anew would be the most of what a small model's trace takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from types import ModuleType
from typing import Any

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.targets.device_index import check_ordinal
from pytest_torchmem.torch_private.patches import replaced_all


class Session:
    """The answers of the trace that is running; a process runs one at a time."""

    def __init__(self) -> None:
        self.trace: TraceContext | None = None
        self.answers: Mapping[str, Mapping[str, Callable[..., Any]]] = {}
        """By module and name."""

    def off(self) -> bool:
        """Return whether torch's own function or class is meant."""
        return self.trace is None or self.trace.off()

    @property
    def running(self) -> TraceContext:
        """The trace that is running, while replaced functions are on."""
        assert self.trace is not None
        return self.trace


SESSION = Session()


@contextmanager
def standing_in(
    trace: TraceContext,
    answers: Sequence[tuple[ModuleType | Any, Mapping[str, Callable[..., Any]]]],
    classes: Sequence[tuple[ModuleType, str, type]],
) -> Iterator[None]:
    """Replace functions of modules that there are answers for, and classes, by name.

    What this version of torch does not have is passed over.
    """
    by_module: dict[str, Mapping[str, Callable[..., Any]]] = {}
    replacements: list[tuple[Any, dict[str, Any]]] = []
    for module, functions in answers:
        prefix = module.__name__
        by_module[prefix] = functions
        found = {}
        present = _attributes(module)
        for name in _known(module, tuple(functions)):
            original = present.get(name)
            if original is not None:
                found[name] = _function(original, prefix, name)
        replacements.append((module, found))
    for module, name, stand_in in classes:
        original = vars(module).get(name)
        if original is not None:
            replacements.append((module, {name: _class(original, stand_in)}))
    SESSION.trace, SESSION.answers = trace, by_module
    try:
        with replaced_all(replacements):
            yield
    finally:
        SESSION.trace, SESSION.answers = None, {}


class _Attributes:
    """The attributes of what stands in a module's place, as ``torch.backends.cudnn`` does."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get(self, name: str) -> Any:
        return getattr(self._module, name, None)


def _attributes(module: Any) -> Mapping[str, Any] | _Attributes:
    return vars(module) if type(module) is ModuleType else _Attributes(module)


@cache
def _known(module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a module has: most do not have most of them."""
    attributes = _attributes(module)
    return tuple(name for name in names if attributes.get(name) is not None)


@cache
def _function(original: Any, module: str, name: str) -> Callable[..., Any]:
    session = SESSION
    place, keyword = _device_argument(original)

    def function(*args: Any, **kwargs: Any) -> Any:
        if session.off():
            return original(*args, **kwargs)
        if place is not None:
            check_ordinal(args[place] if len(args) > place else kwargs.get(keyword))
        return session.answers[module][name](*args, **kwargs)

    function.__name__ = original.__name__
    function.__doc__ = original.__doc__
    function.__wrapped__ = original  # type: ignore[attr-defined]
    return function


def _device_argument(function: Any) -> tuple[int | None, str]:
    """Return position and name of the argument that says which device, if there is one."""
    try:
        names = list(signature(function).parameters)
    except (TypeError, ValueError):
        return None, ""
    for name in ("device", "device_index"):
        if name in names:
            return names.index(name), name
    return None, ""


@cache
def _class(original: Any, stand_in: type) -> Any:
    session = SESSION

    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (original if session.off() else stand_in)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, stand_in))

    return Kind(original.__name__, (), {"__doc__": original.__doc__})
