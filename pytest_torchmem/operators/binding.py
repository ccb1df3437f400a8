"""Arguments by name: a function for an operator takes those of the schema that it uses.

``self`` of a schema may be called ``input``, as torch's own documentation does. What several
schemas have in common can be taken together: a parameter whose annotation is a class of
``calls.py`` gets that class, made of the arguments that its fields name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor

from pytest_torchmem.operators import calls
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, schema

#: Parameters that are no arguments of the operator: what a trace hands over besides, and all the
#: arguments that were given, for what is the same for operators of other schemas: those with a
#: position, the tensors among them, or all by name.
BESIDES = frozenset({"machine", "outputs", "call", "nested", "known", "cudnn", "take"})
WHOLES = frozenset({"operands", "tensors", "arguments"})
_EMPTY = inspect.Parameter.empty
_MISSING: Any = object()
_TAKES_ALL = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


_OTHER_NAMES = (("self", "input"), ("grad_output", "grad"))
"""What schemas call an argument, and what functions may: ``_cdist_backward`` has ``grad_output``
since torch 2.15.
"""


class Unbindable(TypeError):
    """A function asks for what an operator does not have."""


class Binding:
    """Calls a function with what it takes of the arguments of one overload."""

    __slots__ = ("_besides", "_function", "_groups", "_names", "_positions", "_wholes")

    def __init__(self, function: Callable[..., Any], overload: OpOverload) -> None:
        """Raise ``Unbindable`` where the function asks for what no overload can give."""
        described = schema(overload).arguments
        position_of = {str(argument.name): index for index, argument in enumerate(described)}
        for name, other in _OTHER_NAMES:
            if name in position_of:
                position_of.setdefault(other, position_of[name])
        defaults = {
            index: argument.default_value if argument.has_default_value() else _MISSING
            for index, argument in enumerate(described)
        }

        def place(name: str, default: Any) -> tuple[str, str, int, Any]:
            index = position_of.get(name)
            if index is None:
                if default is _EMPTY:
                    raise Unbindable(f"{overload.name()} has no argument {name!r}")
                return name, name, -1, default
            found = defaults[index]
            if found is _MISSING and default is not _EMPTY:
                found = default
            return name, str(described[index].name), index, found

        self._function = function
        self._names = tuple(str(argument.name) for argument in described)
        self._besides: list[str] = []
        self._wholes: list[str] = []
        self._positions: list[tuple[str, str, int, Any]] = []
        self._groups: list[tuple[str, type[Any], list[tuple[str, str, int, Any]]]] = []
        for parameter, annotation, its_default in _parameters(function):
            group = calls.GROUPS.get(annotation)
            if parameter in BESIDES:
                self._besides.append(parameter)
            elif parameter in WHOLES and parameter not in position_of:
                self._wholes.append(parameter)
            elif group is not None:
                given = group._field_defaults
                places = [place(name, given.get(name, _EMPTY)) for name in group._fields]
                self._groups.append((parameter, group, places))
            else:
                self._positions.append(place(parameter, its_default))

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], **besides: Any) -> Any:
        """Call the function for a call of the operator; ``besides`` is what a trace hands over."""
        __tracebackhide__ = True
        taken = {name: besides[name] for name in self._besides}
        for name in self._wholes:
            taken[name] = self._whole(name, args, kwargs)
        for name, schema_name, index, default in self._positions:
            taken[name] = _taken(args, kwargs, schema_name, index, default)
        for name, group, places in self._groups:
            taken[name] = group(
                **{
                    own: _taken(args, kwargs, schema_name, index, default)
                    for own, schema_name, index, default in places
                }
            )
        return self._function(**taken)

    def _whole(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "operands":
            return list(args)
        if name == "tensors":
            return [given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)]
        return {**dict(zip(self._names, args, strict=False)), **kwargs}


class InOrder:
    """Calls a function of a user with all arguments in their order, behind what ``leads``."""

    __slots__ = ("_function", "_leads", "_outputs")

    def __init__(
        self, function: Callable[..., Any], overload: OpOverload, leads: Sequence[str]
    ) -> None:
        self._function = function
        self._leads = tuple(leads)
        # ``out=`` is where the outputs are, not another argument.
        self._outputs = frozenset(
            str(argument.name) for argument in schema(overload).arguments if argument.is_out
        )

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], **besides: Any) -> Any:
        """Call the function for a call of the operator; ``besides`` is what a trace hands over."""
        __tracebackhide__ = True
        given = {name: value for name, value in kwargs.items() if name not in self._outputs}
        return self._function(*[besides[name] for name in self._leads], *args, **given)


Bound = Binding | InOrder


def _parameters(function: Callable[..., Any]) -> list[tuple[str, str, Any]]:
    """Return the names, annotations and defaults of a function's parameters.

    Raises ``Unbindable`` for ``*args`` and ``**kwargs``. ``inspect.signature`` tells the same, of
    anything that can be called, and takes ten times as long.
    """
    plain = isinstance(function, FunctionType) and not hasattr(function, "__wrapped__")
    if not plain or function.__code__.co_flags & _TAKES_ALL:
        parameters = inspect.signature(function).parameters.values()
        for one in parameters:
            if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                raise Unbindable(f"{function.__qualname__} takes {one}: name what it uses")
        return [(one.name, str(one.annotation), one.default) for one in parameters]
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    positional = names[: code.co_argcount]
    given = function.__defaults__ or ()
    defaults = dict(zip(positional[len(positional) - len(given) :], given, strict=True))
    defaults |= function.__kwdefaults__ or {}
    annotations = function.__annotations__
    return [(name, str(annotations.get(name, "")), defaults.get(name, _EMPTY)) for name in names]


def _taken(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: str, index: int, default: Any
) -> Any:
    if 0 <= index < len(args):
        return args[index]
    return kwargs.get(name, default)
