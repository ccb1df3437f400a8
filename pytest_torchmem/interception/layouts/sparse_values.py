"""Values of sparse tensors: an operator run for real on real tensors of the same parts.

What runs an operator on sparse tensors in a trace does it for what it allocates, and need not
compute what the kernel computes.
"""

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.values.computed import laid_out_as
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.operators.sparse.coo import difference_on_gpu, sum_on_gpu, written_to_first
from pytest_torchmem.operators.sparse.parts import (
    COMPRESSED,
    compressed_indices,
    compressed_like,
    sparse_of,
)
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors, replace_tensors
from pytest_torchmem.torch_private.keys import at_kernels
from pytest_torchmem.torch_private.tensors import sparse_indices, sparse_values, storage_address

_CPU = torch.device("cpu")
_HALVES = (torch.float16, torch.bfloat16)
_NO_KERNEL = "not implemented for"
"""What the CPU says of a type that a kernel does not know (ATen/Dispatch.h)."""
#: Operators whose outputs have other entries on a GPU.
_OTHERS_ON_GPU = {
    "aten::add.Tensor": sum_on_gpu,
    "aten::add_.Tensor": written_to_first(sum_on_gpu),
    "aten::sub.Tensor": difference_on_gpu,
    "aten::sub_.Tensor": written_to_first(difference_on_gpu),
}


class SparseValues:
    """Computes what operators on sparse tensors return, as far as values are computed at all."""

    def __init__(self, ledger: Ledger, values: KnownValues) -> None:
        self._ledger = ledger
        self._values = values

    def compute(self, operator: OperatorSpec, args: Any, kwargs: Any, *, on_gpu: bool) -> Any:
        """Return the operator's real outputs and its real arguments, ``None`` if they are unknown.

        Runs while nothing is intercepted.
        """
        if not self._values.mode.computes or operator.opaque:
            return None
        written = {id(one) for one in argument_tensors(operator.written(args, kwargs))}
        unknown: list[Tensor] = []

        def twin(tensor: Tensor) -> Tensor:
            parts = [self._real(part, id(tensor) in written) for part in parts_of(tensor)]
            if any(part is None for part in parts):
                unknown.append(tensor)
                return tensor
            whole = put_together(tensor, parts)
            # ``_sparse_mm_reduce_impl`` asks whether there will be a backward.
            return whole.requires_grad_() if tensor.requires_grad else whole

        twins = replace_tensors((args, kwargs), twin)
        if unknown:
            return None
        given, named = twins
        given, named = operator.placed(given, named, _CPU)
        run = _OTHERS_ON_GPU.get(operator.name) if on_gpu else None
        try:
            with at_kernels():
                return (run or operator.overload)(*given, **named), twins
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            if not on_gpu or _NO_KERNEL not in str(error):
                return None
        try:  # what the CPU has no kernel for in half precision, in single
            with at_kernels():
                given, named = twins = replace_tensors(twins, _in_single)
                given, named = operator.placed(given, named, _CPU)
                return (run or operator.overload)(*given, **named), twins
        except (RuntimeError, NotImplementedError, ValueError, TypeError):
            return None

    def keep(self, operator: OperatorSpec, args: Any, kwargs: Any, result: Any, real: Any) -> None:
        """Keep what was computed as the values of ``result`` and of what was written to."""
        given = {
            storage_address(part)
            for tensor in argument_tensors((args, kwargs))
            for part in parts_of(tensor)
            if part.device.type != "meta"
        }
        if not self._values.mode.computes:
            self._forget_numbers(argument_tensors(result), given)
            return
        outputs, twins = (None, (None, None)) if real is None else real
        self._know(argument_tensors(result), argument_tensors(outputs), given)
        written = argument_tensors(operator.written(args, kwargs))
        if written:
            of_twins = argument_tensors(operator.written(*twins)) if real is not None else []
            self._know(written, of_twins, set())

    def _forget_numbers(self, tensors: list[Tensor], apart: set[int]) -> None:
        """Forget what memory held that a kernel has written to; indices decide shapes, and stay."""
        for tensor in tensors:
            for part in parts_of(tensor):
                record = self._record(part) if part.is_floating_point() else None
                if record is not None and record.address not in apart:
                    self._values.contents.assume(record, None)

    def _know(self, tensors: list[Tensor], values: list[Tensor], apart: set[int]) -> None:
        """Know tensors by real ones; forget those that there is none for, but for ``apart``."""
        alike = len(values) == len(tensors)
        for position, tensor in enumerate(tensors):
            parts = parts_of(tensor)
            real = parts_of(values[position]) if alike else ()
            for place, part in enumerate(parts):
                record = self._record(part)
                if record is None or record.address in apart:
                    continue
                value = real[place] if len(real) == len(parts) else None
                if value is not None and part.dtype in _HALVES:
                    value = value.to(part.dtype)
                if value is None or value.shape != part.shape or value.dtype != part.dtype:
                    self._values.contents.assume(record, None)
                else:
                    self._values.contents.remember(record, laid_out_as(part, value))

    def _real(self, part: Tensor, copied: bool) -> Tensor | None:
        """Return the real values of a part, of its own where it will be written to."""
        record = self._record(part)
        if record is None:
            return part.clone() if copied else part
        if self._values.contents.known(record) is None:
            return None if part.numel() else torch.empty(part.shape, dtype=part.dtype)
        value = self._values.contents.value(record, part)
        return value.clone() if copied else value

    def _record(self, part: Tensor) -> StorageRecord | None:
        return self._ledger.records.get(storage_address(part))


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return sparse_indices(tensor), sparse_values(tensor)
    if tensor.layout in COMPRESSED:
        return (*compressed_indices(tensor), tensor.values())
    return (tensor,)


def _in_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def put_together(tensor: Tensor, parts: list[Any]) -> Tensor:
    """Return a tensor like another of the strided tensors that it consists of."""
    if tensor.layout is torch.sparse_coo:
        return sparse_of(tensor.shape, parts[0], parts[1], tensor.is_coalesced())
    if tensor.layout in COMPRESSED:
        return compressed_like(tensor, *parts)
    whole: Tensor = parts[0]
    return whole
