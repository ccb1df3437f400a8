"""The operators of a CUDA graph: what its capture writes down, and each replay computes.

A capture runs no kernel. What it makes holds nothing yet, and what it writes to keeps its values,
until ``replay`` runs everything that was captured on the values that are there then. It does so on
the same addresses: intermediate tensors have their contents at every replay, although nothing in
the program holds them any more.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.plan import Call, Output, Plan
from pytest_torchmem.interception.values.computed import in_pairs
from pytest_torchmem.interception.values.contents import Contents
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin
from pytest_torchmem.step.trees import replace_tensors
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.tensors import read_as, storage_address

_NUMBERS = itertools.count(-1, -1)
_AT_EACH_CAPTURE = TORCH_VERSION < (2, 14)
"""Whether a graph has a seed and an offset also if it draws nothing."""


def not_permitted() -> Exception:
    """Return what CUDA raises where the host waits for what is captured."""
    message = "CUDA error: operation not permitted when stream is capturing"
    return torch.AcceleratorError(message)


class Captured:
    """A storage that a graph uses: the program's for as long as it lives, then the graph's own."""

    def __init__(self, record: StorageRecord) -> None:
        self.record = record
        self.address = next(_NUMBERS)
        """What its contents go by when the storage is gone."""
        self.memory: Tensor | None = None
        self.graphs = 0
        """How many graphs use it."""

    def forget(self, contents: Contents) -> None:
        """Keep nothing of what the storage held when it was gone."""
        self.memory = None
        contents.assume(self, None)


class _Step(NamedTuple):
    """An operator with stand-ins for its tensors, and the storages that these lie on."""

    call: Call
    plan: Plan
    storages: tuple[Captured, ...]
    made: tuple[tuple[int, Captured], ...]
    """The plan's new storages, by slot."""


class GraphRecording:
    """What one graph has captured; ``shared`` has the storages that all graphs use, by address."""

    def __init__(
        self,
        device: torch.device,
        captures: Callable[[int], bool],
        ledger: Ledger,
        shared: dict[int, Captured],
    ) -> None:
        self._device = ledger.on(device)
        self._captures = captures
        self._ledger = ledger
        self._shared = shared
        self._steps: list[_Step] = []
        self._storages: dict[int, Captured] = {}
        self._random: list[int] = []
        """The ledger's entries of what a replay draws random numbers by."""
        if _AT_EACH_CAPTURE:
            self._keep_random_state()

    def covers(self, call: Call) -> bool:
        """Return whether a call goes to a stream that is being captured."""
        here = call.device is self._device
        return (here and self._captures(self._device.stream)) or any(map(self.uses, call.records))

    def uses(self, record: StorageRecord) -> bool:
        """Return whether what is done with a storage now is captured."""
        return record.ledger is self._device and self._captures(self._device.stream)

    @property
    def length(self) -> int:
        """How many operators there are so far."""
        return len(self._steps)

    def cut(self, length: int) -> None:
        """Forget the operators from ``length`` on: those of another one's body."""
        del self._steps[length:]

    def note(self, call: Call, plan: Plan, result: Any) -> None:
        """Write down an operator, whose outputs are ``result``."""
        if not self._random and _draws(call):
            self._keep_random_state()
        stand_ins = {id(tensor): _stand_in(tensor) for tensor in call.tensors}
        args = replace_tensors(call.args, lambda tensor: stand_ins[id(tensor)])
        kwargs = replace_tensors(call.kwargs, lambda tensor: stand_ins[id(tensor)])
        tensors = [stand_ins[id(tensor)] for tensor in call.tensors]
        made = tuple(
            (output.slot, self._of(self._ledger.records[storage_address(tensor)]))
            for output, tensor in in_pairs(plan.outputs, result)
            if type(output) is Output and plan.slots[output.slot] >= 0
        )
        storages = tuple(map(self._of, call.records))
        again = Call(call.operator, args, kwargs, tensors, [], call.device, stands_in=True)
        self._steps.append(_Step(again, plan, storages, made))

    def _keep_random_state(self) -> None:
        """Book a seed and an offset, in ordinary memory of the default stream.

        native/cuda/CUDAGeneratorImpl.cpp, ``CUDAGeneratorCaptureState::initialize``. Torch 2.11 has
        them on the stream of the capture (``register_graph``).
        """
        device, origin = self._device, Origin(self._ledger.phase, "")
        label = "random state of a CUDA graph"
        entry = Allocation(8, Kind.OTHER, origin, (1,), "int64", label)
        stream = device.stream
        device.stream = stream if TORCH_VERSION < (2, 12) else 0
        try:
            self._random = [device.add(entry), device.add(entry)]
        finally:
            device.stream = stream

    def _of(self, record: StorageRecord) -> Captured:
        found = self._shared.get(record.address)
        if found is None or found.record is not record:
            found = self._shared[record.address] = Captured(record)
        if found.address not in self._storages:
            self._storages[found.address] = found
            found.graphs += 1
        return found

    def replay(
        self,
        contents: Contents,
        compute: Callable[[Call, Plan], Mapping[int, Tensor] | None],
        forget_written: Callable[[Call], None],
    ) -> None:
        """Run everything that was captured on the values that are there now."""
        for step in self._steps:
            call = step.call
            call.records = [self._now(storage) for storage in step.storages]
            memories = compute(call, step.plan)
            if memories is None:
                for _, storage in step.made:
                    contents.assume(self._now(storage), None)
                forget_written(call)
                continue
            for slot, storage in step.made:
                if slot in memories:
                    contents.remember(self._now(storage), memories[slot])
        for storage in self._storages.values():
            if storage.graphs == 1 and self._now(storage) is storage:
                storage.forget(contents)

    def drop(self, contents: Contents) -> None:
        """End: what only this graph uses is gone."""
        self._steps.clear()
        for index in self._random:
            self._device.remove(index)
        self._random.clear()
        for storage in self._storages.values():
            storage.graphs -= 1
            if not storage.graphs:
                storage.forget(contents)
                if self._shared.get(storage.record.address) is storage:
                    del self._shared[storage.record.address]
        self._storages.clear()

    def _now(self, storage: Captured) -> Any:
        """Return what the contents of a storage go by now."""
        alive = self._ledger.records.get(storage.record.address) is storage.record
        return storage.record if alive else storage


def _draws(call: Call) -> bool:
    """Return whether an operator draws random numbers: attention without dropout does not."""
    names = call.operator.argument_names
    if not call.operator.random:
        return False
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given = call.args[position] if len(call.args) > position else 0.0
    return bool(call.kwargs.get("dropout_p", given))


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor without data that lies on its storage as ``tensor`` does."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(elements, dtype=tensor.dtype, device="meta")
    made = whole.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return read_as(tensor, made)
