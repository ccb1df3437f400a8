"""Operators whose CUDA kernels take nothing beyond their outputs: exact.

Pointwise kernels read their arguments where they lie and in the type they have
(native/cuda/CUDALoops.cuh, ``gpu_kernel_impl``); random numbers are made where they go
(native/cuda/DistributionTemplates.h); kernels on lists of tensors find the addresses in the
launch's own arguments (native/cuda/MultiTensorApply.cuh), as ``cat`` does (native/cuda/Shape.cu,
``parallel_cat``). An operator that is neither here nor has a function has an unknown workspace.
"""

from __future__ import annotations

import torch

from pytest_torchmem.torch_private.operators import OpOverload, schema

_PREFIXES = ("_foreach_", "_fused_ada", "_fused_sgd", "_amp_", "_philox_", "new_")
_POINTWISE_WITHOUT_TAG = """
    elu_backward gelu gelu_backward glu glu_backward glu_jvp glu_backward_jvp hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_forward log_sigmoid_backward mish mish_backward silu_backward sigmoid_backward
    softplus_backward softshrink_backward tanh_backward threshold_backward rrelu_with_noise
    logit_backward binary_cross_entropy_backward mse_loss_backward smooth_l1_loss_backward
    huber_loss_backward _prelu_kernel _prelu_kernel_backward _masked_scale masked_fill floor_divide
    rsub heaviside lerp addcmul addcdiv linalg_cross complex polar
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
"""
_RANDOM = """
    bernoulli binomial cauchy exponential geometric log_normal normal poisson random uniform
    rand_like randn_like randint_like
    _standard_gamma _standard_gamma_grad _dirichlet_grad _sample_dirichlet
    _fill_mem_eff_dropout_mask_
"""
_COPIES = """
    empty_like zeros_like ones_like full_like arange linspace logspace range eye
    cat stack _chunk_cat clone copy _to_copy fill zero set_ _unsafe_view resize
    _pack_padded_sequence_backward _pad_packed_sequence constant_pad_nd flip
    tril triu embedding view_copy select_copy slice_copy narrow_copy expand_copy
    permute_copy as_strided_scatter diagonal_scatter select_scatter slice_scatter select_backward
    slice_backward diagonal_backward diag_embed lift lift_fresh repeat alias_copy _conj_physical
    _cudnn_init_dropout_state _transform_bias_rescale_qkv _jagged_to_padded_dense_forward
"""
_KERNELS = """
    addr _pdist_forward upsample_bicubic2d upsample_linear1d upsample_trilinear3d
    _weight_norm_interface _weight_norm_interface_backward
    _thnn_fused_gru_cell _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    value_selecting_reduction_backward put channel_shuffle pixel_shuffle pixel_unshuffle
    replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    replication_pad3d replication_pad3d_backward _fused_dropout native_dropout
    native_dropout_backward
    _embedding_bag_per_sample_weights_backward
    gather index_select index_fill_ take
    grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward grid_sampler_3d_backward
"""
_NAMES = frozenset(f"{_POINTWISE_WITHOUT_TAG} {_RANDOM} {_COPIES} {_KERNELS}".split())


def takes_nothing(overload: OpOverload) -> bool:
    """Return whether an operator is known to take nothing: pointwise ones, and those named here."""
    if torch.Tag.pointwise in overload.tags:
        return True
    namespace, _, rest = str(overload.name()).partition("::")
    if namespace not in ("aten", "prims"):
        return False
    name = rest.partition(".")[0]
    if name in _NAMES or name.startswith(_PREFIXES):
        return True
    if not any("Tensor" in str(argument.type) for argument in schema(overload).arguments):
        return True  # a factory
    functional = name.removesuffix("_")
    return functional != name and (functional in _NAMES or _is_pointwise(functional))


def _is_pointwise(name: str) -> bool:
    """Whether the operator that one in place goes with is pointwise: only it has the tag."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)
