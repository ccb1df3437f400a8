"""The work of one call: floating-point operations, and the bytes that its kernel moves.

``torch.utils.flop_counter`` has formulas for matrix products, convolutions and attention on cuda.
The formulas here, of the same kind, are for the operators of that kind that it lacks: what
multiplies and adds along a dimension. As there, pointwise operators, reductions and normalisations
count no operations: they take the time that their bytes need, which are counted for every operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.profile.operator_calls import KnownWork
from pytest_torchmem.step.trees import argument_tensors, replace_leaves, replace_tensors
from pytest_torchmem.torch_private.operators import OpOverload

Formula = Callable[..., int]
FORMULAS: dict[str, Formula] = {}
"""By the names of operators without their overloads. They are called as the operator is, with
tensors on ``meta``, and with what it returned as ``out_val``."""

_WRITTEN_ONLY = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)
"""Operators that do not read what they write to."""
_NOTHING_WRITTEN = ("aten::empty", "aten::new_empty", "aten::_efficientzerotensor")


def _formula(*names: str) -> Callable[[Formula], Formula]:
    def register(formula: Formula) -> Formula:
        for name in names:
            if name in FORMULAS:
                raise ValueError(f"{name} has a formula already")
            FORMULAS[name] = formula
        return formula

    return register


@_formula("aten::mv")
def matrix_vector(matrix: Tensor, vector: Tensor, **_: Any) -> int:
    """Each element of the matrix is multiplied and added once."""
    return 2 * matrix.numel()


@_formula("aten::addmv", "aten::addmv_")
def added_matrix_vector(self: Tensor, matrix: Tensor, vector: Tensor, **_: Any) -> int:
    """As ``mv``."""
    return 2 * matrix.numel()


@_formula("aten::dot", "aten::vdot")
def inner_product(self: Tensor, other: Tensor, **_: Any) -> int:
    """Each element is multiplied and added once."""
    return 2 * self.numel()


@_formula("aten::addr", "aten::addr_")
def outer_product(self: Tensor, one: Tensor, other: Tensor, **_: Any) -> int:
    """Each element of the result is multiplied and added once."""
    return 2 * one.numel() * other.numel()


@_formula("aten::addbmm", "aten::addbmm_", "aten::baddbmm_")
def summed_batched_product(self: Tensor, batch1: Tensor, batch2: Tensor, **_: Any) -> int:
    """As ``bmm``."""
    return 2 * batch1.numel() * batch2.shape[-1]


@_formula("aten::addmm_", "aten::_addmm_activation")
def added_product(self: Tensor, mat1: Tensor, mat2: Tensor, **_: Any) -> int:
    """As ``mm``: an activation is pointwise."""
    return 2 * mat1.numel() * mat2.shape[-1]


@_formula("aten::_int_mm")
def integer_product(self: Tensor, mat2: Tensor, **_: Any) -> int:
    """As ``mm``, of integers."""
    return 2 * self.numel() * mat2.shape[-1]


@_formula("aten::_weight_int8pack_mm", "aten::mkldnn_linear")
def product_with_rows(input: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """As ``mm``; the weight has a row for each element of the output."""
    return 2 * input.numel() * weight.shape[0]


@_formula("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores and the weighted sum, causal or not, as torch counts attention on cuda."""
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (size + value.shape[-1])


