"""Operators on tensors that are not strided, nested and sparse ones, and on quantized ones.

Nested and sparse tensors are made of strided ones, and what runs on those comes to the interceptor.

A nested tensor of the strided layout, which attention layers make of a padding mask, is a buffer,
which is a storage like all others, and three small tensors on the host: the sizes, strides and
offsets of its parts (aten/src/ATen/NestedTensorImpl.h). torch's own kernels for it are C++
functions that call operators on the buffer, so they are run as they are while those operators are
intercepted. Those that reach into the buffer's memory have a kernel in their record::

    @operator("aten::native_layer_norm").nested()
    def layer_norm(nested, input, normalized_shape, weight, bias, eps):
        '''native/nested/NestedTensorMath.cpp, nested_layer_norm.'''

``nested`` is the ``Layouts`` of the trace. Sizes have to be known: they decide every shape.

Quantized tensors, integers with a scale, are real in a trace. C++ gives no way to lay one on a
storage without memory, and what operators make of one depends on packed weights that only their
kernels can read. So these operators are run by the CPU's kernels, on known values. What they make
is counted; what they take meanwhile is not known.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception import placement, sparse
from pytest_torchmem.interception.decompose import Intercepts, Parts
from pytest_torchmem.interception.ledger import DeviceLedger, StorageRecord
from pytest_torchmem.interception.plan import Call, Output
from pytest_torchmem.interception.values.contents import LIMIT_NESTED
from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.registry import OperatorKind
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.step.trees import Args, Kwargs, argument_tensors, replace_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private import kernels, keys
from pytest_torchmem.torch_private.patches import having
from pytest_torchmem.torch_private.tensors import nowhere, storage_address

_NO_MEMORY = "its data is not allocated"
"""What ``TensorImpl::data_impl`` says (c10/core/TensorImpl.h) where storages lie at address 0."""


class Layouts:
    """Runs the operators that take or make such tensors, and makes nested tensors of hollow ones
    for them, while operators are intercepted.
    """

    def __init__(self, interceptor: Intercepts, parts: Parts) -> None:
        self._interceptor = interceptor
        self._target, self._ledger, self._values = parts.target, parts.ledger, parts.values
        self._placement = parts.placement
        self._sparse_values = sparse.SparseValues(parts.ledger, parts.values)

    def find(self, operator: OperatorSpec, args: Args, kwargs: Kwargs) -> Callable[..., Any] | None:
        """Return what runs an operator with these arguments, ``None`` where all are strided."""
        is_nested = any(tensor.is_nested for tensor in argument_tensors((args, kwargs)))
        if is_nested or operator.kind is OperatorKind.NESTED:
            return self.run_nested
        if operator.kind is OperatorKind.COMPRESSED or sparse.has_compressed(args, kwargs):
            return self.run_compressed
        return None

    def run_nested(self, operator: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        where = having(self._placement, nested=self.device_of(args, kwargs))
        with where, having(self._values, limit=LIMIT_NESTED), self._interceptor.intercepting():
            return self._run_nested(operator, args, kwargs)

    def run_sparse(self, operator: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        return self._run_parts(sparse.run_sparse, operator, args, kwargs)

    def run_compressed(self, operator: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        return self._run_parts(sparse.run_compressed, operator, args, kwargs)

    def _run_parts(
        self,
        run: Callable[..., tuple[Any, bool]],
        operator: OperatorSpec,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run an operator on the strided tensors that its sparse ones are made of."""
        device = self.device_of(args, kwargs)
        on_gpu = device.device.type == "cuda"
        real = self._sparse_values.compute(operator, args, kwargs, on_gpu=on_gpu)
        self._placement.last = device
        with self._interceptor.intercepting():
            machine = self._target.machine(device.device.type)
            result, is_whole = run(machine, self._sparse_values, operator, args, kwargs)
        self._sparse_values.keep(operator, args, kwargs, result, real)
        if not is_whole or (on_gpu and operator.record.asks_cusparse):
            device.note(Workspace(unknown=(operator.name,)))
        return result

    @property
    def host(self) -> Host:
        """The host that kernels for the CPU run on."""
        return self._target.host

    @property
    def gpu(self) -> Gpu:
        """The GPU that kernels for cuda run on."""
        assert self._target.gpu is not None
        return self._target.gpu

    def _run_nested(self, operator: OperatorSpec, args: Args, kwargs: Kwargs) -> Any:
        device = self.device_of(args, kwargs).device.type
        kernel = operator.on(device).nested
        if kernel is not None:
            call = GivenCall(args, kwargs, operator.overload)
            return kernel(args, kwargs, nested=self, call=call)
        cause = None
        pages = nowhere()
        if pages.touched():
            pages.forget()
        try:
            result = kernels.run_nested_kernel(operator.overload, *args, **kwargs)
            if not pages.touched():
                return result
            pages.forget()
        except RuntimeError as error:
            if _NO_MEMORY not in str(error):
                raise
            cause = error
        raise UnsupportedOperatorError(
            f"{operator.name} is not supported in a trace for nested tensors of the strided "
            "layout: its kernel reads their data. Use layout=torch.jagged, whose operators "
            "are made of ordinary ones"
        ) from cause

    def device_of(self, args: Args, kwargs: Kwargs) -> DeviceLedger:
        """Return where the first tensor among an operator's arguments is, also a compressed one."""
        for tensor in argument_tensors((args, kwargs)):
            record = self._ledger.records.get(storage_address(sparse.storage_holder(tensor)))
            if record is not None:
                return record.ledger
        return self._ledger.on(self._target.device)

    def wrap(self, buffer: Tensor, sizes: Tensor) -> Tensor:
        """Return the nested tensor of the parts that lie one behind the other in ``buffer``.

        ``sizes`` has a row for each part, and is kept; native/nested/NestedTensorUtils.h,
        ``wrap_buffer``; NestedTensorImpl.cpp, ``construct_offsets``, ``construct_nested_strides``.
        """
        rows: list[list[int]] = sizes.tolist()
        offsets = torch.empty((len(rows),), dtype=torch.int64)
        strides = sizes.new_empty(sizes.shape)
        self._write(offsets, [*accumulate(map(math.prod, rows), initial=0)][:-1])
        self._write(strides, [[math.prod(row[at + 1 :]) for at in range(len(row))] for row in rows])
        made: Tensor = torch.ops.aten._nested_view_from_buffer.default(
            buffer, sizes, strides, offsets
        )
        return made

    def table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the sizes of parts as the tensor that a nested one holds."""
        sizes = torch.empty((len(rows), len(rows[0])), dtype=torch.int64)
        self._write(sizes, rows)
        return sizes

    def launch(
        self, name: str, kernel: Callable[..., object], written: Tensor, *read: Tensor
    ) -> None:
        """Compute what a kernel writes to a new tensor, ``kernel(written, *read)`` on values."""
        tensors = [written, *read]
        with keys.outside_interception():
            if not self._values.compute_launch(
                name, tensors, written.numel(), lambda values: kernel(*values)
            ):
                self._values.forget([written])

    def with_last_size(self, sizes: Tensor, size: int) -> Tensor:
        """Return a copy of ``sizes`` with another last column."""
        changed = sizes.clone()
        changed.select(1, -1).fill_(size)
        return changed

    def _write(self, tensor: Tensor, values: Sequence[Any]) -> None:
        record = self._ledger.records.get(storage_address(tensor))
        if record is not None:
            self._values.contents.begin_writing(record)
        with keys.outside_interception():
            # Between traces what is on the host is real.
            known = tensor if record is None else self._values.contents.value(record, tensor)
            known.copy_(torch.tensor(values, dtype=torch.int64))


_OBSERVES = "aten::_fused_moving_avg_obs_fq_helper"


def is_observed_first(operator: OperatorSpec, args: Args) -> bool:
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

    def run(self, call: Call, device: DeviceLedger, frame: FrameType) -> Any:
        """Run an operator on real values, and book what it makes. Raises ``UnknownValueError``
        where an argument's values are not known.
        """
        values, conversion = self._parts.values, self._parts.conversion
        values.refuse_captured(call)
        given = [self._real(call, tensor, record) for tensor, record in call.pairs()]
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
        written = call.written()
        for tensor, real in zip(call.tensors, given, strict=True):
            if id(tensor) in written and tensor.shape != real.shape:
                # an argument has the shape and the values that the kernel gave it
                parts = self._parts
                origin = parts.attribution.origin(parts.ledger.phase, call.operator.name, frame)
                placement.grow(parts.ledger, tensor, Output.of(real), device, origin)
                parts.values.contents.remember(parts.ledger.records[storage_address(tensor)], real)
        if argument_tensors(result):
            device.note(Workspace(unknown=(call.operator.name,)))
        return result

    def _real(self, call: Call, tensor: Tensor, record: StorageRecord) -> Tensor:
        if tensor.is_quantized:
            return tensor
        known = self._parts.values.contents.find(record, tensor)
        if known is not None:
            return known
        if tensor.numel():
            name = call.operator.name
            raise self._parts.values.unknown(f"{name} makes quantized tensors of unknown values")
        return torch.empty(tensor.shape, dtype=tensor.dtype)
