"""Optimizers that a program brought with it keep no state of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from pytest_torchmem.torch_private.patching.patches import replaced
from pytest_torchmem.torch_private.patching.registrations import optimizer_steps_seen


@contextmanager
def optimizers_kept(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Give optimizers that the program brought with it the state they came with.

    Otherwise the next trace, or a real step, would find tensors of a trace that is over.
    """
    made: WeakSet[Optimizer] = WeakSet()
    before: dict[int, tuple[Optimizer, dict[Any, Any]]] = {}
    initialize = Optimizer.__init__

    def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        if on_thread():
            made.add(self)
        initialize(self, *args, **kwargs)

    def first_step(optimizer: Optimizer, *call: Any) -> None:
        if id(optimizer) in before or optimizer in made or not on_thread():
            return
        state = {
            key: copy(value) if isinstance(value, dict) else value
            for key, value in optimizer.state.items()
        }
        before[id(optimizer)] = optimizer, state

    try:
        with optimizer_steps_seen(first_step), replaced(Optimizer, __init__=noted):
            yield
    finally:
        for optimizer, state in before.values():
            optimizer.state.clear()
            optimizer.state.update(state)
