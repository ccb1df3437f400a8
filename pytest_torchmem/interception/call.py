"""One call of an operator, as it comes to the interceptor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pytest_torchmem.interception.ledger import DeviceLedger, StorageRecord
from pytest_torchmem.operators.spec import OperatorSpec


@dataclass(slots=True)
class Call:
    """An operator and what it is called with."""

    operator: OperatorSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    """The tensors among the arguments, in order."""
    records: list[StorageRecord]
    """What the ledger knows of their storages."""
    device: DeviceLedger | None = None
    """Where it runs."""
    node: int | None = None
    """The sequence number of the autograd node that called it in a backward, -1 for none there;
    None where that was not asked."""
    stands_in: bool = False
    """Whether the tensors only lie as those that are meant, whose storages ``records`` has."""

    @property
    def values(self) -> Callable[..., Any] | None:
        """What computes the outputs, where it is not the operator's kernel on the CPU."""
        return self.operator.values_on("cuda" if self.device is None else self.device.device.type)

    def may_overlap(self) -> bool:
        """Return whether what is written to may lie on the storage of another argument.

        A tensor that is given twice counts as another.
        """
        records = self.records
        if len(records) < 2:
            return False
        if self.operator.mutated == (0,):
            return id(records[0]) in map(id, records[1:])
        return len({*map(id, records)}) < len(records)
