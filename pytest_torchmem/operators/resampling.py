"""Interpolation, sampling, pooling, padding, and patches of images as columns: tables of points,
copies into a memory format.

Interpolation: native/cpu/UpSampleKernel.cpp, UpSampleMoreKernel.cpp and native/cuda/UpSample*.cu.

Pooling: native/AveragePool2d.cpp, AveragePool3d.cpp, AdaptiveAveragePooling.cpp,
DilatedMaxPool2d.cpp, DilatedMaxPool3d.cpp, AdaptiveMaxPooling2d.cpp and 3d, FractionalMaxPool2d.cpp
and 3d, MaxUnpooling.cpp; the files of these names in native/cuda.

Padding: native/ReflectionPad.cpp, ReplicationPadding.cpp and cpu/PaddingKernel.cpp keep the memory
format of the input, as native/PixelShuffle.cpp and ChanelShuffle.cpp do; native/cuda/
ReflectionPad.cu and ReplicationPadding.cu make contiguous outputs, and CUDA reshapes and permutes
to shuffle (``math_pixel_shuffle``, ``math_channel_shuffle``). native/Im2Col.cpp and Col2Im.cpp are
the same in cuda/*.cu.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall, GivenCall, meta_result
from pytest_torchmem.operators.registry import DEVICES, OperatorKind, aten, operator
from pytest_torchmem.operators.workspace import (
    ALL,
    CONTIGUOUS,
    LONG,
    SUGGESTED,
    Request,
    Wanted,
    contiguous_copy,
    copied,
    dense_copy,
    is_channels_last,
    like,
    made_like,
    shaped_by,
    suggested_format,
)

_aten: Any = torch.ops.aten

_LEAST_CHANNELS = 4
"""Of which CUDA's kernels for channels last take notice; 16 in the forward of bilinear ones."""

_nearest = "upsample_nearest{0} _upsample_nearest_exact{0}".format
_PADS = "reflection_pad2d reflection_pad3d replication_pad2d replication_pad3d"


def _copying(names: str, *devices: str, first: bool = False, **formats: Wanted) -> None:
    """Have kernels, of both devices if none is named, bring arguments into formats."""
    operator(names).workspace(*devices or DEVICES)(copied(first=first, **formats))


_copying("avg_pool2d max_pool2d_with_indices", self=SUGGESTED)
_copying("_adaptive_avg_pool2d", first=True, self=SUGGESTED)
_copying("avg_pool3d", self=CONTIGUOUS)
_copying("max_unpool3d", first=True, self=CONTIGUOUS, indices=CONTIGUOUS)
_copying(
    _nearest("1d_backward") + " upsample_linear1d_backward upsample_bicubic2d_backward "
    "avg_pool3d_backward adaptive_max_pool3d_backward _adaptive_avg_pool3d_backward",
    grad_output=CONTIGUOUS,
)
_copying("fractional_max_pool2d_backward", first=True, grad_output=CONTIGUOUS)
_copying(
    "max_pool3d_with_indices adaptive_max_pool2d reflection_pad2d replication_pad2d "
    "channel_shuffle pixel_shuffle pixel_unshuffle",
    "cpu",
    self=SUGGESTED,
)
_copying("max_unpool2d", "cpu", self=SUGGESTED, indices="self")
_copying(
    "fractional_max_pool2d fractional_max_pool3d reflection_pad1d replication_pad1d",
    "cpu",
    self=CONTIGUOUS,
)
_copying(
    _nearest("2d_backward") + " upsample_bilinear2d_backward upsample_trilinear3d_backward",
    "cpu",
    grad_output=SUGGESTED,
)
_copying(
    _nearest("3d_backward")
    + " avg_pool2d_backward _adaptive_avg_pool2d_backward "
    + " ".join(f"{name}_backward" for name in _PADS.split()),
    "cpu",
    grad_output=SUGGESTED,
    outputs="grad_output",
)
_copying(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward",
    "cpu",
    grad_output=SUGGESTED,
    indices="grad_output",
    outputs="grad_output",
)
_copying("adaptive_max_pool2d_backward", "cpu", grad_output="self", indices="self")
_copying(  # native/GridSampler.cpp
    "grid_sampler_2d_backward fractional_max_pool3d_backward reflection_pad1d_backward "
    "replication_pad1d_backward",
    "cpu",
    grad_output=CONTIGUOUS,
)
_AA_BACKWARD = "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"
# cpu_upsample_genNd_backward_aa
_copying(_AA_BACKWARD, "cpu", grad_output=CONTIGUOUS, outputs=CONTIGUOUS)
_copying(
    _nearest("1d") + " reflection_pad1d reflection_pad2d reflection_pad3d", "cuda", self=CONTIGUOUS
)
_copying("max_unpool2d", "cuda", self=CONTIGUOUS, indices=CONTIGUOUS)
_copying("cudnn_affine_grid_generator", "cuda", theta=CONTIGUOUS)
_copying("cudnn_affine_grid_generator_backward", "cuda", grad=CONTIGUOUS)
_copying(  # the gradient of padded volumes is read where it lies
    f"{_nearest('3d_backward')} {_AA_BACKWARD} reflection_pad1d_backward reflection_pad2d_backward",
    "cuda",
    grad_output=CONTIGUOUS,
)
_copying("avg_pool2d_backward", "cuda", self=SUGGESTED, grad_output="self")
_copying(
    "max_pool2d_with_indices_backward", "cuda", self=SUGGESTED, grad_output="self", indices="self"
)
# A result beside the one that was given is copied to where it belongs: UpSampleNearest3d.cu,
# upsample_nearest3d_out_cuda_template; UpSampleTrilinear3d.cu,
# upsample_trilinear3d_backward_out_cuda_template; UpSampleBilinear2d.cu,
# upsample_gen2d_aa_out_cuda_template.
_copying(
    _nearest("3d") + " _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    "cuda",
    outputs=CONTIGUOUS,
    self=CONTIGUOUS,
)
_copying("upsample_trilinear3d_backward", "cuda", grad_output=CONTIGUOUS, outputs=CONTIGUOUS)
_copying(
    "adaptive_max_pool2d_backward",
    "cuda",
    grad_output=CONTIGUOUS,
    indices=CONTIGUOUS,
    outputs=CONTIGUOUS,
)

