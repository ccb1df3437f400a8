"""Operators whose kernels want dense arguments, and copy those that are not.

Mostly gradients: autograd hands kernels the expanded gradient of a sum, or one that was transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import (
    contiguous_copy,
    dense_bytes,
    suggested_format,
    transpose_scratch,
)
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

_OWN = -1
"""In the layout that the argument's own strides suggest: channels last stays so."""

_PLAIN = -2
"""Contiguous."""

_COPIED: dict[str, dict[int, int]] = {
    # native/SoftMax.cpp
    "_softmax": {0: _PLAIN},
    "_log_softmax": {0: _PLAIN},
    "_softmax_backward_data": {0: _PLAIN, 1: _PLAIN},
    "_log_softmax_backward_data": {0: _PLAIN, 1: _PLAIN},
    # native/Activation.cpp
    "log_sigmoid_forward": {0: _PLAIN},
    "log_sigmoid_backward": {1: _PLAIN},
    # native/AveragePool2d.cpp, AveragePool3d.cpp, AdaptiveAveragePooling.cpp
    "avg_pool2d": {0: _OWN},
    "avg_pool3d": {0: _PLAIN},
    "avg_pool3d_backward": {0: _PLAIN},
    "_adaptive_avg_pool2d": {0: _OWN},
    "_adaptive_avg_pool3d_backward": {0: _PLAIN},
    # native/DilatedMaxPool2d.cpp, DilatedMaxPool3d.cpp, AdaptiveMaxPooling2d.cpp and 3d
    "max_pool2d_with_indices": {0: _OWN},
    "max_pool3d_with_indices": {0: _OWN},
    "adaptive_max_pool2d": {0: _OWN},
    "adaptive_max_pool2d_backward": {0: 1, 2: 1},
    "adaptive_max_pool3d_backward": {0: _PLAIN},
    # native/FractionalMaxPool2d.cpp and 3d, MaxUnpooling.cpp
    "fractional_max_pool2d": {0: _PLAIN},
    "fractional_max_pool2d_backward": {0: _PLAIN},
    "fractional_max_pool3d": {0: _PLAIN},
    "fractional_max_pool3d_backward": {0: _PLAIN},
    "max_unpool2d": {0: _OWN, 1: 0},
    "max_unpool3d": {0: _PLAIN, 1: _PLAIN},
    # native/ReflectionPad.cpp, ReplicationPadding.cpp
    "reflection_pad1d": {0: _PLAIN},
    "reflection_pad2d": {0: _OWN},
    "replication_pad1d": {0: _PLAIN},
    "replication_pad2d": {0: _OWN},
    "reflection_pad1d_backward": {0: _PLAIN},
    "replication_pad1d_backward": {0: _PLAIN},
    # native/cpu/UpSampleKernel.cpp, UpSampleMoreKernel.cpp
    "upsample_nearest1d_backward": {0: _PLAIN},
    "_upsample_nearest_exact1d_backward": {0: _PLAIN},
    "upsample_linear1d_backward": {0: _PLAIN},
    "upsample_nearest2d_backward": {0: _OWN},
    "_upsample_nearest_exact2d_backward": {0: _OWN},
    "upsample_bilinear2d_backward": {0: _OWN},
    "upsample_bicubic2d_backward": {0: _PLAIN},
    "upsample_trilinear3d_backward": {0: _OWN},
    # native/GridSampler.cpp
    "grid_sampler_2d_backward": {0: _PLAIN},
    # native/PixelShuffle.cpp, ChanelShuffle.cpp
    "pixel_shuffle": {0: _OWN},
    "pixel_unshuffle": {0: _OWN},
    "channel_shuffle": {0: _OWN},
    # native/Distance.cpp, Embedding.cpp, TensorAdvancedIndexing.cpp, SegmentReduce.cpp
    "_cdist_forward": {0: _PLAIN, 1: _PLAIN},
    "_cdist_backward": {1: _PLAIN, 2: _PLAIN},
    "embedding_dense_backward": {0: _PLAIN, 1: _PLAIN},
    "masked_scatter_": {2: _PLAIN},
    "_segment_reduce_backward": {0: _PLAIN},
    "searchsorted": {0: _PLAIN, 1: _PLAIN},
}


