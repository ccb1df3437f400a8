"""Sparse tensors: COO, and the compressed CSR, CSC, BSR and BSC.

torch's kernels for both are run as they are, while the operators that they call on indices and
values are intercepted; but for those that read data, which have a kernel of their own in
``operators/layouts.py``. Where a kernel for COO tensors is neither, and the indices are known, what
it returns is found by running it on real tensors of the same indices, and its workspace is unknown.

Such a run is for what it allocates, and need not compute what the kernel computes: values of sparse
tensors come of an operator run for real on real tensors of the same parts.
"""

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.values.computed import HALVES, laid_out_as, to_single
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.operators import layouts
from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import Args, Kwargs, argument_tensors, replace_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private import keys
from pytest_torchmem.torch_private.kernels import run_sparse_kernel
from pytest_torchmem.torch_private.tensors import sparse_indices, sparse_values, storage_address


def has_sparse(args: Args, kwargs: Kwargs) -> bool:
    return any(tensor.layout is torch.sparse_coo for tensor in argument_tensors((args, kwargs)))


def run_sparse(
    machine: Host | Gpu, known: "SparseValues", operator: OperatorSpec, args: Args, kwargs: Kwargs
) -> tuple[Any, bool]:
    """Run an operator with a sparse tensor among its arguments; inner operators are intercepted.

    Returns its result, and whether all that the kernel takes is known.

    Raises ``UnsupportedOperatorError`` for one whose kernel reads what is not known.
    """
    kernel = operator.on("cuda" if isinstance(machine, Gpu) else "cpu").sparse
    if kernel is not None:
        call = GivenCall(args, kwargs, operator.overload)
        result = kernel(args, kwargs, machine=machine, known=known, call=call)
        if result is not None:
            return result, True
    if operator.shared.sparse_by_operators:
        return run_sparse_kernel(keys.SPARSE_CPU, operator.overload, *args, **kwargs), True
    twins = _twins(known, operator, args, kwargs)
    if twins is None:
        raise layouts.unsupported_layout(operator.overload, "its arguments are sparse tensors")
    return _by_structure(known, operator, *twins), False


