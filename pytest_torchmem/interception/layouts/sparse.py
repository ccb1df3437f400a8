"""Sparse tensors: gradients of ``nn.Embedding(sparse=True)`` and what optimizers do with them.

A sparse COO tensor has no storage of its own; it holds its indices and its values, which are hollow
tensors like all others. An operator on it is put together here from operators on those two, as its
CPU kernel does (aten/src/ATen/native/sparse/SparseTensor.cpp, SparseTensorMath.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.plan import unsupported_layout
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.tensors import sparse_indices, sparse_values, specified_elements

_METADATA = frozenset(
    {
        "aten::_coalesced_",
        "aten::_dimI",
        "aten::_dimV",
        "aten::_indices",
        "aten::_nnz",
        "aten::_values",
        "aten::alias",
        "aten::dense_dim",
        "aten::detach",
        "aten::is_coalesced",
        "aten::sparse_dim",
    }
)
_IN_PLACE_ON_VALUES = frozenset({"aten::mul_", "aten::div_", "aten::zero_", "aten::neg_"})
_ON_VALUES = frozenset({"aten::mul", "aten::div", "aten::neg", "aten::pow", "aten::sqrt"})


def has_sparse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a sparse COO tensor is among the arguments of an operator."""
    return any(tensor.layout is torch.sparse_coo for tensor in argument_tensors((args, kwargs)))


def reads_no_data(operator: OperatorSpec) -> bool:
    """Return whether torch's own kernel can run: it only takes a sparse tensor apart."""
    return operator.name.partition(".")[0] in _METADATA


def run_sparse(operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with a sparse tensor among its arguments; inner operators are intercepted.

    Raises ``UnsupportedOperatorError`` for one that is not known.
    """
    base = operator.name.partition(".")[0]
    first = args[0]
    if base in ("aten::clone", "aten::_to_copy"):
        dtype = kwargs.get("dtype") or first.dtype
        values = sparse_values(first)
        return _made_of(
            first,
            sparse_indices(first).clone(),
            values.clone() if dtype == values.dtype else values.to(dtype),
            first.is_coalesced(),
        )
    if base in ("aten::add", "aten::add_"):
        return _add(operator, base == "aten::add_", first, args[1])
    if base in _IN_PLACE_ON_VALUES:
        return first
    if base in _ON_VALUES and isinstance(first, Tensor) and not isinstance(args[-1], Tensor):
        return _made_of(
            first,
            sparse_indices(first).clone(),
            torch.empty_like(sparse_values(first)),
            first.is_coalesced(),
        )
    if base == "aten::_coalesce":
        return _coalesced(first)
    if base == "aten::sparse_mask" and first.layout is torch.strided:
        mask = args[1]
        values = sparse_values(mask)
        return _made_of(
            mask,
            sparse_indices(mask).clone(),
            values.new_empty(values.shape, dtype=first.dtype),
            mask.is_coalesced(),
        )
    if base in ("aten::_to_dense", "aten::to_dense"):
        return sparse_values(first).new_zeros(first.shape)
    raise unsupported_layout(operator.overload, "its arguments are sparse tensors")


def _add(operator: OperatorSpec, in_place: bool, left: Tensor, right: Tensor) -> Tensor:
    if left.layout is torch.strided:
        return left if in_place else torch.empty_like(left)
    if right.layout is torch.strided:
        raise unsupported_layout(operator.overload, "it adds a dense tensor to a sparse one")
    total = _made_of(
        left,
        torch.cat([sparse_indices(left), sparse_indices(right)], 1),
        torch.cat([sparse_values(left), sparse_values(right)], 0),
        False,
    )
    if not in_place:
        return total
    left.data = total
    return left


def _coalesced(tensor: Tensor) -> Tensor:
    """Return one entry for each distinct index, which the indices' values tell."""
    if tensor.is_coalesced() or specified_elements(tensor) < 2:
        return tensor
    distinct = torch.unique(sparse_indices(tensor), dim=1).shape[1]
    indices = sparse_indices(tensor).new_empty((tensor.sparse_dim(), distinct))
    values = sparse_values(tensor)
    return _made_of(tensor, indices, values.new_empty((distinct, *values.shape[1:])), True)


def _made_of(like: Tensor, indices: Tensor, values: Tensor, coalesced: bool) -> Tensor:
    make: Callable[..., Tensor] = torch.ops.aten._sparse_coo_tensor_unsafe.default
    return make(indices, values, like.shape, is_coalesced=coalesced)
