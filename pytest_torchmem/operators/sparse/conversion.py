"""Sparse tensors: what makes them of others."""

from __future__ import annotations

from pytest_torchmem.operators.registry import Kind, aten, operator

operator(
    *aten("""
        _sparse_compressed_tensor_unsafe _sparse_compressed_tensor_with_dims _to_sparse_bsc
        _to_sparse_bsr _to_sparse_csc _to_sparse_csr sparse_compressed_tensor.comp_plain_value
        sparse_compressed_tensor.comp_plain_value_size
    """),
    kind=Kind.COMPRESSED,
)
# Made of the indices and values that are given.
operator("aten::_sparse_coo_tensor_with_dims_and_tensors", kind=Kind.NATIVE)
# Torch has a kernel of it for the CPU alone.
operator("aten::_spdiags", not_on=frozenset({"cuda"}))
