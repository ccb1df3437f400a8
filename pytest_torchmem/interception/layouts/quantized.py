"""Quantized tensors: integers with a scale, which are real in a trace.

C++ gives no way to lay one on a storage without memory, and what operators make of one depends on
packed weights that only their kernels can read. So these operators are run by the CPU's kernels, on
known values. What they make is counted; what they take meanwhile is not known.
"""

from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.ledger import DeviceLedger, StorageRecord
from pytest_torchmem.interception.materialize import grow
from pytest_torchmem.interception.parts import Parts
from pytest_torchmem.interception.plan import Output
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.step.trees import argument_tensors, replace_tensors
from pytest_torchmem.torch_private.tensors import storage_address

_OBSERVES = "aten::_fused_moving_avg_obs_fq_helper"


def is_observed_first(operator: OperatorSpec, args: tuple[Any, ...]) -> bool:
    """Whether an operator makes quantized tensors, or the ranges of channels before it has any.

    ``fused_moving_avg_obs_fake_quant_cpu`` (quantized/cpu/fused_obs_fake_quant.cpp) resizes them.
    """
    if operator.name != _OBSERVES:
        return True
    per_channel = len(args) > 11 and args[11]  # C++ leaves out what is as by default
    return bool(per_channel and not args[3].numel())


class QuantizedTensors:
    """Runs the operators that take or make quantized tensors."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.are_there = False
        """Whether the program has made any: asked for every operator."""

    def among(self, tensors: list[Tensor]) -> bool:
        """Whether one of an operator's arguments is quantized."""
        return any(tensor.is_quantized for tensor in tensors)

    def run(self, call: Call, device: DeviceLedger, frame: FrameType) -> Any:
        """Run an operator on real values, and book what it makes.

        Raises ``UnknownValueError`` where an argument's values are not known.
        """
        values, conversion = self._parts.values, self._parts.conversion
        values.refuse_captured(call)
        given = [
            self._real(call, tensor, record)
            for tensor, record in zip(call.tensors, call.records, strict=True)
        ]
        arguments = dict(zip(map(id, given), call.tensors, strict=True))

        def booked(tensor: Tensor) -> Tensor:
            if id(tensor) in arguments:
                return arguments[id(tensor)]
            if not tensor.is_quantized:
                return conversion.lift(tensor, device.device, frame)
            self.are_there = True
            if storage_address(tensor) not in self._parts.ledger.records:  # no view of another
                conversion.meet(tensor, device.device, frame)
            return tensor

        result = replace_tensors(values.run(call, given), booked)
        written = {
            id(one) for one in argument_tensors(call.operator.written(call.args, call.kwargs))
        }
        for tensor, real in zip(call.tensors, given, strict=True):
            if id(tensor) in written and tensor.shape != real.shape:
                self._resize(call, tensor, real, device, frame)
        if argument_tensors(result):
            device.note(Workspace(unknown=(call.operator.name,)))
        return result

    def _resize(
        self, call: Call, tensor: Tensor, real: Tensor, device: DeviceLedger, frame: FrameType
    ) -> None:
        """Let an argument have the shape and the values that a kernel gave it."""
        parts = self._parts
        origin = parts.attribution.origin(parts.ledger.phase, call.operator.name, frame)
        grow(parts.ledger, tensor, Output.of(real), device, origin)
        parts.values.contents.remember(parts.ledger.records[storage_address(tensor)], real)

    def _real(self, call: Call, tensor: Tensor, record: StorageRecord) -> Tensor:
        if tensor.is_quantized:
            return tensor
        contents = self._parts.values.contents
        if contents.known(record) is not None:
            return contents.value(record, tensor)
        if tensor.numel():
            name = call.operator.name
            raise self._parts.values.unknown(f"{name} makes quantized tensors of unknown values")
        return torch.empty(tensor.shape, dtype=tensor.dtype)
