"""The calls of operators, in order: for whom the events of the ledger are not enough.

Written down is what is at hand when an operator returns. Its floating-point operations are counted
when somebody asks, once for each plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.operators.work import CallWork
from pytest_torchmem.profile.operator_calls import GRAPH_NODE
from pytest_torchmem.profile.timeline import Origin
from pytest_torchmem.torch_private.tensors.tensors import current_node

_requires_grad = attrgetter("requires_grad")
_ledger, _index = attrgetter("ledger"), attrgetter("index")


class OperatorLog:
    """Writes down calls that no other operator made; what a body calls is its work."""

    def __init__(self, attribution: Attribution, ledger: Ledger) -> None:
        self._devices = ledger.devices
        self._attribution = attribution
        self._recorded: set[int] = set()
        """Numbers of the autograd nodes of calls that were written down."""
        self._bodies: list[list[CallWork]] = []
        """The work so far of the bodies that are running, the innermost last."""

    @contextmanager
    def body(self) -> Iterator[list[CallWork]]:
        """Collect the work of what an operator's body calls."""
        inner: list[CallWork] = []
        self._bodies.append(inner)
        try:
            yield inner
        finally:
            self._bodies.pop()

    def note(
        self,
        tensors: list[Tensor],
        records: list[StorageRecord],
        work: CallWork,
        device: DeviceLedger,
        origin: Origin,
        start: int,
    ) -> None:
        """Write down a call that returned, and before which there were ``start`` events."""
        if self._bodies:
            self._bodies[-1].append(work)
            return
        calls = device.calls
        if calls is None:
            return
        name, number = "", self._attribution.node_number
        if number < 0:
            if -number not in self._recorded:
                name = _name_of(current_node())
        elif torch.is_grad_enabled() and True in map(_requires_grad, tensors):
            self._recorded.add(number)
        else:
            number = 0
        if len(self._devices) > 1 and [*map(_ledger, records)].count(device) < len(records):
            records = [record for record in records if record.ledger is device]
        reads = tuple(map(_index, records))
        calls.append(
            (start, len(device.events), origin, number, name, reads, work, GRAPH_NODE.get())
        )


def _name_of(node: Any) -> str:
    return "" if node is None else str(node.name())
