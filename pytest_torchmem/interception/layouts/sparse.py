"""Sparse tensors: COO, and the compressed CSR, CSC, BSR and BSC.

For COO tensors a record has a kernel put together from operators on indices and values. torch's
kernels for compressed ones are run as they are, while the operators that they call on indices and
values are intercepted; but for those that read the values, which have a kernel of their own in
``operators/sparse/compressed.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.sparse.parts import (
    COMPRESSED,
    compressed_indices,
    compressed_like,
    unsupported_layout,
)
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_compressed_kernel
from pytest_torchmem.torch_private.operators import has_compressed_kernel


def has_sparse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a sparse COO tensor is among the arguments of an operator."""
    return any(tensor.layout is torch.sparse_coo for tensor in argument_tensors((args, kwargs)))


def run_sparse(operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with a sparse tensor among its arguments; inner operators are intercepted.

    Raises ``UnsupportedOperatorError`` for one that is not known.
    """
    kernel = operator.cpu.sparse
    result = None if kernel is None else kernel(args, kwargs)
    if result is None:
        raise unsupported_layout(operator.overload, "its arguments are sparse tensors")
    return result


def has_compressed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a compressed sparse tensor is among the arguments of an operator, or asked
    for.
    """
    return kwargs.get("layout") in COMPRESSED or any(
        tensor.layout in COMPRESSED for tensor in argument_tensors((args, kwargs))
    )


def storage_holder(tensor: Tensor) -> Tensor:
    """Return the tensor whose storage tells where ``tensor`` is: the values of a compressed one."""
    return tensor.values() if tensor.layout in COMPRESSED else tensor


def without_entries(tensor: Tensor) -> Tensor:
    """Return a compressed tensor of the same shape, type and layout with no entry."""
    compressed, plain = compressed_indices(tensor)
    values = tensor.values()
    return compressed_like(
        tensor,
        torch.zeros(compressed.shape, dtype=compressed.dtype),
        torch.empty((*plain.shape[:-1], 0), dtype=plain.dtype),
        torch.empty((*plain.shape[:-1], 0, *values.shape[plain.dim() :]), dtype=values.dtype),
    )


def run_compressed(
    machine: Host | Gpu, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator that takes or makes compressed tensors; inner operators are intercepted.

    On a GPU the products are cuSPARSE's, whose workspace is unknown.

    Raises ``UnsupportedOperatorError`` for one whose kernel may read values and that has none in
    its record, and ``UnknownValueError`` where the values of a dense tensor decide how many entries
    there are.
    """
    on_device = operator.on("cuda" if isinstance(machine, Gpu) else "cpu")
    args = operator.with_numbers_as_tensors(args, "cpu")
    kernel = on_device.compressed
    if kernel is not None:
        if on_device.is_missing:
            raise NotImplementedError(
                f"Could not run '{operator.name}' with arguments from the 'SparseCsrCUDA' backend"
            )
        return kernel(args, kwargs, machine=machine)
    if not operator.shared.compressed_by_operators and has_compressed_kernel(operator.overload):
        raise unsupported_layout(operator.overload, "its arguments are compressed sparse tensors")
    return run_compressed_kernel(operator.overload, *args, **kwargs)
