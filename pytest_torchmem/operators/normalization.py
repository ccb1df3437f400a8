"""Layer, RMS and group normalization, and norms of weights.

native/layer_norm.cpp, native/cpu/layer_norm_kernel.cpp, native/cuda/layer_norm_kernel.cu. What CUDA
takes is exact. native/group_norm.cpp, native/cuda/group_norm_kernel.cu.

Weights, apart from their directions and bounded: native/cpu/WeightNormKernel.cpp, on the CPU along
the first or last dimension; native/Normalization.cpp.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall, GivenCall, outputs
from pytest_torchmem.operators.elementwise import converted, sum_buffers
from pytest_torchmem.operators.layouts import NestedTensors
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    ALL,
    CONTIGUOUS,
    HALVES,
    Request,
    accumulation_type,
    asked_for,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
    laid_out,
    like,
    passing,
    suggested_format,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private import keys, names, tensors

operator("aten::native_layer_norm").workspace("cuda")(
    copied(first=True, input=CONTIGUOUS, weight=CONTIGUOUS, bias=CONTIGUOUS)
)
operator("aten::native_layer_norm").workspace("cpu")(
    lambda input, weight, bias: sum(map(contiguous_copy, (input, weight, bias)))
)
rms_norm = operator("aten::_fused_rms_norm", kernel_on=frozenset({"cuda"}))
rms_norm.workspace("cuda")(copied(first=True, input=CONTIGUOUS, weight=CONTIGUOUS))


class LayerNorm(NamedTuple):
    """What is asked of a layer norm, by the names of the schema's arguments."""

    input: Tensor
    normalized_shape: Sequence[int]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


class RmsNorm(NamedTuple):
    """The same of an RMS norm."""

    input: Tensor
    normalized_shape: Sequence[int]
    weight: Tensor | None = None
    eps: float | None = None


class NormBackward(NamedTuple):
    """What is asked of the backwards of both."""

    grad_out: Tensor
    input: Tensor
    normalized_shape: Sequence[int]
    rstd: Tensor
    weight: Tensor | None
    output_mask: Sequence[bool]
    bias: Tensor | None = None

    @property
    def columns(self) -> int:
        """Elements that are normalised together."""
        return math.prod(self.normalized_shape)