# The CPU keeps the memory format of the input, and CUDA's outputs are contiguous.
for _name in f"max_unpool2d channel_shuffle pixel_shuffle pixel_unshuffle {_PADS}".split():
    _overload = getattr(_aten, _name).default
    operator(f"aten::{_name}").meta("cpu")(shaped_by(_overload, SUGGESTED))
    operator(f"aten::{_name}").meta("cuda")(shaped_by(_overload, CONTIGUOUS))
# ``zeros_like(input, input.suggest_memory_format())``; native/ReflectionPad.cpp, …
operator(*aten(_PADS, "_backward")).meta("cpu")(made_like(self=SUGGESTED))
operator(*aten(_PADS, "_backward")).meta("cuda")(made_like(self=CONTIGUOUS))
operator("aten::fractional_max_pool3d_backward").meta()(made_like(self=CONTIGUOUS))


def _tables(output: Tensor, points: int) -> int:
    """For every position its points' indices and weights; upsample_generic_Nd_kernel_impl."""
    return points * (LONG + output.element_size()) * sum(output.shape[2:])


def _upsample(points: int) -> Callable[..., int]:
    def upsample(outputs: Tensor, input: Tensor) -> int:
        """Tables of indices and weights, or channels-last copies of both sides."""
        if input.numel() == 0:
            return 0
        by_format = input.dim() >= 4 and is_channels_last(input) and input.shape[1] > 3
        if by_format or (input.dim() == 4 and outputs.shape[-1] + outputs.shape[-2] <= 128):
            # _use_vectorized_kernel_cond_2d and _3d: channels last, or small images
            layout = torch.channels_last if input.dim() == 4 else torch.channels_last_3d
            return contiguous_copy(input, layout) + contiguous_copy(outputs, layout)
        return _tables(outputs, points)

    return upsample


operator(*map(_nearest, ("1d", "2d", "3d"))).workspace("cpu")(_upsample(1))
operator("upsample_linear1d upsample_bilinear2d upsample_trilinear3d").workspace("cpu")(
    _upsample(2)
)


@operator("aten::upsample_bicubic2d").workspace("cpu")
def bicubic_tables(outputs: Tensor, input: Tensor) -> int:
    """Tables of four points a position, whatever the layout."""
    return _tables(outputs, 4) if input.numel() else 0


def _scale(source: int, target: int, align_corners: bool, given: float | None) -> float:
    """``area_pixel_compute_scale``; native/UpSample.h."""
    if align_corners:
        return (source - 1) / (target - 1) if target > 1 else 0.0
    return 1 / given if given else source / target


def _antialias_table(scale: float, target: int, points: int, element_size: int) -> int:
    """``_compute_indices_min_size_weights_aa``: four columns of indices, and weights."""
    support = points * 0.5 * max(scale, 1.0)
    return target * (4 * LONG + (math.ceil(support) * 2 + 1) * element_size)


