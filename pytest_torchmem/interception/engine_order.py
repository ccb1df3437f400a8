"""The order in which a GPU's thread of the autograd engine runs the nodes of a graph.

Of the nodes that are ready the engine runs the one of the largest sequence number (engine.cpp,
``CompareNodeTaskTime``), which each thread counts for itself (ATen/SequenceNumber.cpp). On a GPU a
backward runs on the engine's thread of that GPU, which counts the nodes that it makes with
``create_graph=True``; a trace's backward runs on the program's thread. So before a backward of such
a graph, each node gets the number that it would have had.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from pytest_torchmem.torch_private.tensors import (
    current_graph_task,
    place_node,
    run_engine,
    sequence_number,
)


class EngineOrder(threading.local):
    """Which nodes backwards on a GPU have made, and where the engine has them among the others."""

    def __init__(self) -> None:
        self._first = sequence_number()
        self._starts: list[int] = []
        """The first node of each backward that made any."""
        self._made = [0]
        """How many nodes the backwards had made before the first and after each."""
        self._creates = False
        """Whether any backward was asked for a graph of its own."""

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs the engine's ``run_backward``; one in a backward is a part of that."""
        if current_graph_task() != -1:
            return run

        def run_backward(*args: Any, **more: Any) -> Any:
            # tensors, gradients, keep_graph, create_graph (python_engine.cpp,
            # THPEngine_run_backward)
            roots = [one.grad_fn if isinstance(one, Tensor) else one.node for one in args[0]]
            if self._creates:
                self._order([one for one in roots if one is not None])
            self._creates = self._creates or bool(args[3])
            # Several roots get one of their own on the program's thread (Engine::execute).
            start = sequence_number() + (len(roots) > 1)
            return run_engine(partial(run, *args, **more), partial(self._note, start))

        return run_backward

    def _note(self, start: int) -> None:
        """Take note of the nodes from ``start`` on, which a backward has made."""
        end = sequence_number()
        if end > start:
            self._made.append(self._made[-1] + end - start)
            self._starts.append(start)

    def _order(self, roots: list[Any]) -> None:
        """Place the nodes that a backward from ``roots`` comes to."""
        seen, waiting = set(roots), roots
        while waiting:
            node = waiting.pop()
            place_node(node, self._place)
            new = {one for one, _ in node.next_functions if one is not None} - seen
            seen |= new
            waiting += new

    def _place(self, number: int) -> int:
        """Return the number that a node would have had, counted by the thread that makes it."""
        backward = bisect_right(self._starts, number)
        if backward == 0:
            return number
        made, before = self._made[backward], self._made[backward - 1]
        position = number - self._starts[backward - 1]
        return number - made if position >= made - before else self._first + before + position
