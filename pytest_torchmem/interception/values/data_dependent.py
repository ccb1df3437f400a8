"""Operators whose outputs' shape depends on data: the data decides where it is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.plan import Plan, plan_of_result
from pytest_torchmem.interception.values.assumptions import is_same
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.torch_private.storages import storage_address

_MASKS = (torch.bool, torch.uint8)


def plan_from_values(call: Call, values: KnownValues, device: str) -> tuple[Plan, Any]:
    """Return the plan of a call on ``device`` and its outputs with their values.

    Raises ``UnknownValueError`` where a tensor that decides the shape has no known values.
    """
    __tracebackhide__ = True
    contents = values.contents
    name = call.operator.name
    if name == "aten::bincount":
        return _bincount(call, values)
    decided_by = call.operator.record.decided_by
    for position in range(len(call.tensors)) if decided_by is None else decided_by:
        if contents.known(call.records[position]) is None and call.tensors[position].numel():
            raise values.unknown(f"{name} has an output shape that depends on unknown values")
    inputs = [
        contents.value(record, tensor)
        if contents.known(record) is not None
        else torch.zeros(tensor.shape, dtype=tensor.dtype)  # only its geometry matters
        for tensor, record in zip(call.tensors, call.records, strict=True)
    ]
    real = values.run(call, inputs)
    storages = call.operator.on(device).storages
    if storages is not None:
        real = storages(call.args, call.kwargs, outputs=real)
    return plan_of_result(real, inputs, storage_address), real


def _bincount(call: Call, values: KnownValues) -> tuple[Plan, Any]:
    """Return the plan of ``bincount``: there are as many bins as were asked for, or there are more.

    native/SummaryOps.cpp, ``_bincount_cpu_template``.
    """
    __tracebackhide__ = True
    contents = values.contents
    name = call.operator.name
    least = call.kwargs.get("minlength", call.args[2] if len(call.args) > 2 else 0)
    record, numbers = call.records[0], call.tensors[0]
    if contents.known(record) is None and numbers.numel():
        if not least:
            raise values.unknown(f"{name} has an output shape that depends on unknown values")
        values.guess(f"bincount of unknown values; they are assumed to be below minlength={least}")
    known = (
        torch.zeros_like(numbers)
        if contents.known(record) is None
        else contents.value(record, numbers)
    )
    others = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in call.tensors[1:]]
    inputs = [known, *others]
    for position, other in enumerate(call.records[1:], 1):
        if contents.known(other) is not None:
            inputs[position] = contents.value(other, call.tensors[position])
    real = values.run(call, inputs)
    return plan_of_result(real, inputs, storage_address), real


def equal_without_values(call: Call) -> bool | None:
    """Return what ``aten::equal`` gives where no values are needed for it, else None.

    native/ReduceOps.cpp, ``cpu_equal``, looks at sizes first, and at whether both are one tensor.
    """
    first, second = call.args[:2]
    if first.shape != second.shape:
        return False
    return True if is_same(first, second) else None


def without_masks(call: Call, values: KnownValues) -> tuple[Any, ...] | None:
    """Return the arguments of an indexing with boolean masks made indices of known length.

    None where one value is written to every row of an unknown mask: how many there are decides
    nothing. Raises ``UnknownValueError`` for every other unknown mask.
    """
    __tracebackhide__ = True
    contents = values.contents
    indices = call.args[1]
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return call.args
    known = {id(tensor): record for tensor, record in zip(call.tensors, call.records, strict=True)}
    plain: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            plain.append(index)
            continue
        record = known[id(index)]
        if contents.known(record) is None:
            if call.operator.mutated and call.args[2].numel() == 1:
                return None
            raise values.unknown("a tensor is indexed with a mask of unknown values")
        count = int(contents.value(record, index).count_nonzero())
        plain.extend([torch.empty(count, dtype=torch.int64, device="meta")] * index.dim())
    return (call.args[0], plain, *call.args[2:])
