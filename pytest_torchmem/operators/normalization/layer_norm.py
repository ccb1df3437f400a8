"""Layer and RMS normalization, and norms of weights.

native/layer_norm.cpp, native/cpu/layer_norm_kernel.cpp, native/cuda/layer_norm_kernel.cu. What CUDA
takes is exact.

Weights, apart from their directions and bounded: native/cpu/WeightNormKernel.cpp, on the CPU along
the first or last dimension; native/Normalization.cpp.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall, GivenCall, outputs
from pytest_torchmem.operators.geometry import (
    CONTIGUOUS,
    accumulation_type,
    ceil_div,
    contiguous_copy,
    copied,
    dense_bytes,
    like,
    suggested_format,
)
from pytest_torchmem.operators.nested import NestedTensors
from pytest_torchmem.operators.reduction.buffers import sum_buffers
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import ALL, Request, passing
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.dispatch.keys import below_autograd
from pytest_torchmem.torch_private.tensors.tensors import nested_sizes

layer_norm = operator("aten::native_layer_norm")
layer_norm.workspace("cuda")(
    copied(first=True, input=CONTIGUOUS, weight=CONTIGUOUS, bias=CONTIGUOUS)
)
layer_norm_backward = operator("aten::native_layer_norm_backward")
rms_norm = operator("aten::_fused_rms_norm", kernel_on=frozenset({"cuda"}))
rms_norm.workspace("cuda")(copied(first=True, input=CONTIGUOUS, weight=CONTIGUOUS))
rms_norm_backward = operator("aten::_fused_rms_norm_backward")


class LayerNorm(NamedTuple):
    """What is asked of a layer norm, by the names of the schema's arguments."""

    input: Tensor
    normalized_shape: Sequence[int]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@layer_norm.meta("cpu")
