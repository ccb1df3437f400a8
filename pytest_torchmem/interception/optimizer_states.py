"""Optimizer state that no step of an optimizer made: what was loaded from a checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private.tensors.storages import storage_address
from pytest_torchmem.torch_private.tensors.tensors import is_wrapper, wrapped_tensors


class OptimizerStates:
    """Finds the state of optimizers that make a step."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._first: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Tensor]]
        self._first = weakref.WeakKeyDictionary()
        """The first tensor of an optimizer's state: another one where other state was loaded."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer that has made a step."""
        first = next(_tensors_of(optimizer), None)
        known = self._first.get(optimizer)
        if first is None or (known is not None and known() is first):
            return
        self._first[optimizer] = weakref.ref(first)
        for tensor in _tensors_of(optimizer):
            for address in _addresses(tensor):
                record = self._ledger.records.get(address)
                if record is not None:
                    record.ledger.note_state(record.index)


def _tensors_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return tensors_in(list(optimizer.state.values()))


def _addresses(tensor: Tensor) -> list[int]:
    """Return those of the storages of a tensor or of what it wraps; [] where it has none."""
    try:
        parts = wrapped_tensors(tensor) if is_wrapper(tensor) else [tensor]
        return [storage_address(part) for part in parts]
    except (NotImplementedError, RuntimeError):  # sparse
        return []
