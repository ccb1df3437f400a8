"""Where the autograd engine sums gradients in place.

``InputBuffer::accumulate`` (torch/csrc/autograd/input_buffer.cpp) adds a second gradient into the
first where nobody else holds it. It counts references to find out, and a tensor that Python has
held counts one more, so under a trace the engine always adds out of place. Such an addition is
recognised here, and the interceptor hands back the first gradient as the sum.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import StorageRecord
from pytest_torchmem.operators.geometry import is_dense
from pytest_torchmem.torch_private.tensors import (
    current_node,
    node_number,
    storage_address,
    storage_use_count,
    tensor_use_count,
)

SUM = "aten::add.Tensor"
"""The operator that the engine adds gradients up with, maybe in place."""


class References(NamedTuple):
    """Who holds a tensor: Python objects, the C++ side of it, and its storage."""

    python: int
    tensor: int
    storage: int

    @classmethod
    def to(cls, tensor: Tensor, python: int) -> "References":
        """Count them now; ``python`` is ``sys.getrefcount`` where the interceptor stands."""
        return cls(python, tensor_use_count(tensor), storage_use_count(storage_address(tensor)))


class GradientSums:
    """Tells the engine's own additions that it would do in place.

    ``alone`` is what ``References`` gives for a gradient that nobody but the engine holds; it
    depends on the interpreter, so it is learned from a program where that is known to be so. While
    it is None, the first addition is only looked at.
    """

    def __init__(self, alone: References | None) -> None:
        self.alone = alone
        self.seen: References | None = None
        self._node_number = -1
        self._node_began = 0
        self.per_thread = {"_node_number": lambda: -1, "_node_began": lambda: 0}

    def operator_in_backward(self, booked: int) -> int:
        """Note which node is running, and how many storages had been booked when it began.

        Returns the node's sequence number, -1 where there is none.
        """
        node = current_node()
        number = node_number(node)
        if number != self._node_number:
            self._node_number = number
            self._node_began = booked
        return number

    def in_place(self, first: Tensor, second: Tensor, record: StorageRecord, python: int) -> bool:
        """Return whether the engine would really do ``first.add_(second)``.

        ``python`` is ``sys.getrefcount(first)`` where the interceptor stands.
        """
        if self.alone is None:
            self.seen = self.seen or References.to(first, python)
            return False
        if torch.is_grad_enabled() or python > self.alone.python:
            return False
        if first.shape != second.shape or not is_dense(first):
            return False
        held = References.to(first, python)
        if held.tensor > self.alone.tensor or held.storage > self.alone.storage:
            return False
        return self.is_sum(record)

    def is_sum(self, record: StorageRecord) -> bool:
        """Return whether what the engine adds to was there before the running node began."""
        return record.index <= self._node_began or _feeds_one_input_twice(current_node())


def _feeds_one_input_twice(node: Any) -> bool:
    """Return whether two of a node's gradients go to the same place, as those of ``y * y`` do."""
    targets = [edge for edge in node.next_functions if edge[0] is not None] if node else []
    return len(set(targets)) < len(targets)