def outputs_on_cpu(norm: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics in the type of the parameters, not in float; layer_norm_cpu."""
    given = (norm.weight, norm.bias)
    return _outputs(norm, next((one for one in given if one is not None), norm.input).dtype)


@layer_norm.meta("cuda")
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


@layer_norm.workspace("cpu")
def copies_on_cpu(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> int:
    """Contiguous copies of what is not; layer_norm_cpu."""
    return contiguous_copy(input) + contiguous_copy(weight) + contiguous_copy(bias)


@layer_norm_backward.meta()
def gradients(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Contiguous whatever the layout of the input; layer_norm_backward_cpu and _cuda."""
    return tuple(
        like(tensor) if wanted and tensor is not None else None
        for tensor, wanted in zip((input, weight, bias), output_mask, strict=True)
    )


@layer_norm_backward.values("cuda")
def gradients_as_on_cuda(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """In the type of the statistics, which CUDA accumulates in; the CPU's kernel wants them in the
    type of the parameters.
    """
    given = (grad_out, input, mean, rstd, weight, bias)
    wide = [one if one is None else one.to(mean.dtype) for one in given]
    made = torch.ops.aten.native_layer_norm_backward.default(
        *wide[:2], normalized_shape, *wide[2:], output_mask
    )
    return tuple(
        one if one is None or of is None else one.to(of.dtype)
        for one, of in zip(made, (input, weight, bias), strict=True)
    )


@layer_norm_backward.workspace("cpu")
def backward_on_cpu(
    machine: Host,
    outputs: Sequence[Tensor | None],
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
) -> int:
    """Contiguous copies, and sums of gamma and beta per thread; LayerNormBackwardKernelImplInternal
    of the CPU.
    """
    copies = contiguous_copy(input) + contiguous_copy(weight)
    if input.numel() == 0:
        return copies
    copies += contiguous_copy(grad_out)
    if outputs[1] is None and outputs[2] is None:
        return copies
    columns = math.prod(normalized_shape)
    return copies + 2 * machine.threads * columns * input.element_size()


@layer_norm_backward.workspace("cuda")
@rms_norm_backward.workspace("cuda")
def backward_on_cuda(
    machine: Gpu,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    output_mask: Sequence[bool],
    bias: Tensor | None = None,
) -> tuple[Request, ...]:
    """Dense copies, the gradient's when the outputs are made, and partial gradients, of RMS norm's
    without beta;
    ``LayerNormBackwardKernelImplInternal``, ``_fused_rms_norm_backward_cuda``.
    """
    beta = bias is not None and output_mask[2]
    return (
        contiguous_copy(input),
        contiguous_copy(weight),
        ALL,
        contiguous_copy(grad_out),
        *_partial_gradients(machine, input, normalized_shape, weight, output_mask[1] + beta),
    )


@layer_norm.nested()
def of_nested(nested: NestedTensors, norm: LayerNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Of the buffer; native/nested/NestedTensorMath.cpp, nested_layer_norm."""
    rows = norm.input.values().view(-1, *norm.normalized_shape)
    output, mean, rstd = torch.ops.aten.native_layer_norm.default(*norm._replace(input=rows))
    sizes = nested_sizes(norm.input)
    return nested.wrap(output.view(-1), sizes), mean.view(-1), rstd.view(-1)


def _partial_gradients(
    gpu: Gpu, input: Tensor, shape: Sequence[int], weight: Tensor | None, number: int
) -> tuple[int, ...]:
    """Of many short rows, a partial sum for every 32 of them, each summed by a reduction into a
    tensor that takes the place of the one made before.

    ``LaunchGammaBetaBackwardCUDAKernel``.
    """
    columns = math.prod(shape)
    rows = input.numel() // columns if columns else 0
    few = rows <= 64 * 1024 or columns // 32 >= gpu.multiprocessors // 2
    if weight is None or not number or few:
        return ()
    blocks = min(32 * 1024 // ceil_div(columns, 32), ceil_div(rows, 32))
    partial = blocks * columns * weight.element_size()
    buffers = sum_buffers(gpu, (blocks, columns), 0, weight.dtype)
    summed = (dense_bytes(weight), *passing(*buffers), -dense_bytes(weight))
    return (*[partial] * number, *summed * number)


@operator("aten::rms_norm").path("cuda")
def choose_rms_norm(
    call: CompositeCall,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """The fused kernel, but for channels-last and complex input, or a weight of another dtype;
    ``rms_norm_symint``.
    """
    plain = suggested_format(input) is torch.contiguous_format and not input.is_complex()
    if not plain or (weight is not None and weight.dtype != input.dtype):
        return call()
    return torch.ops.aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


@rms_norm.meta("cuda")
def output_and_reciprocal_root(
    input: Tensor, normalized_shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Contiguous, the root in float or double; ``_fused_rms_norm_cuda``."""
    kept = input.shape[: input.dim() - len(normalized_shape)]
    shape = (*kept, *[1] * len(normalized_shape))
    return like(input), input.new_empty(shape, dtype=_accumulated(input))


@rms_norm_backward.values()
def rms_gradients(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """With the root that the forward kept, in its precision."""
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
def differentiable_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Any:
    """``_fused_rms_norm_cuda``, with its gradient."""
    return cast(Any, _FusedRmsNorm).apply(input, normalized_shape, weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The gradient that derivatives.yaml gives ``_fused_rms_norm`` on CUDA only."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: Sequence[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> Any:
        with below_autograd():
            output, rstd = torch.ops.aten._fused_rms_norm.default(
                input, normalized_shape, weight, eps
            )
        ctx.normalized_shape = normalized_shape
        ctx.save_for_backward(input, weight, rstd)
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


@operator("aten::_weight_norm_interface").workspace("cpu")
def norms(machine: Host, g: Tensor, dim: int) -> int:
    """Each thread's sums along the last dimension; weight_norm_last_dim_kernel."""
    return 0 if dim == 0 else _rows(machine.threads, g)


@operator("aten::_weight_norm_interface_backward").workspace("cpu")
def gradient(machine: Host, saved_g: Tensor, dim: int) -> int:
    """The same; weight_norm_backward_last_dim_kernel."""
    return 0 if dim == 0 else _rows(max(_INTERMEDIATE, machine.threads), saved_g)


def _rows(number: int, g: Tensor) -> int:
    return number * g.numel() * accumulation_type(g.dtype).itemsize


@operator("aten::renorm").decomposition("cpu", "cuda")
def renorm(machine: Host | Gpu, call: GivenCall, self: Tensor, p: float, dim: int) -> Tensor:
    """``TORCH_IMPL_FUNC(renorm_out)``."""
    return _renormed(machine, outputs(call), self, p, dim)


@operator("aten::renorm_").decomposition("cpu", "cuda")
def renorm_in_place(machine: Host | Gpu, self: Tensor, p: float, dim: int) -> Tensor:
    """The same, into the input."""
    return _renormed(machine, self, self, p, dim)


def _renormed(machine: Host | Gpu, result: Tensor, self: Tensor, p: float, dim: int) -> Tensor:
    """Take norms of 16-bit types in float, and their factors in the type itself; on the CPU
    TensorIterator computes these in a common type, and CUDA's kernel casts by itself.
    """
    others = [axis for axis in range(self.dim()) if axis != dim % self.dim()]
    half = self.dtype in (torch.float16, torch.bfloat16)
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
