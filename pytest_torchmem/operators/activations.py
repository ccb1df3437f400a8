"""Activations and softmax, with their gradients, and derivatives that are others on cuda.

native/Activation.cpp, native/GatedLinearUnit.cpp; native/SoftMax.cpp, native/cuda/SoftMax.cu.
Derivatives are formulas in C++ that ask the device, and values of backwards that only cuda has a
kernel of, by torch's own derivatives.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.elementwise import like_first, like_operands
from pytest_torchmem.operators.layouts import NestedTensors
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import (
    CONTIGUOUS,
    accumulation_type,
    contiguous_copy,
    copied,
    dense_bytes,
    lying_alike,
    made_like,
    on_meta,
)
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_nested_kernel
from pytest_torchmem.torch_private.keys import below_autograd, with_autograd
from pytest_torchmem.torch_private.tensors import name_node, nested_sizes, unwrapped


def gradients_of(
    function: Callable[..., Any], inputs: Sequence[Tensor | None], gradients: Sequence[Any]
) -> list[Tensor | None]:
    """Return the gradients of ``function(*inputs)`` by its floating inputs, ``None`` for others.
    ``gradients`` are those of its outputs; an output whose gradient is ``None`` counts for nothing.
    """
    with torch.inference_mode(False), with_autograd(), torch.enable_grad():
        leaves = [None if one is None else one.detach().clone() for one in inputs]
        wanted = [one for one in leaves if one is not None and one.is_floating_point()]
        for leaf in wanted:
            leaf.requires_grad_()
        found = function(*leaves)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        pairs = [
            (output, gradient.to(output.dtype).clone())
            for output, gradient in zip(outputs, gradients, strict=False)
            if gradient is not None and output.requires_grad
        ]
        computed = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                allow_unused=True,
                materialize_grads=True,
            )
        )
        return [
            None if one is None or not one.is_floating_point() else next(computed) for one in leaves
        ]


@contextmanager
def plainly() -> Iterator[None]:
    """Run operators as on a thread that has no trace and no autocast, without gradients."""
    with with_autograd(), torch.no_grad():
        yield


def differentiated_by(
    formula: Callable[..., Tensor], name: str, node: str, saves_result: bool = False
) -> None:
    """Have ``formula`` be the gradient on cuda of an operator of one tensor, ``name``.

    It is called with the gradient, the input, the operator's other arguments and, if the node saves
    it, the result. ``node`` is what torch calls the node of the graph. Inside of a transform of
    functorch and of forward derivatives C++ has the CPU's formula.
    """

    def forward(ctx: Any, call: CompositeCall, self: Tensor, *others: Any) -> Tensor:
        with below_autograd():
            result: Tensor = call.overload(self, *others)
        ctx.others = others
        ctx.save_for_backward(self, *((result,) if saves_result else ()))
        return result

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        self, *result = ctx.saved_tensors
        return None, formula(grad, self, *ctx.others, *result), *[None] * len(ctx.others)

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(node, (torch.autograd.Function,), body)
    name_node(function, node)

    @operator(f"aten::{name}", kernel_on=frozenset({"cuda"})).path("cuda")
    def path(call: CompositeCall, self: Tensor) -> Any:
        """The kernel, with its gradient; torch/csrc/autograd/FunctionsManual.cpp."""
        differentiated = torch.is_grad_enabled() and self.requires_grad
        if not differentiated or unwrapped(self) is not None:
            return NotImplemented
        if torch.autograd.forward_ad.unpack_dual(self).tangent is not None:
            return NotImplemented
        return function.apply(call, self, *call.args[1:])


def evenly_distributed(grad: Tensor, input: Tensor, value: Tensor) -> Tensor:
    """``evenly_distribute_backward``; torch/csrc/autograd/FunctionsManual.cpp."""
    input_is_nan, value_is_nan = input.isnan(), value.isnan()
    mask = (input == value).logical_or_(input_is_nan.logical_and_(value_is_nan))
    count = mask.sum()
    share = grad / count
    result = mask * share
    del share, count, mask, value_is_nan  # in the order in which C++ gives them back
    return result


def of_renorm(grad: Tensor, self: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """``renorm_backward``, of norms in the type that a GPU adds up in; the same file. The right
    side of a product is evaluated before the left.
    """
    dims = [other for other in range(self.dim()) if other != dim % self.dim()]
    dtype = accumulation_type(self.dtype)
    norm = torch.linalg.vector_norm(self, p, dims, keepdim=True, dtype=dtype)
    product = self.conj() * grad
    product = product.real if product.is_complex() else product
    product = product.sum(dims, keepdim=True, dtype=norm.dtype)
    of_norm = _of_norm(product, self, p, norm, dims)
    del product
    inverse = (norm + 1e-7).reciprocal()
    along = inverse * of_norm
    rest = grad - along
    factor = maxnorm * inverse
    scaled = factor * rest
    del factor, rest, along
    converted = scaled.to(grad.dtype)
    result = torch.where(norm > maxnorm, converted, grad)
    del converted, scaled, inverse, of_norm
    return result


def _of_norm(grad: Tensor, self: Tensor, p: float, norm: Tensor, dims: list[int]) -> Tensor:
    """``norm_backward``; the same file."""
    if p == 1:
        return self.sgn() * grad
    if p == 2:
        ratio = self / norm
        zero = norm == 0
        result = grad * ratio.masked_fill_(zero, 0)
        del zero, ratio
        return result
    sizes = self.abs()
    if math.isinf(p):
        largest = sizes.eq(norm).logical_or(sizes.isnan())
        count = largest.sum(dims, keepdim=True)
        share = grad / count
        result = (part := share * largest) * self.sgn()
        del part, share, count, largest
        return result
    powers = sizes.pow_(p - 1 if p < 2 else p - 2)
    del sizes
    if p < 1:
        powers.masked_fill_(self == 0, 0)
    scaled = powers * (self.sgn() if p < 2 else self)
    del powers
    if p < 1:
        power = norm.pow(1 - p)
        return scaled * grad * power
    factor = grad / norm.pow(p - 1)
    return scaled * factor.masked_fill_(norm == 0, 0)


for _name, _node in {
    "max": "MaxBackward1",
    "min": "MinBackward1",
    "median": "MedianBackward0",
    "nanmedian": "NanmedianBackward0",
}.items():
    differentiated_by(evenly_distributed, _name, _node, saves_result=True)
differentiated_by(of_renorm, "renorm", "RenormBackward0")

operator("aten::hardswish_backward", "aten::mish_backward").meta()(like_operands)

operator("aten::log_sigmoid_forward").workspace("cpu")(copied(self=CONTIGUOUS))
operator("aten::log_sigmoid_backward").workspace("cpu")(copied(self=CONTIGUOUS))

operator("aten::glu_backward").meta()(made_like(self=CONTIGUOUS))  # glu_backward_cpu
operator("aten::glu_backward_jvp").meta()(made_like(grad_x=CONTIGUOUS))
operator("aten::glu_jvp").meta()(like_first)


@operator("aten::log_sigmoid_forward").meta("cuda")
def without_buffer(input: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer is the CPU's only; native/cuda/ActivationLogSigmoidKernel.cu."""
    return lying_alike(input), input.new_empty((0,))


