"""Methods of ``nn.Module`` replaced for a while, without what that costs.

To set ``__call__`` or ``__delattr__`` of a class, Python goes through all of its subclasses, of
which ``nn.Module`` has thousands (Objects/typeobject.c, ``update_subclasses``). The function that
is there gets other code instead: for all who hold it, as others would look it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any, TypeAlias

from torch import nn

from pytest_torchmem.torch_private.names import private_name

#: What moves and converts the parameters of a module.
APPLIES = private_name("torch.nn.Module._apply")
_Instead: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
_PLACE = "what is called instead"
_REPLACED: list[tuple[FunctionType, CodeType]] = []
"""Functions with the code that was there, while another is."""


class ModuleMethods(AbstractContextManager[None]):
    """A context in which others are called instead of methods of ``nn.Module``, again and again.

    ``instead`` returns what is called with the module, and with what a method is called with, by
    the method's name; it is given the method itself, and asked once as long as that stays the same.
    """

    def __init__(self, instead: Mapping[str, _Instead]) -> None:
        self._instead = instead
        self._codes: dict[str, tuple[FunctionType, CodeType, CodeType]] = {}
        """Functions, with their own code and what calls something else, by name."""
        self._standing: list[list[tuple[str, Any, Any]]] = []
        """What was there each time, by name, and its code; None where it is replaced itself."""

    def __enter__(self) -> None:
        standing: list[tuple[str, Any, Any]] = []
        self._standing.append(standing)
        for name, instead in self._instead.items():
            function: Any = getattr(nn.Module, name)
            known = self._codes.get(name)
            if known is None or known[0] is not function or known[1] is not function.__code__:
                known = _with_other_code(function, instead)
            if known is None:
                standing.append((name, function, None))
                setattr(nn.Module, name, instead(function))
                continue
            self._codes[name] = known
            standing.append((name, function, known[1]))
            _REPLACED.append(known[:2])
            # Whoever is in the midst of a call, on another thread, goes on in the code that he has.
            function.__code__ = known[2]

    def __exit__(self, *error: object) -> None:
        for name, function, code in reversed(self._standing.pop()):
            if code is None:
                setattr(nn.Module, name, function)
            else:
                _REPLACED.remove((function, code))
                function.__code__ = code


def module_calls(instead: _Instead, name: str = "__call__") -> AbstractContextManager[None]:
    """Have ``instead(original)`` called for every call of a module, or of another method of it."""
    return ModuleMethods({name: instead})


def _with_other_code(
    function: Any, instead: _Instead
) -> tuple[FunctionType, CodeType, CodeType] | None:
    """Return a function with its code and other code for it, None where it can have no other."""
    template = _template_of(function)
    if template is None:
        return None
    code = function.__code__
    about = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    original = FunctionType(code, *about)
    original.__kwdefaults__ = function.__kwdefaults__
    return function, code, _calling(template, instead(original))


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