def _antialias(points: int) -> Callable[..., int]:
    def upsample(
        outputs: Tensor,
        input: Tensor,
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> int:
        """The image after the first pass, and the tables of one pass."""
        batch, channels, height, width = input.shape
        rows, columns = outputs.shape[-2:]
        size = input.element_size()
        down_by = _scale(height, rows, align_corners, scales_h)
        across_by = _scale(width, columns, align_corners, scales_w)
        across = _antialias_table(across_by, columns, points, size) if columns != width else 0
        down = _antialias_table(down_by, rows, points, size) if rows != height else 0
        if across and down:
            return batch * channels * height * columns * size + max(across, down)
        return across + down

    return upsample


operator("aten::_upsample_bilinear2d_aa").workspace("cpu")(_antialias(2))
operator("aten::_upsample_bicubic2d_aa").workspace("cpu")(_antialias(4))


@operator(_nearest("2d"), _nearest("2d_backward"), "upsample_bilinear2d_backward").workspace("cuda")
def copies_on_cuda(
    outputs: Tensor, input: Tensor | None = None, grad_output: Tensor | None = None
) -> tuple[int, ...]:
    """A copy of what is read, and a dense result before it is copied to where it belongs;
    UpSampleNearest2d.cu, ``upsample_bilinear2d_backward_out_cuda_template``.
    """
    read = input if grad_output is None else grad_output
    assert read is not None
    if outputs.shape == read.shape:
        return ()
    if _by_channel_last(outputs, read, _LEAST_CHANNELS):
        return (contiguous_copy(read, torch.channels_last),)
    return (contiguous_copy(outputs), contiguous_copy(read))


@operator("aten::upsample_bilinear2d").workspace("cuda")
def bilinear_copy(outputs: Tensor, input: Tensor) -> int:
    """A copy where channels last are written; else the input is read as it lies;
    UpSampleBilinear2d.cu, ``upsample_bilinear2d_out_cuda_template``.
    """
    by_channel = _by_channel_last(outputs, input, 16)
    return contiguous_copy(input, torch.channels_last) if by_channel else 0


def _by_channel_last(outputs: Tensor, read: Tensor, least_channels: int) -> bool:
    """Whether a kernel for channels last is worth its while."""
    return (
        suggested_format(read) == torch.channels_last
        and read.shape[1] >= least_channels
        and outputs.is_contiguous(memory_format=torch.channels_last)
        and outputs.shape != read.shape
    )


_BILINEAR = _ZEROS = 0
_MOST_CHANNELS = 1024
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)

# Registered for every backend, and reading and writing data all the same.
operator(
    "_grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward", kind=OperatorKind.LEAF
)


@operator("aten::grid_sampler").path("cuda")
def grid_sampler(
    call: CompositeCall,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Any:
    """CuDNN for bilinear sampling with zeros around; native/GridSampler.cpp, grid_sampler."""
    if (
        align_corners
        and (interpolation_mode, padding_mode) == (_BILINEAR, _ZEROS)
        and torch.backends.cudnn.enabled
        and input.dim() == grid.dim() == 4
        and input.size(1) <= _MOST_CHANNELS
        # ``cudnn_is_acceptable`` and ``canUse32BitIndexMath``
        and all(one.dtype in _CUDNN_DTYPES and 0 < one.numel() < 2**31 for one in (input, grid))
    ):
        return _aten.cudnn_grid_sampler.default(input, grid)
    return call()


operator("aten::cudnn_grid_sampler_backward").meta("cuda")(  # native/cudnn/GridSampler.cpp
    made_like(self=CONTIGUOUS, grid=CONTIGUOUS)
)


@operator("aten::cudnn_grid_sampler", "aten::cudnn_grid_sampler_backward").workspace("cuda")
def dense(input: Tensor, grid: Tensor, grad_output: Tensor | None = None) -> tuple[Request, ...]:
    """Copies of what is expanded, and of the grid; ``contiguousIfZeroInStrides``."""
    read = (input, grid) if grad_output is None else (input, grid, grad_output)
    copies = (contiguous_copy(one) for one in read if one is grid or 0 in one.stride())
    return (*copies, ALL)


@operator("aten::cudnn_grid_sampler").meta("cuda")
def sampled(input: Tensor, grid: Tensor) -> Tensor:
    """``cudnn_grid_sampler_forward``."""
    return input.new_empty((input.size(0), input.size(1), grid.size(1), grid.size(2)))


# native/cudnn/AffineGridGenerator.cpp
operator("cudnn_affine_grid_generator").meta()(lambda theta, N, H, W: like(theta, (N, H, W, 2)))
operator("aten::cudnn_affine_grid_generator_backward").meta()(lambda grad, N: like(grad, (N, 2, 3)))
# All that cuDNN does: grids with aligned corners, sampled bilinearly and with zeros around.
operator("aten::cudnn_affine_grid_generator").values()(
    lambda theta, N, C, H, W: _aten.affine_grid_generator.default(theta, [N, C, H, W], True)
)
operator("aten::cudnn_affine_grid_generator_backward").values()(
    lambda grad, N, C, H, W: _aten.affine_grid_generator_backward.default(grad, [N, C, H, W], True)
)
operator("aten::cudnn_grid_sampler").values()(
    lambda input, grid: _aten.grid_sampler_2d.default(input, grid, 0, 0, True)
)
operator("aten::cudnn_grid_sampler_backward").values()(
    lambda input, grid, grad_output: _aten.grid_sampler_2d_backward.default(
        grad_output, input, grid, 0, 0, True, [True, True]
    )
)


@operator("max_pool3d_with_indices max_pool3d_with_indices_backward").workspace("cuda")
def max_copies(
    input: Tensor, grad_output: Tensor | None = None, indices: Tensor | None = None
) -> tuple[int, ...]:
    """What is read, dense, or with channels last if the input has them; DilatedMaxPool3d.cu."""
    read = (input,) if grad_output is None else (grad_output, indices)
    batches = [one if one is None or one.dim() == 5 else one.unsqueeze(0) for one in read]
    layout = suggested_format(input) if input.dim() == 5 else CONTIGUOUS
    if input.unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d):
        layout = torch.channels_last_3d
    return tuple(contiguous_copy(one, layout) for one in batches)


