"""Seeing registrations in modules and steps of optimizers, without changing a table of hooks that
other threads go through.

Torch calls the global hooks while it goes through their table (torch/nn/modules/module.py,
``register_parameter``; torch/optim/optimizer.py, ``profile_hook_step``): a hook that is added or
removed on one thread raises on another that registers a parameter, or steps, at that moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer

from pytest_torchmem.torch_private.names import private_name
from pytest_torchmem.torch_private.patching.patches import replaced

_PARAMETERS = private_name("torch.nn.modules.module._global_parameter_registration_hooks")
_CHILDREN = private_name("torch.nn.modules.module._global_module_registration_hooks")
_BEFORE_STEP = private_name("torch.optim.optimizer._global_optimizer_pre_hooks")
_AFTER_STEP = private_name("torch.optim.optimizer._global_optimizer_post_hooks")
_Hook = Callable[..., Any]


def _tables(module: Any, *names: str) -> tuple[dict[int, _Hook], ...]:
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


REGISTRATION_HOOKS = _tables(_module, _PARAMETERS, _CHILDREN)
STEP_HOOKS = _tables(_optimizer, _BEFORE_STEP, _AFTER_STEP)
"""The tables that torch has, as they were when this was imported."""


class _Hooks(OrderedDict[int, _Hook]):
    """The hooks of another table, one more, and those that are registered meanwhile."""

    def __init__(self, before: Mapping[int, _Hook], own: _Hook) -> None:
        super().__init__()
        self._before, self._own = before, own

    def values(self) -> Any:
        """Return a copy of all, which nobody changes while it is gone through."""
        return [*self._before.values(), self._own, *super().values()]

    def own(self) -> Iterator[_Hook]:
        """Yield those that stand here beside what the program registers."""
        if isinstance(self._before, _Hooks):
            yield from self._before.own()
        yield self._own


@contextmanager
def registrations_seen(parameter: _Hook, child: _Hook) -> Iterator[None]:
    """Call ``parameter`` and ``child`` with each that is registered, the module and its name."""
    hooks = {_PARAMETERS: parameter, _CHILDREN: child}
    tables = {name: _Hooks(getattr(_module, name), own) for name, own in hooks.items()}
    with replaced(_module, **tables):
        yield


@contextmanager
def optimizer_steps_seen(before: _Hook, after: _Hook | None = None) -> Iterator[None]:
    """Call ``before`` and ``after`` with each optimizer that steps, and what it is given."""
    hooks = {_BEFORE_STEP: before} | ({_AFTER_STEP: after} if after is not None else {})
    tables = {name: _Hooks(getattr(_optimizer, name), own) for name, own in hooks.items()}
    with replaced(_optimizer, **tables):
        yield


def own_step_hooks() -> list[_Hook]:
    """Return the functions that ``optimizer_steps_seen`` now calls at each step."""
    tables = (getattr(_optimizer, name) for name in (_BEFORE_STEP, _AFTER_STEP))
    return [hook for table in tables if isinstance(table, _Hooks) for hook in table.own()]


def step_wrapper() -> CodeType:
    """Return the code that calls a step's hooks and the step (``Optimizer.profile_hook_step``)."""
    wrapper: Any = _optimizer.Optimizer.profile_hook_step(step_wrapper)
    code: CodeType = wrapper.__code__
    return code
