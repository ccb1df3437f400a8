"""What a sparse tensor consists of, and the error for what a trace does not do with one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.torch_private.keys import OpOverload
from pytest_torchmem.torch_private.tensors import sparse_values

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_aten: Any = torch.ops.aten


def compressed_indices(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor's compressed indices (where rows or columns begin) and its plain ones."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def compressed_like(tensor: Tensor, compressed: Tensor, plain: Tensor, values: Tensor) -> Tensor:
    """Return a compressed tensor of the shape and layout of ``tensor``, of other parts."""
    made: Tensor = _aten._sparse_compressed_tensor_unsafe.default(
        compressed, plain, values, list(tensor.shape), dtype=values.dtype, layout=tensor.layout
    )
    return made


def sparse_of(
    shape: Sequence[int], indices: Tensor, values: Tensor, coalesced: bool | None
) -> Tensor:
    """Return the COO tensor of these parts."""
    made: Tensor = _aten._sparse_coo_tensor_unsafe.default(
        indices, values, list(shape), is_coalesced=coalesced
    )
    return made


def entries(tensor: Tensor) -> int:
    """Return how many numbers a sparse tensor has: all of a block that has any."""
    values = sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
    return values.numel()


def multiplied(first: Tensor, second: Tensor) -> int:
    """Return the floating-point operations of a product of a sparse and a dense matrix; 0 of two
    sparse ones, where it goes by which entries meet.
    """
    if second.layout is torch.strided:
        return 2 * entries(first) * second.shape[-1]
    return 2 * entries(second) * first.shape[-2] if first.layout is torch.strided else 0


def unsupported_layout(operator: OpOverload, reason: str) -> UnsupportedOperatorError:
    """Return the error for an operator on sparse tensors that a trace does not model."""
    return UnsupportedOperatorError(
        f"{operator.name()} is not supported in a trace: {reason}. Convert sparse tensors with "
        "to_dense(), or skip this call while tracing"
    )
