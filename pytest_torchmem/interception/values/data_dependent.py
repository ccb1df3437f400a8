"""Operators whose outputs' shape depends on data: the data decides where it is known."""

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.plan import Call, Plan, plan_of_result
from pytest_torchmem.interception.plan_cache import find_plan
from pytest_torchmem.interception.values.assumptions import is_same
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.operators.checks import check_masks

INDICES = (torch.int64, torch.int32)
_CPU = torch.device("cpu")
_MASKS = (torch.bool, torch.uint8)


def plan_from_values(call: Call, values: KnownValues, device: str) -> tuple[Plan, Any]:
    """Return the plan of a call on ``device`` and its outputs with their values.

    Where a tensor that decides the shape has no known values, the plan is that of the outputs that
    an argument says, or of the largest if none will be known; they have no values: None. Raises
    ``UnknownValueError`` where nothing says how large these are.
    """
    contents, operator = values.contents, call.operator
    unknown = _what_is_unknown(call, values)
    if unknown:
        at_most = operator.on(device).at_most
        if at_most is None:
            raise values.unknown(unknown)

        def largest(*args: Any, **kwargs: Any) -> Any:
            outputs = at_most(args, kwargs)
            if outputs is None:
                raise values.unknown(unknown)
            return outputs

        plan = find_plan(operator, call.args, call.kwargs, call.tensors, largest)
        if not _size_given(call):
            values.keep_all(unknown)
        return plan, None
    inputs = [
        contents.value(record, tensor)
        if contents.known(record) is not None
        else torch.zeros(tensor.shape, dtype=tensor.dtype)  # only its geometry matters
        for tensor, record in zip(call.tensors, call.records, strict=True)
    ]
    real = values.run(call, inputs)
    storages = operator.on(device).storages
    if storages is not None:
        real = storages(call.args, call.kwargs, outputs=real)
    return plan_of_result(real, inputs), real


def _what_is_unknown(call: Call, values: KnownValues) -> str:
    """Return what is not known of the shape of a call's outputs, "" where all that decides it is.

    That is also where the program says how large they are at least.
    """
    name, record = call.operator.name, call.operator.record
    decided_by, says = record.decided_by, record.size_argument
    for position in range(len(call.tensors)) if decided_by is None else decided_by:
        known = values.contents.known(call.records[position])
        if known is not None or not call.tensors[position].numel():
            continue
        least = _size_given(call) if record.size_is_least else None
        if not least:
            hint = f", unless {says}= says it" if says else ""
            return f"{name} has an output shape that depends on unknown values{hint}"
        what = f"{name.removeprefix('aten::')} of unknown values"
        values.tell(what, f"assumed to be below {says}={least}")
    return ""


def _size_given(call: Call) -> int | None:
    """Return the argument that says how large the outputs are, where it is given."""
    operator = call.operator
    name = operator.record.size_argument
    if not name:
        return None
    place = operator.argument_names.index(name)
    return call.args[place] if place < len(call.args) else call.kwargs.get(name)


def fills_mask(call: Call) -> bool:
    """Return whether a number on the host is written where a mask is true: nothing is made;
    native/TensorAdvancedIndexing.cpp, ``canDispatchToMaskedFill``.
    """
    if not call.operator.mutated or True in call.args[3:4] or call.args[2].numel() != 1:
        return False
    places = {
        id(one): record.ledger.device
        for one, record in zip(call.tensors, call.records, strict=True)
    }
    given, value = call.args[0], places.get(id(call.args[2]))
    masks = [index for index in call.args[1] if index is not None]
    return (
        value == _CPU
        and len(masks) == 1
        and masks[0].dtype in _MASKS
        and places.get(id(masks[0])) == places.get(id(given))
    )


def _rows_written(call: Call, mask: Tensor) -> int:
    """Return how many rows a mask has, all that it can have but where what is written says less.

    That is broadcast to the shape of what is indexed, where a mask has one dimension
    (native/TensorAdvancedIndexing.cpp, ``index_put_``).
    """
    given, indices = call.args[0], call.args[1]
    if len(call.args) < 3 or sum(index is not None for index in indices) > 1:
        return int(mask.numel())
    behind = given.dim() - mask.dim() - [index is None for index in indices].index(False)
    written = call.args[2]
    rows = written.shape[written.dim() - behind - 1] if written.dim() > behind else 1
    return int(mask.numel() if rows == 1 else rows)


def equal_without_values(call: Call) -> bool | None:
    """Return what ``aten::equal`` gives where no values are needed for it, else None.

    native/ReduceOps.cpp, ``cpu_equal``, looks at sizes first, and at whether both are one tensor.
    Numbers stand here for tensors that C++ made of them (constants of a TorchScript graph).
    """
    first, second = call.args[:2]
    if not call.tensors:
        return bool(first == second)
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return None
    if first.shape != second.shape:
        return False
    return True if is_same(first, second) else None


def without_masks(call: Call, values: KnownValues) -> tuple[Any, ...] | None:
    """Return the arguments of an indexing with boolean masks made indices of known length.

    None where a mask is filled with a number, and where one value is written to every row of an
    unknown mask: how many there are decides nothing. What is written to the rows of a mask says
    otherwise how many they are, and of what is read all rows count as kept. Raises
    ``UnknownValueError`` where a later pass may know them.
    """
    contents = values.contents
    indices = call.args[1]
    if not any(index is not None and index.dtype in _MASKS for index in indices):
        return call.args
    check_masks(call.args[0], indices)
    if fills_mask(call):
        return None
    known = {id(tensor): record for tensor, record in zip(call.tensors, call.records, strict=True)}
    plain: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            plain.append(index)
            continue
        record = known[id(index)]
        unknown = contents.known(record) is None or values.is_captured(call)
        if unknown and call.operator.mutated and call.args[2].numel() == 1:
            return None
        values.refuse_captured(call)
        if contents.known(record) is not None:
            count = int(contents.value(record, index).count_nonzero())
        elif values.every_process_has_a_batch():
            count = index.numel()
        else:
            values.keep_all("a tensor is indexed with a mask of unknown values")
            count = _rows_written(call, index)
        plain.extend([torch.empty(count, dtype=torch.int64, device="meta")] * index.dim())
    return (call.args[0], plain, *call.args[2:])
