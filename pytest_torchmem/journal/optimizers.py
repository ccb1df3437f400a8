"""Optimizers that a program brought with it keep no state of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer

from pytest_torchmem.torch_private.patching.module_calls import optimizer_steps_seen
from pytest_torchmem.torch_private.patching.patches import replaced


@contextmanager
def optimizers_kept(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Give optimizers that the program brought with it the state they came with.

    Otherwise the next trace, or a real step, would find tensors of a trace that is over. One that
    is gone keeps nothing alive here.
    """
    made: WeakSet[Optimizer] = WeakSet()
    before: WeakKeyDictionary[Optimizer, dict[Any, Any]] = WeakKeyDictionary()
    initialize, restore = Optimizer.__init__, Optimizer.__setstate__

    def noted(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        if on_thread():
            made.add(self)
        initialize(self, *args, **kwargs)

    def restored(self: Optimizer, state: dict[str, Any]) -> None:
        # Of a copy, or one out of a pickle; ``load_state_dict`` calls it of one that is there.
        if on_thread() and not vars(self):
            made.add(self)
        restore(self, state)

    def first_step(optimizer: Optimizer, *call: Any) -> None:
        if optimizer in before or optimizer in made or not on_thread():
            return
        state = {
            key: copy(value) if isinstance(value, dict) else value
            for key, value in optimizer.state.items()
        }
        before[optimizer] = state

    made_by = {"__init__": noted, "__setstate__": restored}
    try:
        with optimizer_steps_seen(first_step), replaced(Optimizer, **made_by):
            yield
    finally:
        for optimizer, state in before.items():
            optimizer.state.clear()
            optimizer.state.update(state)
