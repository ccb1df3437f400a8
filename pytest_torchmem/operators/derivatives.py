"""Derivatives that are others on cuda: formulas in C++ that ask the device, and values of backwards
that only cuda has a kernel of, by torch's own derivatives.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.geometry import accumulation_type
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private.keys import below_autograd, with_autograd
from pytest_torchmem.torch_private.tensors import name_node, unwrapped


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


def run_plainly(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function as on a thread that has no trace and no autocast, without gradients."""
    with with_autograd(), torch.no_grad():
        return function(*args)


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
        if not differentiated or unwrapped(self) is not None or _has_tangent(self):
            return NotImplemented
        return function.apply(call, self, *call.args[1:])


def _has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor has a forward derivative."""
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


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
    """``renorm_backward``, of norms in the type that a GPU adds up in; the same file.

    The right side of a product is evaluated before the left.
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