_IN_LAYOUT_OF_GRADIENT: dict[str, tuple[int, ...]] = {
    "avg_pool2d_backward": (0,),
    "_adaptive_avg_pool2d_backward": (0,),
    "max_pool2d_with_indices_backward": (0, 7),
    "max_pool3d_with_indices_backward": (0, 7),
    "reflection_pad2d_backward": (0,),
    "reflection_pad3d_backward": (0,),
    "replication_pad2d_backward": (0,),
    "replication_pad3d_backward": (0,),
    "upsample_nearest3d_backward": (0,),
    "_upsample_nearest_exact3d_backward": (0,),
}
"""Backward kernels that work in the layout of the gradient they get, and copy back into the
output's where that is another.
"""


def dense_copy(tensor: Tensor, memory_format: torch.memory_format) -> int:
    """Bytes of a copy where one is needed, with the block that a transpose goes through."""
    copied = contiguous_copy(tensor, memory_format)
    if copied and memory_format == torch.contiguous_format:
        return copied + transpose_scratch(tensor)
    return copied


def _function(copied: Mapping[int, int]) -> Callable[..., int]:
    def copies(operands: list[Any]) -> int:
        total = 0
        for position, layout in copied.items():
            tensor = operands[position] if position < len(operands) else None
            if not isinstance(tensor, Tensor):
                continue
            memory_format = torch.contiguous_format
            like = tensor if layout == _OWN else operands[layout] if layout >= 0 else None
            if isinstance(like, Tensor) and like.dim() == tensor.dim():
                memory_format = suggested_format(like)
            total += dense_copy(tensor, memory_format)
        return total

    copies.__doc__ = "Dense copies of what is not; see the table."
    return copies


for _name, _positions in _COPIED.items():
    operator(f"aten::{_name}").workspace("cpu")(_function(_positions))


def _gradient_function(copied: tuple[int, ...]) -> Callable[..., int]:
    def copies(outputs: Tensor, operands: list[Any]) -> int:
        gradient = operands[0]
        if not isinstance(gradient, Tensor):
            return 0
        memory_format = suggested_format(gradient)
        tensors = [operands[position] for position in copied if position < len(operands)]
        return sum(
            contiguous_copy(tensor, memory_format)
            for tensor in (*tensors, outputs)
            if isinstance(tensor, Tensor)
        )

    copies.__doc__ = "Copies into the layout of the gradient; see the table."
    return copies


for _name, _tensors in _IN_LAYOUT_OF_GRADIENT.items():
    operator(f"aten::{_name}").workspace("cpu")(_gradient_function(_tensors))


@operator(
    "aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa_backward"
).workspace("cpu")
def upsample_antialias_backward(outputs: Tensor, grad_output: Tensor) -> int:
    """Plain copies of both sides; native/cpu/UpSampleKernel.cpp, cpu_upsample_genNd_backward_aa."""
    return contiguous_copy(grad_output) + contiguous_copy(outputs)


@operator("aten::reflection_pad3d", "aten::replication_pad3d").workspace("cpu")
def padding_of_volumes(outputs: Tensor, input: Tensor) -> int:
    """Volumes in their own layout, one alone contiguous; native/cpu/PaddingKernel.cpp."""
    if input.dim() == 5:
        return dense_copy(input, suggested_format(input))
    return contiguous_copy(input) + contiguous_copy(outputs)


@operator("aten::gelu_backward").workspace("cpu")
def gelu_backward(
    machine: Host, grad_output: Tensor, input: Tensor, *, approximate: str = "none"
) -> int:
    """A gradient that does not lie as the input does is reordered by oneDNN; native/Activation.cpp,
    gelu_backward_out_cpu and use_mkldnn, ideep's eltwise_backward.
    """
    onednn = machine.onednn and approximate == "none" and input.is_contiguous()
    if not onednn or input.numel() <= 1 or input.dtype not in (torch.float32, torch.bfloat16):
        return 0
    return contiguous_copy(grad_output)


@operator("aten::native_dropout").workspace("cpu")
def native_dropout(input: Tensor) -> int:
    """The mask as numbers, before it is boolean; native/Dropout.cpp, native_dropout_cpu."""
    return dense_bytes(input)


@operator("aten::clone").workspace("cpu")
def clone(outputs: Tensor, input: Tensor) -> int:
    """The block that a transposed matrix is copied through; native/Copy.cpp."""
    return transpose_scratch(input) if outputs.is_contiguous() else 0


@operator("aten::copy_").workspace("cpu")
def copy_in_place(input: Tensor, src: Tensor) -> int:
    """The block that a transposed matrix is copied through; native/Copy.cpp,
    copy_transpose_valid.
    """
    if input.dtype != src.dtype or input.shape != src.shape or not input.is_contiguous():
        return 0
    return transpose_scratch(src)