@operator("aten::_adaptive_avg_pool3d").workspace("cuda")
def adaptive_average_copy(input: Tensor) -> tuple[Request, ...]:
    """A dense batch; a single volume is read as it lies."""
    return (adaptive_max_copy(input), ALL)


@operator("aten::adaptive_max_pool3d").workspace("cuda")
def adaptive_max_copy(input: Tensor) -> int:
    """A dense batch; a single volume is read as it lies."""
    return contiguous_copy(input) if input.dim() == 5 else 0


@operator("aten::_adaptive_avg_pool2d_backward").workspace("cuda")
def adaptive_average_backward(grad_output: Tensor, input: Tensor) -> int:
    """A dense gradient, but for images with channels last, of which it is read as it lies."""
    last = suggested_format(input) == torch.channels_last
    return 0 if last else contiguous_copy(grad_output)


@operator("aten::adaptive_max_pool2d").workspace("cuda")
def adaptive_max_copies(outputs: tuple[Tensor, Tensor], input: Tensor) -> tuple[int, ...]:
    """Dense results before they are copied to where they belong, and a dense input;
    AdaptiveMaxPooling2d.cu, ``adaptive_max_pool2d_out_cuda``.
    """
    copy = contiguous_copy(input) if input.dim() == 4 else 0
    return (*map(contiguous_copy, outputs), copy)


@operator("aten::max_pool1d").path("cuda")
def max_pool1d(call: CompositeCall) -> Any:
    """With indices, also where no gradient is needed; native/MaxPooling.cpp, max_pool1d."""
    return _aten.max_pool1d_with_indices.default(*call.args, **call.kwargs)[0]


@operator("aten::reflection_pad3d", "aten::replication_pad3d").workspace("cpu")
def volume_copies(outputs: Tensor, input: Tensor) -> int:
    """Volumes in their own format, one alone contiguous; native/cpu/PaddingKernel.cpp."""
    if input.dim() == 5:
        return dense_copy(input, suggested_format(input))
    return contiguous_copy(input) + contiguous_copy(outputs)


@operator("aten::im2col", "aten::col2im").decomposition()
def resized(call: GivenCall, self: Tensor) -> Tensor:
    """On the storage of one like the input; im2col_out_cpu_template, col2im_out_cpu_template."""
    result = torch.empty_like(self, memory_format=torch.contiguous_format)
    dense = self.contiguous()
    result.resize_(meta_result(call.overload, *call.args, **call.kwargs).shape)
    del dense
    return result


@operator("aten::unfold_backward").workspace()
def unfold_backward(input_sizes: Sequence[int], dim: int, size: int, step: int) -> int:
    """Where windows overlap an index of every position to the last end; UnfoldBackward.h."""
    if step >= size:
        return 0
    length = input_sizes[dim] if input_sizes else 1
    return torch.int64.itemsize * ((length - size) // step * step + size)
