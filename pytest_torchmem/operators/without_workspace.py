"""Operators whose kernels take nothing beyond their outputs: exact.

An operator that is neither here nor has a workspace function, a decomposition or a body made of
others has an unknown workspace, on the CPU and on CUDA.

On CUDA pointwise kernels read their arguments where they lie and in the type they have
(native/cuda/CUDALoops.cuh, ``gpu_kernel_impl``); kernels on lists of tensors find the addresses in
the launch's own arguments (native/cuda/MultiTensorApply.cuh), as ``cat`` does
(native/cuda/Shape.cu, ``parallel_cat``). On the CPU they read them where they lie, and copy what is
not of the common type (native/TensorIterator.cpp, ``compute_types``). Those that convert have a
function (``elementwise.py``); the others take nothing where all tensors are of one type.

What stands here for the CPU was compared with its allocator, on torch's own samples and on calls of
single operators.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pytest_torchmem.operators.registry import DEVICES, find_record, operator
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, schema


def _table(devices: Iterable[str], names: str) -> frozenset[str]:
    """Have operators, and those in place that go with them, take nothing on ``devices``."""
    found = frozenset(names.split())
    operator(*(f"aten::{name}" for name in found), takes_nothing=frozenset(devices))
    return found


# TensorIterator's without its tag; native/Activation.cpp, Loss.cpp, GatedLinearUnit.cpp, Lerp.cpp
_ITERATED = _table(
    DEVICES,
    """
    elu_backward gelu glu glu_backward glu_jvp hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward
    mish mish_backward silu_backward sigmoid_backward softplus_backward softshrink_backward
    tanh_backward threshold_backward logit_backward mse_loss_backward smooth_l1_loss_backward
    huber_loss_backward _prelu_kernel _prelu_kernel_backward lerp linalg_cross complex polar
    """,
)
_table(
    ("cuda",),
    """
    gelu_backward log_sigmoid_forward log_sigmoid_backward binary_cross_entropy_backward
    rrelu_with_noise floor_divide rsub heaviside addcmul addcdiv _masked_scale
    """,
)
# native/quantized/FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp
_table(
    DEVICES,
    """
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    """,
)
# Each of its own type; native/TensorAdvancedIndexing.cpp, masked_fill_impl_cpu
_table(DEVICES, "masked_fill")

# Random numbers are made where they go; native/DistributionTemplates.h, native/Distributions.cpp
_table(
    DEVICES,
    """
    bernoulli binomial cauchy exponential geometric log_normal normal_ poisson random uniform
    _standard_gamma _standard_gamma_grad _dirichlet_grad
    """,
)
_table(
    ("cuda",),
    """
    normal rand_like randn_like randint_like _sample_dirichlet _fill_mem_eff_dropout_mask_
    _fused_dropout _philox_normal _philox_uniform
    """,
)

# One allocation, filled or copied to; native/TensorFactories.cpp, Copy.cpp, Fill.cpp
_table(
    DEVICES,
    """
    empty_like zeros_like ones_like full_like new_empty new_empty_strided new_full new_ones
    new_zeros arange linspace logspace range eye _to_copy fill zero set_ _unsafe_view flip
    """,
)
_table(
    ("cuda",),
    """
    clone copy resize _pack_padded_sequence_backward _pad_packed_sequence
    constant_pad_nd tril triu embedding view_copy select_copy slice_copy narrow_copy expand_copy
    permute_copy as_strided_scatter diagonal_scatter select_scatter slice_scatter select_backward
    slice_backward diagonal_backward diag_embed lift lift_fresh repeat alias_copy _conj_physical
    _cudnn_init_dropout_state _transform_bias_rescale_qkv _convert_indices_from_coo_to_csr
    _convert_indices_from_csr_to_coo
    """,
)
# native/cuda/Shape.cu; on the CPU parts of another type than the result are converted
_table(("cuda",), "cat stack")

# native/GridSampler.cpp, native/nested/NestedTensorBackward.cpp
_table(
    DEVICES,
    """
    grid_sampler_2d grid_sampler_3d grid_sampler_3d_backward put _jagged_to_padded_dense_forward
    """,
)
_table(
    ("cuda",),
    """
    addr gather index_select index_fill_ take _pdist_forward native_dropout native_dropout_backward
    _thnn_fused_gru_cell _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    _weight_norm_interface _weight_norm_interface_backward
    grid_sampler_2d_backward upsample_bicubic2d upsample_linear1d upsample_trilinear3d
    value_selecting_reduction_backward channel_shuffle pixel_shuffle pixel_unshuffle
    replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    replication_pad3d replication_pad3d_backward _embedding_bag_per_sample_weights_backward
    reflection_pad3d_backward fractional_max_pool3d_backward
    """,
)

_table(
    ("cpu",),
    # native/AdaptiveAveragePooling3d.cpp, AdaptiveMaxPooling3d.cpp: images where they lie
    "_adaptive_avg_pool3d adaptive_max_pool3d "
    # native/ReduceOps.cpp: extremes and sums along a dimension, in the result's memory
    "_cummax_helper _cummin_helper _logcumsumexp std_mean var_mean norm hash_tensor trace "
    # native/cpu/SortingKernel.cpp, TensorCompareKernel.cpp: rows in vectors of C++
    "topk mode "
    # native/TensorAdvancedIndexing.cpp, native/cpu/IndexKernel.cpp
    "take index_copy index_fill nonzero "
    # native/BatchLinearAlgebra.cpp: factored in the output
    "linalg_cholesky_ex linalg_lu_factor_ex triangular_solve "
    # native/Distance.cpp, LossCTC.cpp, ChanelShuffle.cpp, native/sparse/SparseCsrTensorMath.cpp
    "_pdist_forward _pdist_backward _ctc_loss native_channel_shuffle "
    "_convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo",
)
# native/LinearAlgebra.cpp, addr: a product and a sum by TensorIterator
_ITERATED |= _table(("cpu",), "addr")

_LISTS = ("_foreach_", "_fused_ada", "_fused_sgd", "_amp_")
"""Kernels on lists of tensors; for the CPU native/FusedAdam.cpp, FusedSGD.cpp, FusedAdagrad.cpp and
AmpKernels.cpp."""

_MADE_OF_OTHERS = ("bartlett", "blackman", "hamming", "hann", "kaiser", "fft_", "randperm")
"""Factories that compute with temporaries (native/TensorFactories.cpp, SpectralOps.cpp)."""


def takes_nothing(overload: OpOverload, device: str) -> bool:
    """Return whether the kernel for a device is known to take nothing: of pointwise operators, of
    those named here, and of factories.

    On the CPU that holds for ``is_iterated`` operators where all tensors are of one type.
    """
    if torch.Tag.pointwise in overload.tags:
        return True
    namespace, _, rest = str(overload.name()).partition("::")
    if namespace not in ("aten", "prims"):
        record = find_record(str(overload.name()))
        return record is not None and device in record.takes_nothing
    name = rest.partition(".")[0]
    if any(_is_named(one, device) for one in (rest, name, name.removesuffix("_"))):
        return True
    if name.startswith(_LISTS):
        return True
    if not any("Tensor" in str(argument.type) for argument in schema(overload).arguments):
        return not name.startswith(_MADE_OF_OTHERS)
    return name.endswith("_") and _is_pointwise(name.removesuffix("_"))


def is_iterated(overload: OpOverload) -> bool:
    """Return whether the CPU's kernel copies tensors that are not of the common type."""
    name = schema(overload).name.removeprefix("aten::").removesuffix("_")
    if _is_named(name, "cpu"):
        return name in _ITERATED
    return torch.Tag.pointwise in overload.tags or _is_pointwise(name)


def _is_named(name: str, device: str) -> bool:
    record = find_record(f"aten::{name}")
    return record is not None and device in record.takes_nothing


def _is_pointwise(name: str) -> bool:
    """Whether the operator that one in place goes with is pointwise: only it has the tag."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
