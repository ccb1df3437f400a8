"""Hollow tensors are made here, from plans, and booked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, dtype_name
from pytest_torchmem.interception.plan import Output, Plan, Same, Temporary
from pytest_torchmem.interception.values.policy import EMPTY, NO_MEMORIES, memory_for
from pytest_torchmem.operators.workspace import Buffer
from pytest_torchmem.profile.timeline import Allocation, Confidence, Kind, Origin, Phase
from pytest_torchmem.step.trees import replace_leaves
from pytest_torchmem.torch_private.tensors import (
    hollow_storage,
    in_engine_thread,
    storage_address,
    tensor_on,
)

_HOST = torch.device("cpu")
_tuple: Any = tuple.__new__
"""Makes a named tuple as its class does, without a call of Python for each storage."""
_ACTIVATION, _WORKSPACE = Kind.ACTIVATION, Kind.WORKSPACE
_EXACT = Confidence.EXACT
_KIND_OF_PHASE = {
    Phase.BASELINE: Kind.OTHER,
    Phase.FORWARD: Kind.ACTIVATION,
    Phase.BACKWARD: Kind.GRADIENT,
    Phase.BETWEEN: Kind.OTHER,
    Phase.OPTIMIZER: Kind.OPTIMIZER_STATE,
}


def make_outputs(
    ledger: Ledger,
    plan: Plan,
    tensors: list[Tensor],
    device: DeviceLedger,
    origin: Origin,
    memories: Mapping[int, Tensor] = NO_MEMORIES,
) -> Any:
    """Return what a plan says an operator returns, its new storages booked on ``device``.

    Those that a kernel makes on the host are booked there.
    ``tensors`` are the operator's tensor arguments in order, ``memories`` the real memory of new
    storages whose values are known, by slot.
    """
    outputs = plan.outputs
    if plan.makes_one:
        memory = memories.get(0) if memories else None
        return make_hollow(ledger, outputs, plan.slots[0], device, origin, _EXACT, memory)
    if type(outputs) is Same and outputs.grown is None and not plan.steps:
        return tensors[outputs.position]
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, Tensor] = {}

    def make(output: Output | Same) -> None:
        if isinstance(output, Same):
            tensor = tensors[output.position]
            if output.grown is not None:
                grow(ledger, tensor, output.grown, device, origin)
        else:
            slot, nbytes = output.slot, plan.slots[output.slot]
            if nbytes < 0:
                base = tensors[-1 - nbytes]
                tensor = output.on(base.untyped_storage(), int(base.storage_offset()))
            elif slot in storages:
                tensor = output.on(storages[slot])
            else:
                on = ledger.on(_HOST) if slot in plan.on_host else device
                sure, memory = plan.confidences.get(slot, _EXACT), memories.get(slot)
                tensor = make_hollow(ledger, output, nbytes, on, origin, sure, memory)
                storages[slot] = tensor.untyped_storage()
        made[id(output)] = tensor

    def tensor_of(output: Output | Same) -> Tensor:
        if id(output) not in made:
            make(output)
        return made[id(output)]

    if plan.steps:
        _follow(ledger, plan, device, origin, make)
    return replace_leaves(outputs, (Output, Same), tensor_of)


def _follow(
    ledger: Ledger,
    plan: Plan,
    device: DeviceLedger,
    origin: Origin,
    make: Callable[[Output | Same], None],
) -> None:
    """Write down a plan's requests in their order, and ``make`` its outputs."""
    temporaries: dict[int, int] = {}
    step: Any
    try:
        for step in plan.steps:
            kind = type(step)
            if kind is int:
                device.remove(temporaries.pop(-step))
            elif kind is Temporary:
                number, nbytes, shape, dtype, label, confidence = step
                entry = (nbytes, _WORKSPACE, origin, shape, dtype, label, confidence)
                temporaries[number] = device.add(_tuple(Allocation, entry))
            elif kind is Buffer:
                ledger.keep(step, in_engine_thread(), device, origin)
            else:
                make(step)
    finally:  # the device may have no memory for one of them
        for index in temporaries.values():
            device.remove(index)


def make_hollow(
    ledger: Ledger,
    output: Output,
    nbytes: int,
    device: DeviceLedger,
    origin: Origin,
    confidence: Confidence = _EXACT,
    memory: Tensor | None = None,
    taken: int | None = None,
) -> Tensor:
    """Return a new hollow tensor on a storage of ``nbytes`` bytes, which may show real ``memory``.

    Small integer and boolean ones always have some. ``taken``: the bytes of it that the allocator
    gave, if not all.
    """
    dtype, shape = output.dtype, output.shape
    phase, _, operator, _, recomputed = origin
    if memory is None and (not dtype.is_floating_point or operator == EMPTY):
        memory = memory_for(dtype, nbytes, operator)
    storage = hollow_storage(nbytes, memory)
    kind = _ACTIVATION if recomputed else _KIND_OF_PHASE[phase]
    if taken is None:
        taken = nbytes
    entry = _tuple(Allocation, (taken, kind, origin, shape, dtype_name(dtype), "", confidence))
    ledger.attach(storage, device.add(entry), device, True, memory)
    return tensor_on(storage, dtype, shape, output.stride, output.offset)


def grow(
    ledger: Ledger, tensor: Tensor, output: Output, device: DeviceLedger, origin: Origin
) -> None:
    """Give a tensor another geometry, and a larger storage where its own is too small."""
    last = sum(
        (size - 1) * stride for size, stride in zip(output.shape, output.stride, strict=True)
    )
    elements = 0 if 0 in output.shape else last + 1
    needed = (elements + int(tensor.storage_offset())) * tensor.element_size()
    storage = tensor.untyped_storage()
    if needed > storage.nbytes():
        record = ledger.records.get(storage_address(tensor))
        if record is not None and not record.hollow:  # a caller's, whose data are to stay
            ledger.outgrown.append((ref(tensor), tensor.detach().clone()))
        storage = make_hollow(ledger, output, needed, device, origin).untyped_storage()
    tensor.set_(storage, int(tensor.storage_offset()), output.shape, output.stride)
