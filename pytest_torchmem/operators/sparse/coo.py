"""Kernels for sparse COO tensors: gradients of ``nn.Embedding(sparse=True)`` and their optimizers.

Such a tensor has no storage of its own; it holds its indices and its values. An operator on it is
put together here from operators on those two, as its CPU kernel does
(native/sparse/SparseTensor.cpp, SparseTensorMath.cpp).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import Kind, aten, operator
from pytest_torchmem.operators.sparse.parts import unsupported_layout
from pytest_torchmem.torch_private.tensors import sparse_indices, sparse_values, specified_elements

_aten: Any = torch.ops.aten

# Torch's own kernel takes the tensor apart, and reads no data.
operator(
    *aten("""
        _coalesced_ _dimI _dimV _indices _nnz _values alias dense_dim detach is_coalesced
        sparse_dim
    """),
    sparse_metadata=True,
)
# Made of the indices and values that are given.
operator("aten::_sparse_coo_tensor_with_dims_and_tensors", kind=Kind.NATIVE)
operator("aten::_spdiags", not_on=frozenset({"cuda"}))


@operator("aten::clone", "aten::_to_copy").sparse()
def copied(input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copies of indices and values; copy_sparse_, clone_sparse."""
    values = sparse_values(input)
    converted = values.clone() if dtype in (None, values.dtype) else values.to(dtype)
    return _made_of(input, sparse_indices(input).clone(), converted, input.is_coalesced())


@operator("aten::mul", "aten::div", "aten::pow").sparse()
def by_number(operands: list[Any]) -> Tensor | None:
    """Values of their own, with the same indices; not modelled with another tensor."""
    first = operands[0]
    if not isinstance(first, Tensor) or isinstance(operands[-1], Tensor):
        return None
    indices, values = sparse_indices(first), sparse_values(first)
    return _made_of(first, indices.clone(), torch.empty_like(values), first.is_coalesced())


@operator("aten::div_", "aten::mul_", "aten::neg_", "aten::zero_").sparse()
def in_place(input: Tensor) -> Tensor:
    """Values are written where they are."""
    return input


@operator("aten::add").sparse()
def added(input: Tensor, other: Tensor) -> Tensor:
    """One tensor with the entries of both, or a dense one; add_out_sparse_cpu."""
    if input.layout is torch.strided:
        return torch.empty_like(input)
    return _joined(_aten.add.Tensor, input, other)


@operator("aten::add_").sparse()
def added_in_place(input: Tensor, other: Tensor) -> Tensor:
    """As ``added``, in place of the first."""
    if input.layout is not torch.strided:
        input.data = _joined(_aten.add_.Tensor, input, other)
    return input


def _joined(overload: Any, left: Tensor, right: Tensor) -> Tensor:
    if right.layout is torch.strided:
        raise unsupported_layout(overload, "it adds a dense tensor to a sparse one")
    indices = torch.cat([sparse_indices(left), sparse_indices(right)], 1)
    values = torch.cat([sparse_values(left), sparse_values(right)], 0)
    return _made_of(left, indices, values, False)


@operator("aten::_coalesce").sparse()
def coalesced(input: Tensor) -> Tensor:
    """One entry for each distinct index, which the indices' values tell; _coalesce_sparse_cpu."""
    if input.is_coalesced() or specified_elements(input) < 2:
        return input
    distinct = torch.unique(sparse_indices(input), dim=1).shape[1]
    indices = sparse_indices(input).new_empty((input.sparse_dim(), distinct))
    values = sparse_values(input)
    return _made_of(input, indices, values.new_empty((distinct, *values.shape[1:])), True)


@operator("aten::sparse_mask").sparse()
def masked(input: Tensor, mask: Tensor) -> Tensor | None:
    """The entries of a dense tensor where the mask has some; sparse_mask."""
    if input.layout is not torch.strided:
        return None
    values = sparse_values(mask)
    picked = values.new_empty(values.shape, dtype=input.dtype)
    return _made_of(mask, sparse_indices(mask).clone(), picked, mask.is_coalesced())


@operator("aten::_to_dense", "aten::to_dense").sparse()
def dense(input: Tensor) -> Tensor:
    """Zeros, and the entries added; sparse_to_dense."""
    return sparse_values(input).new_zeros(input.shape)


def _made_of(like: Tensor, indices: Tensor, values: Tensor, coalesced: bool) -> Tensor:
    made: Tensor = _aten._sparse_coo_tensor_unsafe.default(
        indices, values, like.shape, is_coalesced=coalesced
    )
    return made
