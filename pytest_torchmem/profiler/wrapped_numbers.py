"""Python numbers that C++ wraps in tensors, and how long the graph keeps them.

For ``x * 0.5`` torch makes a tensor of 8 bytes of the number (``PythonArgs::tensor_slow`` in
torch/csrc/utils/python_arg_parser.cpp). It dies with the call, unless the node of the graph saves
it, as ``MulBackward0`` does: then it lives until the node is released. The interceptor is handed
the number and never the tensor; when the next operator arrives the node stands, and shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.profiler.internals import (
    current_node,
    keeps_graph,
    sequence_number,
    storage_address,
)
from pytest_torchmem.profiler.ledger import DeviceLedger, Ledger
from pytest_torchmem.profiler.operators import Operator
from pytest_torchmem.profiler.profile import Kind, Origin

#: Operators in place whose node saves a number given to them (tools/autograd/derivatives.yaml).
#: On a view the node stands inside of a ``CopySlices``, which does not show it.
_SAVE_IN_PLACE = frozenset({"aten::mul_.Tensor", "aten::div_.Tensor", "aten::div_.Tensor_mode"})


class _Pending(NamedTuple):
    operator: str
    result: Tensor
    sequence: int
    """The sequence number of the node that was made for the operator."""
    names: tuple[str, ...]
    """Names of the arguments that were numbers."""
    indices: tuple[int, ...]
    device: DeviceLedger


def type_of(number: complex) -> torch.dtype:
    """Return the dtype of the tensor that a Python number is wrapped in."""
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.complex128 if isinstance(number, complex) else torch.float64


class WrappedNumbers:
    """Books the tensors that Python numbers are wrapped in, on the host."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pending: list[_Pending] = []
        self._hidden: dict[int, tuple[tuple[int, ...], DeviceLedger]] = {}
        """What nodes inside of a ``CopySlices`` have saved, by their sequence number."""
        self._leaving: int | None = None
        """The sequence number of a ``CopySlices`` that lets go of its node when it has run."""

    def book(
        self, args: Sequence[Any], positions: tuple[int, ...], device: DeviceLedger, origin: Origin
    ) -> tuple[int, ...]:
        """Write down the numbers at ``positions`` as just made; return their indices."""
        return tuple(
            self._ledger.reserve(type_of(args[position]).itemsize, device, Kind.OTHER, origin)
            for position in positions
        )

    def release(
        self,
        operator: Operator,
        positions: tuple[int, ...],
        indices: tuple[int, ...],
        device: DeviceLedger,
        recorded: Any,
    ) -> None:
        """Release the numbers of an operator that is done, unless its node has saved them.

        ``recorded`` is its result where autograd records it, else None. The result is held until
        the next operator, when its node stands; nothing is allocated before.
        """
        first = recorded[0] if type(recorded) in (tuple, list) and recorded else recorded
        if isinstance(first, Tensor):
            names = tuple(operator.argument_names[position] for position in positions)
            made = sequence_number() - 1
            self._pending.append(_Pending(operator.name, first, made, names, indices, device))
            return
        for index in indices:
            device.remove(index)

    def settle(self) -> None:
        """Give the numbers of the last operators the lifetime that they have."""
        while self._pending:
            pending = self._pending.pop()
            if pending.operator in _SAVE_IN_PLACE and pending.result._is_view():
                self._hidden[pending.sequence] = pending.indices, pending.device
            else:
                self._follow(pending)
        if self._leaving is not None:
            node = current_node()
            if node is None or node._sequence_nr() != self._leaving:
                indices, device = self._hidden.pop(self._leaving - 1)
                self._leaving = None
                for index in indices:
                    device.remove(index)

    def used_in_backward(self) -> None:
        """Note that the engine handed an operator the number that the running node has saved."""
        node = current_node()
        if node is None or keeps_graph():
            return
        # The node inside of a CopySlices is made right before it, and the engine names the outer.
        if node._sequence_nr() - 1 in self._hidden and node.name().endswith("CopySlices"):
            self._leaving = node._sequence_nr()

    def _follow(self, pending: _Pending) -> None:
        """Strike the numbers off when the node releases them; at once where it saved none."""
        node = pending.result.grad_fn
        for name, index in zip(pending.names, pending.indices, strict=True):
            saved = getattr(node, f"_saved_{name}", None)
            if isinstance(saved, Tensor) and storage_address(saved) not in self._ledger.records:
                self._ledger.attach(saved.untyped_storage(), index, pending.device)
            else:
                pending.device.remove(index)