@operator("aten::log_sigmoid_backward").values()
def log_sigmoid_gradient(grad_output: Tensor, input: Tensor, buffer: Tensor) -> Any:
    """With the buffer that the CPU's kernel would have kept (vec_log_sigmoid)."""
    if not buffer.numel():
        buffer = input.abs().neg().exp()
    return torch.ops.aten.log_sigmoid_backward.default(grad_output, input, buffer)


@operator("aten::gelu_backward").workspace("cpu")
def gelu_grad(machine: Host, grad_output: Tensor, input: Tensor, approximate: str = "none") -> int:
    """A gradient that does not lie as the input does is reordered by oneDNN; gelu_backward_out_cpu
    and use_mkldnn; ideep's eltwise_backward.
    """
    onednn = machine.onednn and approximate == "none" and input.is_contiguous()
    halves = input.dtype == torch.bfloat16 and machine.computes_in_bfloat16
    if not onednn or input.numel() <= 1 or not (halves or input.dtype == torch.float32):
        return 0
    return contiguous_copy(grad_output)


_aten: Any = torch.ops.aten
_LARGEST_IN_REGISTERS = 1024
_BYTES_IN_REGISTERS = 4096

softmax_backward = operator("aten::_softmax_backward_data")
_WITH_FLOAT_RESULT = {
    _aten.softmax.int: _aten._softmax.default,
    _aten.log_softmax.int: _aten._log_softmax.default,
}


