"""Seeing what is registered in modules, without changing a table that other threads go through.

Torch calls the global hooks of registrations while it goes through their table
(torch/nn/modules/module.py, ``register_parameter``): a hook that is added or removed on one thread
raises on another that registers a parameter at that moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as _module

from pytest_torchmem.torch_private.names import private_name
from pytest_torchmem.torch_private.patching.patches import replaced

_PARAMETERS = private_name("torch.nn.modules.module._global_parameter_registration_hooks")
_CHILDREN = private_name("torch.nn.modules.module._global_module_registration_hooks")
_Hook = Callable[[Any, str, Any], Any]
REGISTRATION_HOOKS: tuple[dict[int, _Hook], ...] = tuple(
    getattr(_module, name) for name in (_PARAMETERS, _CHILDREN) if hasattr(_module, name)
)
"""The tables that torch has, as they were when this was imported."""


class _Hooks(OrderedDict[int, _Hook]):
    """The hooks of another table, one more, and those that are registered meanwhile."""

    def __init__(self, before: Mapping[int, _Hook], own: _Hook) -> None:
        super().__init__()
        self._before, self._own = before, own

    def values(self) -> Any:
        """Return a copy of all, which nobody changes while it is gone through."""
        return [*self._before.values(), self._own, *super().values()]


@contextmanager
def registrations_seen(parameter: _Hook, child: _Hook) -> Iterator[None]:
    """Call ``parameter`` and ``child`` with each that is registered, the module and its name."""
    hooks = {_PARAMETERS: parameter, _CHILDREN: child}
    tables = {name: _Hooks(getattr(_module, name), own) for name, own in hooks.items()}
    with replaced(_module, **tables):
        yield
