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
_REPLACED: list[CodeType] = []
"""The code that was there, while another is."""


@contextmanager
def module_calls(
    instead: Callable[[Callable[..., Any]], Callable[..., Any]], name: str = "__call__"
) -> Iterator[None]:
    """Have ``instead(original)`` called for every call of a module, or of another method of it.

    It is called with the module, and with what that is called with.
    """
    function: Any = getattr(nn.Module, name)
    if type(function) is not FunctionType or function.__code__.co_freevars:
        setattr(nn.Module, name, instead(function))
        try:
            yield
        finally:
            setattr(nn.Module, name, function)
        return
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    # Whoever is in the midst of a call, on another thread, goes on in the code that he has.
    function.__code__ = _calling(instead(original))
    _REPLACED.append(code)
    try:
        yield
    finally:
        _REPLACED.remove(code)
        function.__code__ = code


@contextmanager
def module_calls_as_they_were() -> Iterator[None]:
    """Have ``nn.Module.__call__`` be torch's own, for what looks into it."""
    function: Any = nn.Module.__call__
    now = getattr(function, "__code__", None)
    if not _REPLACED or now is None:
        yield
        return
    function.__code__ = _REPLACED[0]
    try:
        yield
    finally:
        function.__code__ = now


def _calling(call: Callable[..., Any]) -> CodeType:
    """Return code that calls ``call``, one of its constants: the function has no other names."""
    code = _call.__code__
    constants = (call if one == _PLACE else one for one in code.co_consts)
    return code.replace(co_consts=tuple(constants))


# torch's Python tracer reads this frame's module as its local ``self``, and ends the process where
# there is none (torch/csrc/autograd/profiler_python.cpp, recordPyCall).
def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    call: Any = "what is called instead"
    return call(self, *args, **kwargs)
