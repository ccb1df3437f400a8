"""Geometry of outputs that torch does not know on ``meta``, or knows wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pytest_torchmem.profiler.devices.host import REFERENCE
from pytest_torchmem.profiler.patches import is_another
from pytest_torchmem.profiler.workspace.cpu.convolution import uses_onednn
from pytest_torchmem.profiler.workspace.cpu.geometry import suggested_format
from pytest_torchmem.profiler.workspace.cpu.recurrent import lstm_workspace

MetaFunction = Callable[..., Any]
_F = TypeVar("_F", bound=MetaFunction)

META_FUNCTIONS: dict[str, MetaFunction] = {}
"""By operator, ``"aten::geqrf"`` for every overload; from arguments on ``meta`` to such outputs."""


CPU_META_FUNCTIONS: dict[str, MetaFunction] = {}
"""The same for what is so on the CPU alone; to be asked first where an operator runs there."""


def meta(*operators: str, device: str | None = None) -> Callable[[_F], _F]:
    """Register the geometry of ``operators``, on ``"cpu"`` alone or on every device.

    Raises ``ValueError`` where one has a function already.
    """
    functions = CPU_META_FUNCTIONS if device == "cpu" else META_FUNCTIONS

    def register(function: _F) -> _F:
        for operator in operators:
            if is_another(functions.get(operator), function):
                raise ValueError(f"{operator} already has a function for its geometry")
            functions[operator] = function
        return function

    return register


def _like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return an empty contiguous tensor of the type of ``tensor``, of its shape or another."""
    return tensor.new_empty(tuple(tensor.shape if shape is None else shape))


def _laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return an empty tensor of the shape and type of ``tensor`` in a layout."""
    return torch.empty_like(tensor, memory_format=memory_format)


# -- convolutions --------------------------------------------------------------------------------

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _convolution_shape(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
) -> Tensor:
    dims = weight.dim() - 2
    result: Tensor = torch.ops.aten.convolution(
        input,
        weight,
        None,
        list(stride),
        list(padding),
        list(dilation),
        transposed,
        [0] * dims if not transposed else list(output_padding),
        groups,
    )
    return result


@meta("aten::convolution")
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Channels last where either operand is; native/ConvUtils.h, mkldnn_conv_use_channels_last and
    cudnn_conv_suggest_memory_format. ``meta`` does not know that it stands for a device.
    """
    result = _convolution_shape(
        input, weight, stride, padding, dilation, transposed, output_padding, groups
    )
    wanted = _CHANNELS_LAST.get(input.dim())
    if wanted is None or result.numel() == 0:
        return result
    if wanted not in (suggested_format(input), suggested_format(weight)):
        return _laid_out(result, torch.contiguous_format)
    native = input.dim() == 5 and not uses_onednn(
        REFERENCE, input, weight, stride, dilation, transposed, output_padding, groups
    )
    return _laid_out(result, torch.contiguous_format if native else wanted)


@meta("aten::convolution_backward")
def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """ATen's own kernels of three dimensions know no channels last."""
    results = torch.ops.aten.convolution_backward(
        grad_output,
        input,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        output_mask,
    )
    if input.dim() != 5 or uses_onednn(
        REFERENCE, input, weight, stride, dilation, transposed, output_padding, groups
    ):
        return tuple(results)
    return tuple(result if result is None else _like(result) for result in results)


@meta("aten::cudnn_convolution")
def cudnn_convolution(
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *flags: bool,
) -> Tensor:
    """native/cudnn/ConvShared.cpp."""
    return convolution(input, weight, None, stride, padding, dilation, False, [0], groups)


@meta("aten::cudnn_convolution_transpose")
def cudnn_convolution_transpose(
    input: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *flags: bool,
) -> Tensor:
    """native/cudnn/ConvShared.cpp."""
    return convolution(input, weight, None, stride, padding, dilation, True, output_padding, groups)


@meta("aten::cudnn_convolution_relu")
def cudnn_convolution_relu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """native/cudnn/ConvShared.cpp."""
    return convolution(input, weight, bias, stride, padding, dilation, False, [0], groups)


