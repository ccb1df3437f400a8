"""Where the autograd engine sums gradients in place.

``InputBuffer::accumulate`` (torch/csrc/autograd/input_buffer.cpp) adds a second gradient into the
first where nobody else holds it. It counts references to find out, and a tensor that Python has
held counts one more, so under a trace the engine always adds out of place. Such an addition is
recognised here, and the interceptor hands back the first gradient as the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.profiler.internals import (
    current_node,
    storage_address,
    storage_use_count,
    tensor_use_count,
)
from pytest_torchmem.profiler.ledger import Record

#: References to a tensor and its storage that a gradient has in ``in_place`` when the engine alone
#: holds it: the input buffer, the argument's stack slot and Python object; the storage's tensor
#: and the Python object that the ledger's weak reference keeps.
_TENSOR_FLOOR = 3
_STORAGE_FLOOR = 2


class GradientSums:
    """Tells the engine's own additions from those of a node's formula."""

    def __init__(self) -> None:
        self._node_number = -1
        self._node_began = 0

    def operator_in_backward(self, booked: int) -> None:
        """Note which node is running, and how many storages had been booked when it began."""
        node = current_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node_number:
            self._node_number = number
            self._node_began = booked

    def in_place(self, first: Tensor, second: Tensor, record: Record, references: int) -> bool:
        """Return whether the engine would really do ``first.add_(second)``.

        ``references`` is the number of Python references to ``first`` beyond the interceptor's own.
        """
        if torch.is_grad_enabled() or references > 0:
            return False
        if first.shape != second.shape or not _dense(first):
            return False
        if tensor_use_count(first) > _TENSOR_FLOOR:
            return False
        if storage_use_count(storage_address(first)) > _STORAGE_FLOOR:
            return False
        return record.index <= self._node_began or _feeds_one_input_twice(current_node())


def _dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    order = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in order:
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _feeds_one_input_twice(node: Any) -> bool:
    """Return whether two of a node's gradients go to the same place, as those of ``y * y`` do."""
    targets = [edge for edge in node.next_functions if edge[0] is not None] if node else []
    return len(set(targets)) < len(targets)
