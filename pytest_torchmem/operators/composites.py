"""Composite operators that make numbers before they call anything with a tensor.

C++ makes them beside their first tensor, which it takes to be on the CPU: a path that changes
nothing tells the trace which device that is.

What a program or C++ asks of tensors: values, checks, and answers from geometry and settings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.registry import Kind, aten, operator


@operator(
    # native/Sorting.cpp, quantile and nanquantile: the quantile, and what follows from it.
    *aten("quantile.scalar quantile.scalar_out nanquantile.scalar nanquantile.scalar_out"),
    # native/LinearAlgebraUtils.h and native/LinearAlgebra.cpp, get_atol_rtol: tolerances.
    *aten("""
        linalg_matrix_rank linalg_matrix_rank.out linalg_matrix_rank.tol_tensor
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_tensor_out
        linalg_matrix_rank.out_tol_tensor linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_float_out linalg_pinv linalg_pinv.out linalg_pinv.rcond_tensor
        linalg_pinv.out_rcond_tensor linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_float_out
    """),
    # native/Itertools.cpp, native/TensorFactories.cpp (vander), native/PackedSequence.cpp, and
    # native/Dropout.cpp (make_feature_noise): results, and what they are picked by.
    *aten("""
        combinations feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_
        linalg_matrix_power linalg_vander pad_sequence vander
    """),
    # native/SpectralOps.cpp: windows.
    *aten("istft stft stft.center"),
    # native/quantized/FakeQuantPerTensorAffine.cpp: whether it is enabled.
    "aten::fake_quantize_per_tensor_affine.tensor_qparams",
).path("cuda")
def beside_first_tensor(call: CompositeCall) -> Any:
    """As on the CPU."""
    return call()


@operator("aten::one_hot").path("cuda")
def unchecked(call: CompositeCall, input: Tensor, num_classes: int = -1) -> Any:
    """Zeros, and ones scattered to them: only the CPU looks at the range; native/Onehot.cpp."""
    if not input.numel() or input.dtype is not torch.int64:
        return call()
    classes = int(input.max()) + 1 if num_classes == -1 else num_classes
    return input.new_zeros((*input.shape, classes)).scatter_(-1, input.unsqueeze(-1), 1)


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