@meta("aten::cudnn_convolution_add_relu")
def cudnn_convolution_add_relu(
    input: Tensor,
    weight: Tensor,
    addend: Tensor,
    alpha: float | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """native/cudnn/ConvShared.cpp."""
    return convolution(input, weight, bias, stride, padding, dilation, False, [0], groups)


@meta("aten::_slow_conv2d_forward", "aten::slow_conv3d_forward")
def slow_convolution(
    input: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """native/ConvolutionMM2d.cpp, ConvolutionMM3d.cpp."""
    return _convolution_shape(input, weight, stride, padding, [1] * len(kernel_size))


@meta("aten::slow_conv_dilated2d", "aten::slow_conv_dilated3d")
@meta("aten::_conv_depthwise2d", "aten::conv_depthwise3d")
def dilated_convolution(
    input: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """native/NaiveDilatedConvolution.cpp, cuda/DepthwiseConv2d.cu: shapes tell the groups."""
    groups = input.shape[1] // weight.shape[1]
    return _convolution_shape(input, weight, stride, padding, dilation, groups=groups)


@meta("aten::slow_conv_transpose3d")
def slow_convolution_transpose(
    input: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    output_padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
) -> Tensor:
    """native/NaiveConvolutionTranspose3d.cpp."""
    return _convolution_shape(input, weight, stride, padding, dilation, True, output_padding)


@meta("aten::_slow_conv2d_backward.output_mask")
def slow_convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """native/ConvolutionMM2d.cpp."""
    results = (_like(input), _like(weight), _like(grad_output, (weight.shape[0],)))
    return tuple(
        result if wanted else None for result, wanted in zip(results, output_mask, strict=True)
    )


# -- layouts that meta does not keep -------------------------------------------------------------


def _in_suggested_format(operator: Any) -> MetaFunction:
    def keep(input: Tensor, *arguments: Any, **options: Any) -> Any:
        result = operator(input, *arguments, **options)
        if input.dim() == result.dim():
            return _laid_out(result, suggested_format(input))
        return result

    keep.__doc__ = "The shape that meta gives, in the layout that the input suggests."
    return keep


for _name in (
    "channel_shuffle",
    "pixel_shuffle",
    "pixel_unshuffle",
    "max_unpool2d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad2d",
    "replication_pad3d",
):
    meta(f"aten::{_name}")(_in_suggested_format(getattr(torch.ops.aten, _name).default))


@meta(
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
)
def padding_backward(grad_output: Tensor, input: Tensor, padding: Sequence[int]) -> Tensor:
    """``zeros_like(input, input.suggest_memory_format())``; native/ReflectionPad.cpp, …"""
    return _laid_out(input, suggested_format(input))


@meta("aten::glu_backward")
def glu_backward(grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    """Contiguous; native/GatedLinearUnit.cpp, glu_backward_cpu."""
    return _like(input)


@meta("aten::nonzero_static")
def nonzero_static(input: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Rows of indices; native/TensorAdvancedIndexing.cpp, nonzero_static_cpu."""
    return input.new_empty((size, input.dim()), dtype=torch.int64)


# -- losses --------------------------------------------------------------------------------------


def _reduced_in_place(input: Tensor, target: Tensor, reduction: int) -> Tensor:
    shape = torch.broadcast_shapes(input.shape, target.shape)
    dtype = torch.result_type(input, target)
    whole = torch.empty(shape, dtype=dtype, device="meta")
    if reduction == 0:
        return whole
    return whole.as_strided((), ()) if whole.numel() else whole.new_empty(())


@meta("aten::mse_loss", "aten::smooth_l1_loss")
def elementwise_loss(
    input: Tensor, target: Tensor, reduction: int = 1, *parameters: float
) -> Tensor:
    """A reduced loss keeps the storage that was made for all elements; native/Loss.cpp,
    TORCH_META_FUNC(mse_loss) resizes its output and not its storage.
    """
    return _reduced_in_place(input, target, reduction)


@meta("aten::mse_loss_backward", "aten::smooth_l1_loss_backward", "aten::huber_loss_backward")
def elementwise_loss_backward(
    grad_output: Tensor, input: Tensor, *rest: Any, grad_input: Tensor | None = None
) -> Tensor:
    """``zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT)``; native/Loss.cpp."""
    return _like(input) if grad_input is None else grad_input


@meta("aten::multi_margin_loss_backward")
def multi_margin_loss_backward(grad_output: Tensor, input: Tensor, *settings: Any) -> Tensor:
    """native/LossMultiMargin.cpp."""
    return _like(input)


@meta("aten::multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(grad_output: Tensor, input: Tensor, *settings: Any) -> Tensor:
    """native/LossMultiLabelMargin.cpp."""
    return _like(input)


def _ctc_loss(log_probs: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    steps, batch = log_probs.shape[0], log_probs.shape[1]
    return _like(log_probs, (batch,)), _like(log_probs, (batch, steps, 2 * longest + 1))


@meta("aten::_ctc_loss")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """The losses, and ``log_alpha`` for the longest target; native/LossCTC.cpp."""
    return _ctc_loss(log_probs, max(target_lengths, default=0))


@meta("aten::_ctc_loss.Tensor")
def ctc_loss_tensor(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """native/LossCTC.cpp; lengths are not known here, so ``log_alpha`` is as large as it can be."""
    return _ctc_loss(log_probs, int(targets.shape[-1]))


@meta("aten::_ctc_loss_backward")
def ctc_loss_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    """native/LossCTC.cpp: like ``log_probs``, contiguous."""
    return _like(log_probs)


@meta("aten::_cudnn_ctc_loss")
def cudnn_ctc_loss(log_probs: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """native/cudnn/LossCTC.cpp: the loss of every sequence, and the gradient at once."""
    return _like(log_probs, (log_probs.shape[1],)), _like(log_probs)


# -- normalization -------------------------------------------------------------------------------


def _batch_norm(operator: Any) -> MetaFunction:
    def batch_norm(input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        results = operator(input, *arguments)
        training = next(argument for argument in arguments if isinstance(argument, bool))
        if training:
            return tuple(results)
        return (results[0], _like(results[1], (0,)), _like(results[2], (0,)), *results[3:])

    batch_norm.__doc__ = "No statistics are saved in evaluation; native/Normalization.cpp."
    return batch_norm


meta("aten::native_batch_norm")(_batch_norm(torch.ops.aten.native_batch_norm.default))
meta("aten::_native_batch_norm_legit")(_batch_norm(torch.ops.aten._native_batch_norm_legit.default))
meta("aten::_native_batch_norm_legit.no_stats")(
    _batch_norm(torch.ops.aten._native_batch_norm_legit.no_stats)
)


def _first_type(input: Tensor, *parameters: Any) -> torch.dtype:
    """The type of the first parameter there is, else of the input: what the CPU saves is in it."""
    tensors = (parameter for parameter in parameters if isinstance(parameter, Tensor))
    found: torch.dtype = next(tensors, input).dtype
    return found


@meta("aten::native_layer_norm", device="cpu")
def layer_norm_cpu(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics in the type of the parameters, not in float; native/layer_norm.cpp,
    layer_norm_cpu.
    """
    dtype = _first_type(input, weight, bias)
    result, mean, rstd = torch.ops.aten.native_layer_norm(
        input, normalized_shape, weight, bias, eps
    )
    return result, mean.to(dtype), rstd.to(dtype)


def _batch_norm_cpu(function: MetaFunction) -> MetaFunction:
    def batch_norm(input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        dtype = _first_type(input, *arguments)
        result, mean, variance, *rest = function(input, *arguments)
        return result, mean.to(dtype), variance.to(dtype), *rest

    batch_norm.__doc__ = "Statistics in the type of the parameters; native/Normalization.cpp."
    return batch_norm


for _name in (
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit.no_stats",
):
    meta(_name, device="cpu")(_batch_norm_cpu(META_FUNCTIONS[_name]))


def _batch_norm_backward_cpu(operator: Any) -> MetaFunction:
    def batch_norm_backward(
        grad_out: Tensor, input: Tensor, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        gradient, *parameters = operator(grad_out, input, *rest)
        if gradient is not None:
            gradient = _laid_out(input, suggested_format(input))
        return gradient, *parameters

    batch_norm_backward.__doc__ = "The input's layout, whatever the gradient's."
    return batch_norm_backward


for _name in ("native_batch_norm_backward", "batch_norm_backward"):
    meta(f"aten::{_name}", device="cpu")(
        _batch_norm_backward_cpu(getattr(torch.ops.aten, _name).default)
    )

meta("aten::_batch_norm_with_update", device="cpu")(
    _batch_norm_cpu(torch.ops.aten._batch_norm_with_update.default)
)


@meta("aten::batch_norm_stats", "aten::batch_norm_update_stats")
def batch_norm_statistics(input: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu: float for 16-bit inputs."""
    dtype = torch.float32 if input.dtype.itemsize == 2 else input.dtype
    shape = (input.shape[1],)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


@meta("aten::batch_norm_elemt")
def batch_norm_apply(input: Tensor, *rest: Any) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)


@meta("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts")
def batch_norm_gather(input: Tensor, mean: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu."""
    return _like(mean, mean.shape[1:]), _like(mean, mean.shape[1:])


@meta("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """native/cuda/Normalization.cu."""
    parameter = mean if weight is None else weight
    return (
        _like(mean) if input_g else None,
        _like(mean) if input_g else None,
        _like(parameter) if weight_g else None,
        _like(parameter) if bias_g else None,
    )


@meta("aten::batch_norm_backward_elemt")
def batch_norm_backward_apply(grad_out: Tensor, input: Tensor, *rest: Any) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)


# -- recurrent layers ----------------------------------------------------------------------------


@meta("aten::_cudnn_rnn_flatten_weight")
def cudnn_rnn_flatten_weight(weights: Sequence[Tensor], *rest: Any) -> Tensor:
    """native/cudnn/RNN.cpp: all parameters in one buffer."""
    return _like(weights[0], (sum(weight.numel() for weight in weights),))


@meta("aten::_cudnn_init_dropout_state")
def cudnn_dropout_state(dropout: float, train: bool, dropout_seed: int, **options: Any) -> Tensor:
    """native/cudnn/RNN.cpp: 8 bytes for every thread that a GPU runs at once."""
    return torch.empty((0,), dtype=torch.uint8, device="meta")


# -- sampling of grids ---------------------------------------------------------------------------


@meta("aten::cudnn_affine_grid_generator")
def cudnn_affine_grid(theta: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    """native/cudnn/AffineGridGenerator.cpp."""
    return _like(theta, (n, h, w, 2))


@meta("aten::cudnn_affine_grid_generator_backward")
def cudnn_affine_grid_backward(grad: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    """native/cudnn/AffineGridGenerator.cpp."""
    return _like(grad, (n, 2, 3))


@meta("aten::fractional_max_pool3d_backward")
def fractional_max_pool3d_backward(grad_output: Tensor, input: Tensor, *rest: Any) -> Tensor:
    """native/FractionalMaxPool3d.cpp."""
    return _like(input)


# -- the rest ------------------------------------------------------------------------------------


@meta("aten::geqrf")
def geqrf(input: Tensor) -> tuple[Tensor, Tensor]:
    """Columns first, as LAPACK has it; native/BatchLinearAlgebra.cpp."""
    factors = torch.empty_like(input.mT, memory_format=torch.contiguous_format).mT
    return factors, _like(input, (*input.shape[:-2], min(input.shape[-2:])))


@meta("aten::_logcumsumexp", "aten::_standard_gamma_grad")
def as_first(input: Tensor, *rest: Any) -> Tensor:
    """Contiguous, like the first argument; native/ReduceOps.cpp, native/Distributions.cpp."""
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@meta("aten::_dirichlet_grad", "aten::_sample_dirichlet", "aten::binomial", "aten::glu_jvp")
def like_first(input: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Like the first argument; native/Distributions.cpp, native/GatedLinearUnit.cpp."""
    return torch.empty_like(input)


@meta("aten::glu_backward_jvp", "aten::_masked_softmax", "aten::_masked_softmax_backward")
def contiguous_like_first(input: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Contiguous, like the first argument; native/GatedLinearUnit.cpp, native/SoftMax.cpp."""
    return _like(input)


@meta("aten::_aminmax")
def aminmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """native/ReduceOps.cpp."""
    shape = list(input.shape)
    if dim is None:
        shape = []
    elif keepdim:
        shape[dim] = 1
    else:
        del shape[dim]
    return _like(input, shape), _like(input, shape)


@meta("aten::_transform_bias_rescale_qkv")
def transform_bias_rescale_qkv(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    """Three views of one tensor; native/transformers/attention.cpp."""
    batch, length = qkv.shape[:2]
    width = qkv.shape[2] // 3
    whole = _like(qkv, (3, batch, num_heads, length, width // num_heads))
    return whole[0], whole[1], whole[2]


@meta("aten::_compute_linear_combination")
def compute_linear_combination(input: Tensor, coefficients: Tensor) -> Tensor:
    """native/LinearAlgebra.cpp."""
    return _like(input, (coefficients.shape[0], *input.shape[1:]))


@meta("aten::histogram.bins_tensor")
def histogram_of_bins(input: Tensor, bins: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """native/Histogram.cpp."""
    return _like(input, (bins.numel() - 1,)), _like(bins)


@meta("aten::histogram.bin_ct")
def histogram(input: Tensor, bins: int = 100, **options: Any) -> tuple[Tensor, Tensor]:
    """native/Histogram.cpp."""
    return _like(input, (bins,)), _like(input, (bins + 1,))


@meta("aten::_histogramdd_bin_edges")
def histogramdd_edges(input: Tensor, bins: Sequence[int], **options: Any) -> list[Tensor]:
    """native/Histogram.cpp."""
    return [_like(input, (count + 1,)) for count in bins]


@meta("aten::_histogramdd_from_bin_cts")
def histogramdd_of_counts(input: Tensor, bins: Sequence[int], **options: Any) -> Tensor:
    """native/Histogram.cpp."""
    return _like(input, tuple(bins))


@meta("aten::_histogramdd_from_bin_tensors")
def histogramdd_of_bins(input: Tensor, bins: Sequence[Tensor], **options: Any) -> Tensor:
    """native/Histogram.cpp."""
    return _like(input, tuple(edges.numel() - 1 for edges in bins))


@meta(
    "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
)
def in_place(*arguments: Any, **options: Any) -> None:
    """Parameters and states are updated where they are; native/cuda/fused_adam_impl.cu, …"""


@meta("aten::mkldnn_rnn_layer")
def lstm_layer(
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    hx: Tensor,
    cx: Tensor,
    reverse: bool,
    batch_sizes: Sequence[int],
    mode: int,
    hidden_size: int,
    num_layers: int,
    has_biases: bool,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last output is what oneDNN keeps for a backward, always; native/mkldnn/RNN.cpp."""
    steps, batch, inputs = input.shape
    nbytes = lstm_workspace(steps, batch, inputs, hidden_size, input.element_size())
    return (
        input.new_empty((steps, batch, hidden_size)),
        torch.empty_like(hx, memory_format=torch.contiguous_format),
        torch.empty_like(cx, memory_format=torch.contiguous_format),
        input.new_empty((nbytes,), dtype=torch.uint8),
    )


@meta("aten::_grouped_mm")
def grouped_mm(
    input: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows of the output begin at multiples of 16 bytes; ``create_grouped_gemm_output_tensor``.

    native/GroupedMMUtils.h. Groups are the last operand's batches, or cut out by ``offs``.
    """
    dtype = out_dtype or input.dtype
    shape: tuple[int, ...] = (input.size(-2), other.size(-1))
    if input.dim() == other.dim():
        groups = input.size(0) if input.dim() == 3 else (0 if offs is None else offs.size(0))
        shape = (groups, *shape)
    row = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize
    stride = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@meta("aten::mkldnn_rnn_layer_backward")
def lstm_layer_backward(
    input: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Tensor,
    bias_hidden: Tensor,
    hx: Tensor,
    cx: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients in float, of each bias by itself; native/mkldnn/RNN.cpp."""
    bias = weight_input[:, 0]  # without biases, weights stand in their place
    like = (input, weight_input, weight_hidden, bias, bias, hx, cx)
    return tuple(tensor.new_empty(tuple(tensor.shape), dtype=torch.float32) for tensor in like)


@meta("aten::_cummax_helper", "aten::_cummin_helper")
def cumulative_extremum(self: Tensor, values: Tensor, indices: Tensor, dim: int) -> None:
    """What it finds is written to arguments; native/ReduceOps.cpp, cummax_out."""