def _twins(
    known: "SparseValues", operator: OperatorSpec, args: Args, kwargs: Kwargs
) -> tuple[Any, Any, Tensor] | None:
    """Return the arguments with real tensors: indices as they are, all other values ones. None
    where indices are not known, or are written to. The third is a tensor on the device of the
    results.
    """
    if operator.mutated or operator.mutated_names:
        return None
    places: list[Tensor] = []
    unknown: list[Tensor] = []

    def twin(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            with keys.outside_interception():
                if tensor.dtype.is_floating_point or tensor.is_complex():
                    return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        *indices, values = strided_parts(tensor)
        if indices:
            places.append(values)
        parts = [*map(known.of, indices or [values])]
        if any(part is None for part in parts):
            unknown.append(tensor)
            return tensor
        with keys.outside_interception():
            if indices:
                ones = torch.ones((), dtype=values.dtype).expand(values.shape)
                parts.append(ones if tensor.layout is torch.sparse_coo else ones.contiguous())
            return put_together(tensor, parts)

    twins = replace_tensors((args, kwargs), twin)
    return None if unknown or not places else (*twins, places[0])


def _by_structure(
    known: "SparseValues", operator: OperatorSpec, args: Any, kwargs: Any, place: Tensor
) -> Any:
    """Run the kernel on twins, and make what it returns of tensors without memory."""
    with keys.outside_interception():
        real = operator.overload(*args, **kwargs)

    def hollow(tensor: Tensor) -> Tensor:
        if tensor.layout not in (torch.strided, torch.sparse_coo, *layouts.COMPRESSED):
            raise layouts.unsupported_layout(
                operator.overload, f"it makes tensors of {tensor.layout}"
            )
        parts = strided_parts(tensor)
        made = [place.new_empty(part.shape, dtype=part.dtype) for part in parts]
        for index, part in zip(made[:-1], parts[:-1], strict=True):  # whose values are known
            known.learn(index, part)
        return put_together(tensor, made)

    return replace_tensors(real, hollow)


def has_compressed(args: Args, kwargs: Kwargs) -> bool:
    """Return whether a compressed tensor is among an operator's arguments, or asked for."""
    return kwargs.get("layout") in layouts.COMPRESSED or any(
        tensor.layout in layouts.COMPRESSED for tensor in argument_tensors((args, kwargs))
    )


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that have the storages of ``tensor``: itself unless it is sparse."""
    return strided_parts(tensor) if tensor.layout is torch.sparse_coo else (storage_holder(tensor),)


def storage_holder(tensor: Tensor) -> Tensor:
    """Return the tensor whose storage tells where ``tensor`` is: the values of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return sparse_values(tensor)
    return tensor.values() if tensor.layout in layouts.COMPRESSED else tensor


def without_entries(tensor: Tensor) -> Tensor:
    """Return a sparse tensor of the same shape, type and layout with no entry."""
    if tensor.layout is torch.sparse_coo:
        dense = tensor.shape[tensor.sparse_dim() :]
        indices = torch.empty((tensor.sparse_dim(), 0), dtype=torch.int64)
        return layouts.sparse_of(
            tensor.shape, indices, torch.empty((0, *dense), dtype=tensor.dtype), True
        )
    compressed, plain = layouts.compressed_indices(tensor)
    values = tensor.values()
    return layouts.compressed_like(
        tensor,
        torch.zeros(compressed.shape, dtype=compressed.dtype),
        torch.empty((*plain.shape[:-1], 0), dtype=plain.dtype),
        torch.empty((*plain.shape[:-1], 0, *values.shape[plain.dim() :]), dtype=values.dtype),
    )


def run_compressed(
    machine: Host | Gpu, known: "SparseValues", operator: OperatorSpec, args: Args, kwargs: Kwargs
) -> tuple[Any, bool]:
    """Run an operator that takes or makes compressed tensors; inner operators are intercepted.

    Returns its result, and whether all that the kernel takes is known. On a GPU the products are
    cuSPARSE's, whose workspace is unknown. So is that of an operator whose kernel may read values
    and that has none in its record: what it returns is that of real tensors of the same indices.

    Raises ``UnsupportedOperatorError`` where these are not known either, and ``UnknownValueError``
    where the values of a dense tensor decide how many entries there are.
    """
    on_device = operator.on("cuda" if isinstance(machine, Gpu) else "cpu")
    args = operator.with_numbers_as_tensors(args, "cpu")
    kernel = on_device.compressed
    if kernel is not None and on_device.is_missing:
        raise NotImplementedError(
            f"Could not run '{operator.name}' with arguments from the 'SparseCsrCUDA' backend"
        )
    try:
        if kernel is not None:
            return kernel(args, kwargs, machine=machine), True
        own = keys.has_kernel(operator.overload.name(), keys.COMPRESSED_CPU)
        if own and not operator.shared.compressed_by_operators:
            raise layouts.unsupported_layout(
                operator.overload, "its arguments are compressed sparse tensors"
            )
        return run_sparse_kernel(keys.COMPRESSED_CPU, operator.overload, *args, **kwargs), True
    except UnsupportedOperatorError:
        twins = _twins(known, operator, args, kwargs)
        if twins is None:
            raise
    return _by_structure(known, operator, *twins), False


_CPU = torch.device("cpu")
_NO_KERNEL = "not implemented for"
"""What the CPU says of a type that a kernel does not know (ATen/Dispatch.h)."""
#: Operators whose outputs have other entries on a GPU.
_OTHERS_ON_GPU = {
    "aten::add.Tensor": layouts.sum_on_gpu,
    "aten::add_.Tensor": layouts.written_to_first(layouts.sum_on_gpu),
    "aten::sub.Tensor": layouts.difference_on_gpu,
    "aten::sub_.Tensor": layouts.written_to_first(layouts.difference_on_gpu),
}


class SparseValues:
    """Computes what operators on sparse tensors return, as far as values are computed at all."""

    def __init__(self, ledger: Ledger, values: KnownValues) -> None:
        self._ledger = ledger
        self._values = values

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor in real memory, or None where they are not known."""
        record = self._record(tensor)
        if record is None:
            return tensor
        with keys.outside_interception():
            return self._values.contents.find(record, tensor)

    def learn(self, tensor: Tensor, values: Tensor) -> None:
        record = self._ledger.records[storage_address(tensor)]
        with keys.outside_interception():
            # What was made empty is known as what happened to be there.
            self._values.contents.assume(record, None)
            self._values.take(tensor, values)

    def compute(self, operator: OperatorSpec, args: Any, kwargs: Any, *, on_gpu: bool) -> Any:
        """Return the operator's real outputs and its real arguments, ``None`` if they are unknown.
        Runs while nothing is intercepted.
        """
        if not self._values.mode.computes or operator.opaque:
            return None
        written = {id(one) for one in argument_tensors(operator.written(args, kwargs))}
        unknown: list[Tensor] = []

        def twin(tensor: Tensor) -> Tensor:
            parts = [self._real(part, id(tensor) in written) for part in strided_parts(tensor)]
            if any(part is None for part in parts):
                unknown.append(tensor)
                return tensor
            whole = put_together(tensor, parts)
            # ``_sparse_mm_reduce_impl`` asks whether there will be a backward.
            return whole.requires_grad_() if tensor.requires_grad else whole

        twins = replace_tensors((args, kwargs), twin)
        if unknown:
            return None
        run = (_OTHERS_ON_GPU.get(operator.name) if on_gpu else None) or operator.overload
        for in_single in (False, True):  # what the CPU has no kernel for in half precision
            try:
                with keys.at_kernels():
                    twins = replace_tensors(twins, to_single) if in_single else twins
                    given, named = operator.placed(twins[0], twins[1], _CPU)
                    return run(*given, **named), twins
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if not on_gpu or _NO_KERNEL not in str(error):
                    break
        return None

    def keep(self, operator: OperatorSpec, args: Any, kwargs: Any, result: Any, real: Any) -> None:
        """Keep what was computed as the values of ``result`` and of what was written to."""
        given = {
            storage_address(part)
            for tensor in argument_tensors((args, kwargs))
            for part in strided_parts(tensor)
            if part.device.type != "meta"
        }
        if not self._values.mode.computes:
            # What memory held that a kernel has written to is forgotten; indices decide shapes, and
            # stay.
            for tensor in argument_tensors(result):
                for part in strided_parts(tensor):
                    record = self._record(part) if part.is_floating_point() else None
                    if record is not None and record.address not in given:
                        self._values.contents.assume(record, None)
            return
        outputs, twins = (None, (None, None)) if real is None else real
        self._know(argument_tensors(result), argument_tensors(outputs), given)
        written = argument_tensors(operator.written(args, kwargs))
        if written:
            of_twins = argument_tensors(operator.written(*twins)) if real is not None else []
            self._know(written, of_twins, set())

    def _know(self, tensors: list[Tensor], values: list[Tensor], apart: set[int]) -> None:
        """Know tensors by real ones; forget those that there is none for, but for ``apart``."""
        alike = len(values) == len(tensors)
        for position, tensor in enumerate(tensors):
            parts = strided_parts(tensor)
            real = strided_parts(values[position]) if alike else ()
            for place, part in enumerate(parts):
                record = self._record(part)
                if record is None or record.address in apart:
                    continue
                value = real[place] if len(real) == len(parts) else None
                if value is not None and part.dtype in HALVES:
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
        value = self._values.contents.find(record, part)
        if value is None:
            return None if part.numel() else torch.empty(part.shape, dtype=part.dtype)
        return value.clone() if copied else value

    def _record(self, part: Tensor) -> StorageRecord | None:
        return self._ledger.records.get(storage_address(part))


def strided_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return sparse_indices(tensor), sparse_values(tensor)
    if tensor.layout in layouts.COMPRESSED:
        return (*layouts.compressed_indices(tensor), tensor.values())
    return (tensor,)


def put_together(tensor: Tensor, parts: list[Any]) -> Tensor:
    """Return a tensor like another of the strided tensors that it consists of."""
    if tensor.layout is torch.sparse_coo:
        return layouts.sparse_of(tensor.shape, parts[0], parts[1], tensor.is_coalesced())
    if tensor.layout in layouts.COMPRESSED:
        return layouts.compressed_like(tensor, *parts)
    whole: Tensor = parts[0]
    return whole