@_formula("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_on_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """Scores again, and the gradients of scores, value, query and key."""
    batch, heads, queries, size = query.shape
    pairs = batch * heads * queries * key.shape[-2]
    return 2 * pairs * (3 * size + 2 * value.shape[-1])


@_formula("aten::_trilinear")
def trilinear(i1: Tensor, i2: Tensor, i3: Tensor, *given: Any, out_val: Any, **_: Any) -> int:
    """Two multiplications and an addition for each element of the expanded product.

    native/Linear.cpp, ``_trilinear``: the product is made over all dimensions and then summed.
    """
    expands = given[:3]
    sizes = [0] * (i1.dim() + len(expands[0]))
    for tensor, missing in zip((i1, i2, i3), expands, strict=True):
        kept = [at for at in range(len(sizes)) if at not in missing]
        for at, size in zip(kept, tensor.shape, strict=True):
            sizes[at] = max(sizes[at], size)
    return 3 * math.prod(max(size, 1) for size in sizes)


@_formula("aten::mkldnn_rnn_layer")
def layer_of_onednn(input: Tensor, weight0: Tensor, weight1: Tensor, *_: Any, **__: Any) -> int:
    """The products of every step with both weights."""
    steps = input.shape[0] * input.shape[1]
    return 2 * steps * (weight0.numel() + weight1.numel())


@_formula("aten::mkldnn_rnn_layer_backward")
def layer_of_onednn_backward(
    input: Tensor, weight1: Tensor, weight2: Tensor, *_: Any, **__: Any
) -> int:
    """Of each product the gradients of both of its factors."""
    return 2 * layer_of_onednn(input, weight1, weight2)


@_formula("aten::_cudnn_rnn")
def layers_of_cudnn(input: Tensor, weight: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """The products of every step with every matrix of weights."""
    steps = math.prod(input.shape[:-1])
    return 2 * steps * sum(one.numel() for one in weight if one.dim() > 1)


@_formula("aten::_cudnn_rnn_backward")
def layers_of_cudnn_backward(input: Tensor, weight: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Of each product the gradients of both of its factors."""
    return 2 * layers_of_cudnn(input, weight)


@_formula("aten::_cdist_forward")
def distances(x1: Tensor, x2: Tensor, *_: Any, **__: Any) -> int:
    """A difference, its power and the sum of them, for every pair and element."""
    return 3 * x1.numel() * x2.shape[-2]


@_formula("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r")
def fourier(self: Tensor, dim: Sequence[int], *_: Any, out_val: Any, **__: Any) -> int:
    """5 N log2 N for each transform of N complex numbers, half of it where one side is real.

    The usual count for radix 2 (Van Loan, Computational Frameworks for the FFT, 1.4).
    """
    result: Tensor = out_val
    larger = max(self, result, key=lambda tensor: tensor.numel())
    length = math.prod(larger.shape[at] for at in dim)
    one = 5 * larger.numel() * math.log2(max(length, 2))
    both_complex = self.is_complex() and result.is_complex()
    return int(one if both_complex else one / 2)


class CallWork:
    """The work of calls of one operator and geometry; operations are counted when first read."""

    def __init__(self, spec: OperatorSpec, args: Any, kwargs: Any, result: Any) -> None:
        self._overload = spec.overload
        self._geometries = replace_tensors((args, dict(kwargs), result), _Geometry)
        self.read, self.written = _moved(spec, args, kwargs, result)
        self.inner: tuple[CallWork, ...] | None = None
        """The calls that the operator's body made."""

    @cached_property
    def flops(self) -> int:
        """Return the floating-point operations; of a body without formula, those of its calls."""
        formula = formula_of(self._overload)
        if formula is None:
            return sum(work.flops for work in self.inner or ())
        args, kwargs, result = replace_leaves(self._geometries, _Geometry, _Geometry.on_meta)
        try:
            return int(formula(*args, **kwargs, out_val=result))
        except (AssertionError, TypeError, ValueError, IndexError):
            return 0  # called with what the formula does not know

    def of_body(self, inner: tuple[CallWork, ...]) -> None:
        """Move the bytes that the calls of the operator's body moved."""
        self.inner = inner
        self.read = sum(work.read for work in inner)
        self.written = sum(work.written for work in inner)

    def __reduce__(self) -> Any:
        return KnownWork, (self.flops, self.read, self.written)


class _Geometry:
    """What a formula may ask of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def on_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def formula_of(overload: OpOverload) -> Formula | None:
    """Return the formula of an operator: torch's own, one of these, or None for neither."""
    # Imported when first asked: it imports triton, where there is one.
    from torch.utils.flop_counter import flop_registry

    registered: Formula | None = flop_registry.get(overload.overloadpacket)
    return registered or FORMULAS.get(str(overload.name()).partition(".")[0])


def _moved(spec: OperatorSpec, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes, each tensor once."""
    written = {id(one): one for one in argument_tensors(spec.written(args, kwargs))}
    given = {id(one): one for one in argument_tensors((args, kwargs))}
    made = {id(one): one for one in argument_tensors(result) if id(one) not in given}
    family = spec.name.partition(".")[0]
    if family.startswith(_NOTHING_WRITTEN):
        return 0, 0
    unread = set(written) if family in _WRITTEN_ONLY or spec.name.endswith("out") else set()
    read = sum(_bytes(tensor) for name, tensor in given.items() if name not in unread)
    return read, sum(map(_bytes, {**written, **made}.values()))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; an expanded one has each but once."""
    try:
        return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # a sparse tensor has no storage of its own
        return 0
