"""What a program or C++ asks of tensors: values, checks, and answers from geometry and settings."""

from __future__ import annotations

from pytest_torchmem.operators.registry import Kind, aten, operator

operator("aten::_local_scalar_dense", kind=Kind.SCALAR)
# Asked by C++ composites; no data is read.
operator(
    *aten("""
        _assert_tensor_metadata _debug_has_internal_overlap _has_same_storage_numel
        _use_cudnn_ctc_loss _version is_pinned is_same_size is_set_to sym_numel sym_size.int
        sym_storage_offset sym_stride.int
    """),
    kind=Kind.NATIVE,
)
# They ask something of data, make nothing and raise where it is wrong.
operator(
    *aten("_assert_async _assert_async.msg _validate_compressed_sparse_indices"), kind=Kind.PASS
)
