"""What a program or C++ asks of tensors: values, checks, and answers from geometry and settings."""

from __future__ import annotations

from pytest_torchmem.operators.registry import Kind, operator

operator("aten::_local_scalar_dense", kind=Kind.SCALAR)
# Asked by C++ composites; no data is read.
operator(
    "aten::_assert_tensor_metadata",
    "aten::_debug_has_internal_overlap",
    "aten::_has_same_storage_numel",
    "aten::_use_cudnn_ctc_loss",
    "aten::_version",
    "aten::is_pinned",
    "aten::is_same_size",
    "aten::sym_numel",
    "aten::sym_size.int",
    "aten::sym_storage_offset",
    "aten::sym_stride.int",
    kind=Kind.NATIVE,
)
# Their body asks something of data that decides nothing here.
operator("aten::_assert_async", "aten::_assert_async.msg", kind=Kind.PASS)
