"""Methods of ``nn.Module`` replaced, and registrations and steps seen, without what that costs.

To set ``__call__`` or ``__delattr__`` of a class, Python goes through all of its subclasses, of
which ``nn.Module`` has thousands (Objects/typeobject.c, ``update_subclasses``). The function that
is there gets other code instead: for all who hold it, as others would look it up.

Registrations in modules and steps of optimizers are seen without a hook. Torch calls the global
hooks while it goes through their table (torch/nn/modules/module.py, ``register_parameter``;
torch/optim/optimizer.py, ``profile_hook_step``): a hook that is added or removed on one thread
raises on another that registers a parameter, or steps, at that moment.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer

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


def _with_other_code(
    function: Any, instead: _Instead
) -> tuple[FunctionType, CodeType, CodeType] | None:
    """Return a function with its code and other code for it, None where it can have no other: that
    has to name the same variables around it (``super()`` names the class).
    """
    if type(function) is not FunctionType:
        return None
    code, templates = function.__code__, (_call.__code__, _Method.call.__code__)
    template = next((one for one in templates if one.co_freevars == code.co_freevars), None)
    if template is None:
        return None
    about = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    original = FunctionType(code, *about)
    original.__kwdefaults__ = function.__kwdefaults__
    call = instead(original)  # one of the constants: the function has no other names
    constants = (call if one == _PLACE else one for one in template.co_consts)
    return function, code, template.replace(co_consts=tuple(constants))


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


_PARAMETERS = private_name("torch.nn.modules.module._global_parameter_registration_hooks")
_CHILDREN = private_name("torch.nn.modules.module._global_module_registration_hooks")
_BEFORE_STEP = private_name("torch.optim.optimizer._global_optimizer_pre_hooks")
_AFTER_STEP = private_name("torch.optim.optimizer._global_optimizer_post_hooks")
_Hook = Callable[..., Any]


class Hooks(OrderedDict[int, _Hook]):
    """The hooks of another table, one more, and those that are registered meanwhile."""

    def __init__(self, before: Mapping[int, _Hook], own: _Hook) -> None:
        super().__init__()
        self._before, self._own = before, own

    def values(self) -> Any:
        """Return a copy of all, which nobody changes while it is gone through."""
        return [*self._before.values(), self._own, *super().values()]

    def own(self) -> Iterator[_Hook]:
        """Yield those that stand here beside what the program registers."""
        if isinstance(self._before, Hooks):
            yield from self._before.own()
        yield self._own


def registration_tables(parameter: _Hook, child: _Hook) -> tuple[Any, dict[str, Hooks]]:
    """Return what calls ``parameter`` and ``child`` with each that is registered, the module and
    its name: one of ``Replacements``.
    """
    hooks = {_PARAMETERS: parameter, _CHILDREN: child}
    return _module, {name: Hooks(getattr(_module, name), own) for name, own in hooks.items()}


def step_tables(before: _Hook, after: _Hook | None = None) -> tuple[Any, dict[str, Hooks]]:
    """Return what calls ``before`` and ``after`` with each optimizer that steps, and what it is
    given: one of ``Replacements``.
    """
    hooks = {_BEFORE_STEP: before} | ({_AFTER_STEP: after} if after is not None else {})
    return _optimizer, {name: Hooks(getattr(_optimizer, name), own) for name, own in hooks.items()}


def own_step_hooks() -> list[_Hook]:
    """Return the functions of ``step_tables`` that are called now at each step."""
    tables = (getattr(_optimizer, name) for name in (_BEFORE_STEP, _AFTER_STEP))
    return [hook for table in tables if isinstance(table, Hooks) for hook in table.own()]


def step_wrapper() -> CodeType:
    """Return the code that calls a step's hooks and the step (``Optimizer.profile_hook_step``)."""
    wrapper: Any = _optimizer.Optimizer.profile_hook_step(step_wrapper)
    code: CodeType = wrapper.__code__
    return code
