"""The modules of a step by their paths, and other ways to call some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import nn

from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.torch_private.patching.module_calls import module_calls

Layers: TypeAlias = tuple[str, str]
"""Modules of one kind: their path with ``*`` for numbers, and the name of their class."""

Call: TypeAlias = Callable[[Callable[..., Any], nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called with torch's own ``Module.__call__``, a module, and what that is called with."""


class ModuleNames(threading.local):
    """The paths of modules below the outermost one that is called; ``""`` for that itself.

    A module that a checkpoint calls by itself later keeps the path that it had.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.depth = 0

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[str]:
        """Be in a call of a module, whose path is given."""
        if not self.depth and module not in self.known:
            for path, one in module.named_modules():
                self.known.setdefault(one, path)
        self.depth += 1
        try:
            yield self.known.get(module, "")
        finally:
            self.depth -= 1


@contextmanager
def every_call(how: Callable[[str, int], Call | None]) -> Iterator[None]:
    """Have calls of modules done by what ``how(path, depth)`` returns, unless that is ``None``.

    The outermost module has the path ``""`` and the depth 0.
    """
    names = ModuleNames()

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            with names.within(self) as path:
                other = how(path, names.depth - 1)
                if other is None:
                    return original(self, *args, **kwargs)
                return other(original, self, args, kwargs)

        return call

    with module_calls(instead):
        yield


def layers_of(path: str, module: nn.Module) -> Layers:
    """Return which layers a module is one of."""
    return fold(path)[0], type(module).__name__
