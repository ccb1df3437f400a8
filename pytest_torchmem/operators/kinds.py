"""Operators whose kind does not follow from their schema, tags and kernels."""

from __future__ import annotations

from pytest_torchmem.operators.registry import Kind, operator
from pytest_torchmem.torch_private.version import TORCH_VERSION

operator("aten::_local_scalar_dense", kind=Kind.SCALAR)
operator("aten::lift_fresh", kind=Kind.LIFT)
operator("aten::resize_", kind=Kind.RESIZE)
operator(
    "aten::_sparse_compressed_tensor_unsafe",
    "aten::_sparse_compressed_tensor_with_dims",
    "aten::_to_sparse_bsc",
    "aten::_to_sparse_bsr",
    "aten::_to_sparse_csc",
    "aten::_to_sparse_csr",
    "aten::sparse_compressed_tensor.comp_plain_value",
    "aten::sparse_compressed_tensor.comp_plain_value_size",
    kind=Kind.COMPRESSED,
)
# Answers that depend on geometry and settings alone, asked by C++ composites; and the sparse tensor
# made of the indices and values that are given.
operator(
    "aten::is_same_size",
    "aten::_has_same_storage_numel",
    "aten::is_pinned",
    "aten::_debug_has_internal_overlap",
    "aten::_version",
    "aten::_use_cudnn_ctc_loss",
    "aten::_assert_tensor_metadata",
    "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "aten::sym_size.int",
    "aten::sym_stride.int",
    "aten::sym_numel",
    "aten::sym_storage_offset",
    kind=Kind.NATIVE,
)
# Their body asks something of data that decides nothing here.
operator("aten::_assert_async", "aten::_assert_async.msg", kind=Kind.PASS)
# Registered for every backend, and reading and writing data all the same.
operator(
    "aten::copy_",
    kind=Kind.LEAF,
)
# One allocation and one copy: as well from meta, and quicker.
operator(
    "aten::clone",
    "aten::_to_copy",
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::full_like",
    "aten::_unsafe_view",
    "aten::stack",
    kind=Kind.LEAF,
)
# Made of a power and a product up to torch 2.13, and then one kernel for every backend.
if TORCH_VERSION >= (2, 14):
    operator("aten::ldexp.Tensor", "aten::ldexp_", kind=Kind.LEAF)

# A copy's source.
operator(
    "aten::copy_",
    "aten::_to_copy",
    "aten::_foreach_copy_",
    "aten::set_.source_Tensor",
    across_devices=True,
)

# Operators that torch has a kernel of for the CPU and none for CUDA, without those that only the
# CPU's libraries and quantized tensors have (as a build with CUDA says of each,
# ``_dispatch_has_kernel_for_dispatch_key``).
operator("aten::_spdiags", not_on=frozenset({"cuda"}))

# The gradients of a trace count as finite, so ``GradScaler`` steps.
operator("aten::_amp_foreach_non_finite_check_and_unscale_", keeps_values=("found_inf",))