@operator("aten::softmax.int", "aten::log_softmax.int").path("cuda")
def to_float(call: CompositeCall, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Half precision with a float result: one kernel on CUDA, two on the CPU; SoftMax.cpp."""
    if input.dtype is torch.float16 and dtype is torch.float32:
        return _WITH_FLOAT_RESULT[call.overload](input, dim, True)
    return call()


def _with_float(name: str) -> None:
    forward, gradient = getattr(_aten, name), getattr(_aten, f"{name}_backward_data")

    @operator(f"aten::{name}").values("cuda")
    def values(self: Tensor, dim: int, half_to_float: bool) -> Any:
        """The CPU has no kernel with a float result (native/SoftMax.cpp, softmax_cpu_out)."""
        return forward.default(self.float() if half_to_float else self, dim, False)

    @operator(f"aten::{name}_backward_data").values("cuda")
    def gradients(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        """The gradient where the input was half, for which the CPU has no kernel either."""
        return gradient.default(grad_output, output, dim, output.dtype).to(input_dtype)


_with_float("_softmax")
_with_float("_log_softmax")

# ``host_softmax``, ``host_softmax_backward``, and as much on the CPU.
operator("aten::_softmax", "aten::_log_softmax").workspace()(copied(input=CONTIGUOUS))
operator("aten::_log_softmax_backward_data").workspace()(
    copied(grad_output=CONTIGUOUS, output=CONTIGUOUS)
)
softmax_backward.workspace("cpu")(copied(grad_output=CONTIGUOUS, output=CONTIGUOUS))


@softmax_backward.workspace("cuda")
def product_and_copies(grad_output: Tensor, output: Tensor) -> tuple[int, ...]:
    """The product of gradient and output, and dense copies; ``softmax_backward_cuda_out``."""
    product = on_meta(grad_output) * on_meta(output)
    return (dense_bytes(product), contiguous_copy(product), contiguous_copy(output))


# -- with a mask -----------------------------------------------------------------------------------

operator("aten::_masked_softmax").meta()(made_like(self=CONTIGUOUS))
operator("aten::_masked_softmax_backward").meta()(made_like(grad_output=CONTIGUOUS))


def _fits_in_registers(values: Tensor, dim: int | None) -> bool:
    """Whether a kernel of its own takes rows of that length; ``masked_softmax_cuda``."""
    size = values.shape[-1 if dim is None else dim] if values.dim() else 1
    last = dim is None or dim % max(1, values.dim()) == values.dim() - 1
    small = size * values.element_size() <= _BYTES_IN_REGISTERS
    return last and small and size <= _LARGEST_IN_REGISTERS


@operator("aten::_masked_softmax").workspace("cuda")
def masked_on_cuda(
    input: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> int:
    """A masked copy where the kernel of its own does not fit; ``masked_softmax_cuda``."""
    expanded = mask.is_contiguous() and not (mask_type == 0 and mask.dim() < input.dim())
    return 0 if expanded and _fits_in_registers(input, dim) else dense_bytes(input)


@operator("aten::_masked_softmax_backward").workspace("cuda")
def masked_backward_on_cuda(
    grad_output: Tensor, output: Tensor, mask: Tensor, dim: int | None = None
) -> tuple[int, ...]:
    """Dense copies, a product; without its own kernel two; ``masked_softmax_backward_cuda``."""
    copies = tuple(map(contiguous_copy, (grad_output, output, mask)))
    product = dense_bytes(output)
    return (*copies, product, 0 if _fits_in_registers(output, dim) else product)


# -- of nested tensors -----------------------------------------------------------------------------

_MASK_OF_KEYS = 1
"""``mask_type`` of a mask with a row for each sample."""


@operator("aten::_nested_tensor_softmax_with_shape").nested("cuda")
def softmax_with_shape(nested: NestedTensors, self: Tensor, query: Tensor) -> Any:
    """native/nested/NestedTensorTransformerFunctions.cpp, NestedTensor_softmax_dropout_cuda."""
    mask = self.new_empty((self.size(0), self.size(2)), dtype=torch.bool)
    lengths = [row[0] for row in nested_sizes(query).tolist()]

    def kernel(made: Tensor) -> None:
        made.copy_(torch.arange(made.size(1)) >= torch.tensor(lengths)[:, None])

    nested.launch("NestedTensor_to_mask", kernel, mask)
    return _aten._masked_softmax.default(self, mask, self.dim() - 1, _MASK_OF_KEYS)


@operator("aten::_safe_softmax").nested("cuda")
def safe_softmax_of_nested(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """The attention of two nested tensors, multiplied out.

    C++ chooses the implementation without asking the dispatcher, and for the CPU: where a GPU has
    a fused kernel (for anything but float64) it comes to this as well.
    """
    if self.dtype is torch.float64:
        return run_nested_kernel(_aten._safe_softmax.default, self, dim, dtype)
    raise RuntimeError(
        "attention on nested tensors of the strided layout that a GPU may have a fused kernel for "
        "is not modelled on cuda outside of torch.nn.TransformerEncoder. Make them with "
        "layout=torch.jagged, with heads of a size that fused kernels take (a multiple of 8)"
    )
