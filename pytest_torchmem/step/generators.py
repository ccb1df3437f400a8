"""Random generators of a trace's own, where other threads draw from those of the process.

To seed these, and to put them back, would make such threads draw the same numbers again.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinMethodType, MethodType
from typing import Any

import torch

from pytest_torchmem.torch_private.patching.patches import replaced_all
from pytest_torchmem.torch_private.patching.replaceable import default_generator

_NUMPY = "numpy.random"


class _Own:
    """The generator of torch's that the running trace has for itself, if it has one."""

    torch: torch.Generator | None = None


def is_alone() -> bool:
    """Return whether no other thread of Python could be drawing random numbers."""
    return threading.active_count() == 1


def own_generator() -> torch.Generator | None:
    """Return what values of the running trace are drawn from; None for torch's default one."""
    return _Own.torch


def current_generator() -> torch.Generator:
    """Return what values of the running trace are drawn from."""
    return _Own.torch or torch.default_generator


@contextmanager
def drawing_from(state: torch.Tensor) -> Iterator[None]:
    """Have kernels that take no generator draw from a state on; they draw as before afterwards."""
    default = torch.default_generator  # C++'s own, whatever ``torch.random`` has
    before = default.get_state()
    default.set_state(state)
    try:
        yield
    finally:
        default.set_state(before)


@contextmanager
def own_generators(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Have torch's functions, ``random``'s and numpy's draw from generators of this trace's own
    where ``on_thread()`` is true.
    """
    made = torch.Generator()
    made.manual_seed(0)
    default: Any = default_generator.original
    with ExitStack() as stack:
        _Own.torch = made
        stack.callback(setattr, _Own, "torch", None)
        stack.enter_context(
            replaced_all([default_generator.by(_ByThread(default, made, on_thread))])
        )
        of_python = _functions_of(random, random.seed, random.Random(0), on_thread)
        stack.enter_context(replaced_all([(random, of_python)]))
        numpy: Any = sys.modules.get(_NUMPY)
        if numpy is not None:
            own = numpy.RandomState(0)
            of_numpy = _functions_of(numpy, numpy.random_sample, own, on_thread)
            for name, method in (("seed", own.seed), ("sample", own.random_sample)):
                of_numpy[name] = _by_thread(getattr(numpy, name), method, on_thread)
            stack.enter_context(replaced_all([(numpy, of_numpy)]))
        yield


class _ByThread:
    """``torch.random.default_generator``: the trace's own on its threads, else the process's."""

    def __init__(self, default: Any, own: Any, on_thread: Callable[[], bool]) -> None:
        self._default, self._own, self._on_thread = default, own, on_thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if self._on_thread() else self._default, name)


def _functions_of(
    module: Any, one: Any, own: Any, on_thread: Callable[[], bool]
) -> dict[str, Callable[..., Any]]:
    """Return functions for those of a module that are methods of one generator, as ``one`` is."""
    generator = one.__self__
    found = {}
    for name, function in vars(module).items():
        methods = isinstance(function, (MethodType, BuiltinMethodType))
        if methods and function.__self__ is generator and hasattr(own, name):
            found[name] = _by_thread(function, getattr(own, name), on_thread)
    return found


def _by_thread(
    of_process: Callable[..., Any], own: Callable[..., Any], on_thread: Callable[[], bool]
) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return (own if on_thread() else of_process)(*args, **kwargs)

    return function
