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

from pytest_torchmem.profiler.internals import storage_address
from pytest_torchmem.profiler.ledger import DeviceLedger, Ledger
from pytest_torchmem.profiler.operators import Operator
from pytest_torchmem.profiler.profile import Kind, Origin


class _Pending(NamedTuple):
    result: Tensor
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
            self._pending.append(_Pending(first, names, indices, device))
            return
        for index in indices:
            device.remove(index)

    def settle(self) -> None:
        """Give the numbers of the last operators the lifetime that they have."""
        while self._pending:
            result, names, indices, device = self._pending.pop()
            node = result.grad_fn
            for name, index in zip(names, indices, strict=True):
                saved = getattr(node, f"_saved_{name}", None)
                if isinstance(saved, Tensor) and storage_address(saved) not in self._ledger.records:
                    self._ledger.attach(saved.untyped_storage(), index, device)
                else:
                    device.remove(index)