@operator("aten::native_layer_norm").meta("cpu")
def outputs_on_cpu(norm: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics in the type of the parameters, not in float; layer_norm_cpu."""
    given = (norm.weight, norm.bias)
    return _outputs(norm, next((one for one in given if one is not None), norm.input).dtype)


@operator("aten::native_layer_norm").meta("cuda")
def outputs_on_cuda(norm: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics in the type that is accumulated in; layer_norm_cuda."""
    return _outputs(norm, _accumulated(norm.input))


def _accumulated(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _outputs(norm: LayerNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous outputs, and statistics for all that is normalised together."""
    input, shape = norm.input, tuple(norm.normalized_shape)
    kept = input.dim() - len(shape)
    parameters = [one for one in (norm.weight, norm.bias) if one is not None]
    if not shape or kept < 0 or any(tuple(one.shape) != shape for one in parameters):
        kept = -1
    if kept < 0 or tuple(input.shape[kept:]) != shape:  # torch says what is wrong
        wrong: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm(*norm)
        return wrong
    rows = (*input.shape[:kept], *([1] * len(shape)))
    mean, rstd = (input.new_empty(rows, dtype=dtype) for _ in range(2))
    return like(input), mean, rstd


@operator("aten::native_layer_norm_backward").meta()
def gradients(norm: NormBackward) -> tuple[Tensor | None, ...]:
    """Contiguous whatever the layout of the input; layer_norm_backward_cpu and _cuda."""
    given = (norm.input, norm.weight, norm.bias)
    made = (None if one is None else like(one) for one in given)
    return asked_for(made, norm.output_mask)


@operator("aten::native_layer_norm_backward").values("cuda")
def gradients_as_on_cuda(norm: NormBackward, mean: Tensor) -> tuple[Tensor | None, ...]:
    """In the type that CUDA accumulates in; the CPU's kernel wants them in the parameters'."""
    given = (norm.grad_out, norm.input, mean, norm.rstd, norm.weight, norm.bias)
    wide = [one if one is None else one.to(mean.dtype) for one in given]
    made = torch.ops.aten.native_layer_norm_backward.default(
        *wide[:2], norm.normalized_shape, *wide[2:], norm.output_mask
    )
    return tuple(
        one if one is None or of is None else one.to(of.dtype)
        for one, of in zip(made, (norm.input, norm.weight, norm.bias), strict=True)
    )


@operator("aten::native_layer_norm_backward").workspace("cpu")
def backward_on_cpu(machine: Host, outputs: Sequence[Tensor | None], norm: NormBackward) -> int:
    """Dense copies, and sums of gamma and beta per thread; LayerNormBackwardKernelImplInternal."""
    copies = contiguous_copy(norm.input) + contiguous_copy(norm.weight)
    if norm.input.numel() == 0:
        return copies
    copies += contiguous_copy(norm.grad_out)
    if outputs[1] is None and outputs[2] is None:
        return copies
    return copies + 2 * machine.threads * norm.columns * norm.input.element_size()


@operator("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward").workspace("cuda")
def backward_on_cuda(machine: Gpu, norm: NormBackward) -> tuple[Request, ...]:
    """Dense copies, the gradient's when the outputs are made, and partial gradients, of RMS norm's
    without beta;
    ``LayerNormBackwardKernelImplInternal``, ``_fused_rms_norm_backward_cuda``.
    """
    copies = contiguous_copy(norm.input), contiguous_copy(norm.weight)
    partial = _partial_gradients(machine, norm)
    return (*copies, ALL, contiguous_copy(norm.grad_out), *partial)


@operator("aten::native_layer_norm").nested()
def of_nested(nested: NestedTensors, norm: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Of the buffer; native/nested/NestedTensorMath.cpp, nested_layer_norm."""
    rows = norm.input.values().view(-1, *norm.normalized_shape)
    output, mean, rstd = torch.ops.aten.native_layer_norm.default(*norm._replace(input=rows))
    sizes = tensors.nested_sizes(norm.input)
    return nested.wrap(output.view(-1), sizes), mean.view(-1), rstd.view(-1)


def _partial_gradients(gpu: Gpu, norm: NormBackward) -> tuple[int, ...]:
    """Of many short rows, a partial sum for every 32 of them, each summed by a reduction into a
    tensor that takes the place of the one made before; ``LaunchGammaBetaBackwardCUDAKernel``.
    """
    columns, weight = norm.columns, norm.weight
    number = norm.output_mask[1] + (norm.bias is not None and norm.output_mask[2])
    rows = norm.input.numel() // columns if columns else 0
    few = rows <= 64 * 1024 or columns // 32 >= gpu.multiprocessors // 2
    if weight is None or not number or few:
        return ()
    blocks = min(32 * 1024 // ceil_div(columns, 32), ceil_div(rows, 32))
    partial = blocks * columns * weight.element_size()
    buffers = sum_buffers(gpu, (blocks, columns), 0, weight.dtype)
    summed = (dense_bytes(weight), *passing(*buffers), -dense_bytes(weight))
    return (*[partial] * number, *summed * number)


@operator("aten::rms_norm").path("cuda")
def choose_rms_norm(call: CompositeCall, norm: RmsNorm) -> Any:
    """Fused, but for channels-last, complex, and a weight of another dtype; rms_norm_symint."""
    input, weight = norm.input, norm.weight
    plain = suggested_format(input) is torch.contiguous_format and not input.is_complex()
    if not plain or (weight is not None and weight.dtype != input.dtype):
        return call()
    return torch.ops.aten._fused_rms_norm.default(*norm)[0]


@rms_norm.meta("cuda")
def output_and_reciprocal_root(norm: RmsNorm) -> tuple[Tensor, Tensor]:
    """Contiguous, the root in float or double; ``_fused_rms_norm_cuda``."""
    input, ones = norm.input, [1] * len(norm.normalized_shape)
    shape = (*input.shape[: input.dim() - len(ones)], *ones)
    return like(input), input.new_empty(shape, dtype=_accumulated(input))


@operator("aten::_fused_rms_norm_backward").values()
def rms_gradients(norm: NormBackward) -> tuple[Tensor | None, Tensor | None]:
    """With the root that the forward kept, in its precision."""
    grad_out, input, normalized_shape, rstd, weight, output_mask, _ = norm
    dimensions = list(range(input.dim() - len(normalized_shape), input.dim()))
    normalized, grad = input.to(rstd.dtype) * rstd, grad_out.to(rstd.dtype)
    of_weight = None
    if weight is not None and output_mask[1]:
        rows = list(range(dimensions[0]))
        total = (grad * normalized).sum(rows) if rows else grad * normalized
        of_weight = total.to(weight.dtype)
    scaled = grad if weight is None else grad * weight.to(rstd.dtype)
    mean = (scaled * normalized).mean(dimensions, keepdim=True)
    of_input = ((scaled - normalized * mean) * rstd).to(input.dtype)
    return (of_input if output_mask[0] else None), of_weight


@rms_norm.path("cuda")
def differentiable_rms_norm(norm: RmsNorm) -> Any:
    """``_fused_rms_norm_cuda``, with its gradient."""
    return cast(Any, _FusedRmsNorm).apply(*norm)


class _FusedRmsNorm(torch.autograd.Function):
    """The gradient that derivatives.yaml gives ``_fused_rms_norm`` on CUDA only."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        norm = RmsNorm(*given)
        with keys.below_autograd():
            output, rstd = torch.ops.aten._fused_rms_norm.default(*norm)
        ctx.normalized_shape = norm.normalized_shape
        ctx.save_for_backward(norm.input, norm.weight, rstd)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return output, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        if grad is None:
            return None, None, None, None
        input, weight, rstd = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        grad_input, grad_weight = torch.ops.aten._fused_rms_norm_backward.default(
            grad, input, ctx.normalized_shape, rstd, weight, mask
        )
        return grad_input, None, grad_weight, None


_INTERMEDIATE = 3
"""Rows of the sum and of two factors, for which the gradient uses the same buffer."""


@operator("aten::_weight_norm_interface", "aten::_weight_norm_interface_backward").workspace("cpu")
def of_rows(machine: Host, dim: int, g: Tensor | None = None, saved_g: Tensor | None = None) -> int:
    """Each thread's sums along the last dimension; weight_norm_last_dim_kernel, and
    weight_norm_backward_last_dim_kernel, which has three of them at least.
    """
    if dim == 0:
        return 0
    number = machine.threads if saved_g is None else max(_INTERMEDIATE, machine.threads)
    norms = g if saved_g is None else saved_g
    assert norms is not None
    return number * norms.numel() * accumulation_type(norms.dtype).itemsize


@operator("aten::renorm", "aten::renorm_").decomposition("cpu", "cuda")
def renorm(machine: Host | Gpu, call: GivenCall, self: Tensor, p: float, dim: int) -> Tensor:
    """``TORCH_IMPL_FUNC(renorm_out)``, perhaps into the input. Norms of 16-bit types are taken in
    float, and their factors in the type itself; on the CPU TensorIterator computes these in a
    common type, and CUDA's kernel casts by itself.
    """
    result = self if call.overload is torch.ops.aten.renorm_.default else outputs(call)
    others = [axis for axis in range(self.dim()) if axis != dim % self.dim()]
    half = self.dtype in HALVES
    norms = torch.linalg.vector_norm(
        self, p, others, keepdim=True, dtype=torch.float32 if half else None
    )
    factors = norms
    if norms.dtype != self.dtype:
        factors = self.new_empty(norms.shape)
        if isinstance(machine, Host):
            converted = torch.empty_like(norms)
            del converted
    torch.mul(self, factors, out=result)
    return result


@operator("aten::group_norm").path("cuda")
def group_norm(call: CompositeCall, input: Tensor) -> Any:
    """Of contiguous input, also where it is channels-last; native/group_norm.cpp, group_norm.

    What is normalised, and kept for the backward, is a contiguous copy. torch 2.14 has a kernel for
    channels-last instead.
    """
    return call() if input.is_contiguous() else call.as_on_meta()


class GroupNorm(NamedTuple):
    """What a group norm and its backward have in common, by the names of their arguments."""

    input: Tensor
    weight: Tensor | None
    N: int
    C: int
    HxW: int
    group: int
    bias: Tensor | None = None

    def of_channels(self) -> int:
        """Bytes of a number for every channel of every image, in the type that is added up in."""
        return self.N * self.C * accumulation_type(self.input.dtype).itemsize


@operator("aten::native_group_norm").meta()
def group_norm_outputs(norm: GroupNorm) -> tuple[Tensor, ...]:
    """In the type of the input, the statistics in that of the parameters; native/group_norm.cpp,
    native_group_norm, and native/cpu/mixed_data_type.h, param_scalar_type.
    """
    input, given = norm.input, (norm.weight, norm.bias)
    dtype = next((one for one in given if one is not None), input).dtype
    # On CUDA a composite makes channels-last input contiguous before, where it has to be.
    statistics = (input.new_empty((norm.N, norm.group), dtype=dtype) for _ in range(2))
    return (laid_out(input, suggested_format(input)), *statistics)


@operator("aten::native_group_norm_backward").meta()
def group_norm_gradients(
    input: Tensor, weight: Tensor | None, C: int, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """In the types of input and parameters; native_group_norm_backward."""
    of = weight if weight is not None else input
    made = laid_out(input, suggested_format(input)), like(of, (C,)), like(of, (C,))
    return asked_for(made, output_mask)


@operator("aten::native_group_norm").workspace("cpu")
def forward_on_cpu(norm: GroupNorm) -> int:
    """Contiguous copies of what is not (before torch 2.14 ``group_norm`` makes them), and of
    channels last sums and squares per channel; native/group_norm.cpp, native_group_norm, and
    native/cpu/group_norm_kernel.cpp, GroupNormKernelImplChannelsLastInternal.
    """
    input = norm.input
    layout = suggested_format(input)
    copies = contiguous_copy(input, layout)
    copies += contiguous_copy(norm.weight) + contiguous_copy(norm.bias)
    if input.is_contiguous() or layout == torch.contiguous_format:
        return copies
    return copies + 2 * norm.of_channels()


@operator("aten::native_group_norm").workspace("cuda")
def forward_on_cuda(outputs: Sequence[Tensor], norm: GroupNorm) -> tuple[int, ...]:
    """Statistics in the type that they are added up in, and a scale and a shift for every channel
    of every image where a channel has several pixels.

    Exact, group_norm_kernel.cu, ``GroupNormKernelImplInternal``; before torch 2.13 statistics are
    kept in the type of the outputs alone.
    """
    dtype = accumulation_type(norm.input.dtype)
    statistics = outputs[1:] if names.TORCH_VERSION >= (2, 13) else ()
    copies = (
        *map(contiguous_copy, (norm.input, norm.weight, norm.bias)),
        *(converted(statistic, dtype) for statistic in statistics),
    )
    if norm.HxW == 1 or norm.weight is norm.bias is None:
        return copies
    return (*copies, norm.of_channels(), norm.of_channels())


@operator("aten::native_group_norm_backward").workspace("cpu")
def groups_backward_on_cpu(grad_out: Tensor, mean: Tensor, rstd: Tensor, norm: GroupNorm) -> int:
    """Contiguous copies of what is not (before torch 2.14 the derivative's formula makes them), and
    ``ds`` and ``db`` of every channel; native/group_norm.cpp, native_group_norm_backward, and
    native/cpu/group_norm_kernel.cpp, GroupNormBackwardKernelImplInternal.
    """
    input = norm.input
    layout = suggested_format(input)
    copies = sum(contiguous_copy(tensor, layout) for tensor in (grad_out, input))
    copies += sum(contiguous_copy(tensor) for tensor in (mean, rstd, norm.weight))
    return copies + 2 * norm.of_channels()


@operator("aten::native_group_norm_backward").workspace("cuda")
def groups_backward_on_cuda(
    grad_out: Tensor, norm: GroupNorm, output_mask: Sequence[bool]
) -> tuple[int, ...]:
    """Sums of every channel of every image, and coefficients of the input's gradient; exact,
    group_norm_kernel.cu, ``GroupNormBackwardKernelImplInternal`` and ``GroupNorm1dBackward``.
    """
    each = norm.of_channels()
    groups = norm.N * norm.group * accumulation_type(norm.input.dtype).itemsize
    copies = (contiguous_copy(grad_out), contiguous_copy(norm.input))
    if norm.HxW == 1:
        return (*copies, each, each, *[groups] * 2 * output_mask[0])
    scaled = each if norm.weight is not None else 0
    coefficients = (groups, groups, scaled) if output_mask[0] else ()
    return (*copies, each, each, *coefficients)
