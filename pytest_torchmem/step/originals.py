"""A module of which a step has a copy, reached all the same: by a global variable, a registry.

A call of it is a call of its copy, whoever calls. What else is done with its parameters is refused:
it would count them twice, and their gradients would not be those that an optimizer steps on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import ReferenceType, ref

from torch import nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.step.modules import modules_by_path
from pytest_torchmem.torch_private.patching.module_calls import module_calls

_USED = (
    "the step uses {name} of the model itself, and it runs on a copy of the model: something that "
    "is not copied holds the model, such as a global variable or a registry. Check or trace a "
    "function that makes the model and runs the step"
)


CopiesById: TypeAlias = dict[int, ReferenceType[nn.Module]]
"""Copies of modules by the ids of the originals, weakly: a step may let go of one."""


def used(name: str, line: str = "") -> UsageError:
    """Return the error of a step that uses a parameter of the original."""
    return UsageError(f"{line}: {_USED.format(name=name)}" if line else _USED.format(name=name))


def copies_by_id(module: nn.Module, copied: Callable[[Any], Any]) -> CopiesById:
    """Return the copies of a module and of those in it."""
    pairs = ((one, copied(one)) for _, one in modules_by_path(module))
    return {
        id(one): ref(copy) for one, copy in pairs if isinstance(copy, nn.Module) and copy is not one
    }


def copy_of(module: nn.Module, copies: CopiesById) -> nn.Module | None:
    """Return the copy that is called instead of a module, if it has one that is there."""
    copy = copies.get(id(module))
    return None if copy is None else copy()


@contextmanager
def calls_of_copies(copies: CopiesById) -> Iterator[None]:
    """Have a copy called wherever its original is."""

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            copy = copy_of(self, copies)
            return original(self, *args, **kwargs) if copy is None else copy(*args, **kwargs)

        return call

    with module_calls(instead):
        yield


@contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Leave the parameters of an original the gradients that they have.

    Raises ``UsageError`` where one got another.
    """
    before = [(name, one, one.grad) for name, one in module.named_parameters()]
    try:
        yield
        changed = next((name for name, one, was in before if one.grad is not was), None)
        if changed is not None:
            raise used(changed)
    finally:
        for _, one, was in before:
            one.grad = was
