"""Methods of ``nn.Module`` replaced for a while, without what that costs.

To set ``__call__`` or ``__delattr__`` of a class, Python goes through all of its subclasses, of
which ``nn.Module`` has thousands (Objects/typeobject.c, ``update_subclasses``). The function that
is there gets other code instead: for all who hold it, as others would look it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_PLACE = "what is called instead"
_REPLACED: list[tuple[FunctionType, CodeType]] = []
"""Functions with the code that was there, while another is."""


@contextmanager
def module_calls(
    instead: Callable[[Callable[..., Any]], Callable[..., Any]], name: str = "__call__"
) -> Iterator[None]:
    """Have ``instead(original)`` called for every call of a module, or of another method of it.

    It is called with the module, and with what that is called with.
    """
    function: Any = getattr(nn.Module, name)
    template = _template_of(function)
    if template is None:
        setattr(nn.Module, name, instead(function))
        try:
            yield
        finally:
            setattr(nn.Module, name, function)
        return
    code = function.__code__
    about = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    original = FunctionType(code, *about)
    original.__kwdefaults__ = function.__kwdefaults__
    # Whoever is in the midst of a call, on another thread, goes on in the code that he has.
    function.__code__ = _calling(template, instead(original))
    _REPLACED.append((function, code))
    try:
        yield
    finally:
        _REPLACED.remove((function, code))
        function.__code__ = code


@contextmanager
def module_calls_as_they_were() -> Iterator[None]:
    """Have ``nn.Module.__call__``, and what else is replaced, be torch's own for what looks in."""
    now = [(function, function.__code__) for function, _ in _REPLACED]
    for function, code in reversed(_REPLACED):
        function.__code__ = code
    try:
        yield
    finally:
        for function, code in now:
            function.__code__ = code


def _template_of(function: Any) -> CodeType | None:
    """Return code that can stand in a function, which has to name the same variables around it.

    ``super()`` names the class; None for what is no function, or names others.
    """
    templates = (_call.__code__, _Method.call.__code__)
    if type(function) is not FunctionType:
        return None
    around = function.__code__.co_freevars
    return next((code for code in templates if code.co_freevars == around), None)


def _calling(template: CodeType, call: Callable[..., Any]) -> CodeType:
    """Return code that calls ``call``, one of its constants: the function has no other names."""
    constants = (call if one == _PLACE else one for one in template.co_consts)
    return template.replace(co_consts=tuple(constants))


# torch's Python tracer reads this frame's module as its local ``self``, and ends the process where
# there is none (torch/csrc/autograd/profiler_python.cpp, recordPyCall).
def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    call: Any = "what is called instead"
    return call(self, *args, **kwargs)


class _Method:
    """The same for a function in which ``super()`` is called."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        __class__  # type: ignore[name-defined]  # noqa: B018
        call: Any = "what is called instead"
        return call(self, *args, **kwargs)
