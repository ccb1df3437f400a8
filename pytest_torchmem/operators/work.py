"""The work of one call: floating-point operations, and the bytes that its kernel moves.

``torch.utils.flop_counter`` has formulas for matrix products, convolutions and attention on cuda.
The operators of that kind that it lacks, what multiplies and adds along a dimension, have one in
their record (``flops``), by the table at the end. As there, pointwise operators, reductions and
normalisations count no operations: they take the time that their bytes need, which are counted for
every operator.

Factorizations and solutions: native/BatchLinearAlgebraKernel.cpp and
native/cuda/linalg/BatchLinearAlgebra.cpp call the routine of LAPACK that is named, or the same of
MAGMA and cuSOLVER. Leading terms of the counts in LAPACK Working Note 41, appendix C; a batch has
them for each of its matrices. What is iterated (eigenvalues, singular values, least squares by
them) has none: values decide how often.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import aten, operator
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.profile.operator_calls import KnownWork
from pytest_torchmem.step.trees import argument_tensors, replace_leaves, replace_tensors
from pytest_torchmem.torch_private.keys import OpOverload

_WRITTEN_ONLY = frozenset(
    aten("""
        bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_
        zero_
    """)
)
"""Operators that do not read what they write to."""
_NOTHING_WRITTEN = ("aten::empty", "aten::new_empty", "aten::_efficientzerotensor")


class CallWork:
    """The work of calls of one operator and geometry; operations are counted when first read."""

    def __init__(self, spec: OperatorSpec, args: Any, kwargs: Any, result: Any) -> None:
        self.spec = spec
        self._geometries = replace_tensors((args, dict(kwargs), result), Geometry)
        self.read, self.written = _moved(spec, args, kwargs, result)
        self.inner: tuple[CallWork, ...] | None = None
        """The calls that the operator's body made."""

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with a ``Geometry`` in the place of each tensor."""
        args, kwargs, _ = self._geometries
        return args, kwargs

    @cached_property
    def flops(self) -> int:
        """Return the floating-point operations; of a body without formula, those of its calls."""
        own = self.spec.flops
        of_torch = None if own is not None else _formula_of_torch(self.spec.overload)
        if own is None and of_torch is None:
            return sum(work.flops for work in self.inner or ())
        args, kwargs, result = replace_leaves(self._geometries, Geometry, Geometry.on_meta)
        if own is not None:
            return int(own(args, kwargs, outputs=result))
        try:
            return int(of_torch(*args, **kwargs, out_val=result)) if of_torch is not None else 0
        except (AssertionError, TypeError, ValueError, IndexError):
            return 0  # called with what torch's formula does not know

    @property
    def has_formula(self) -> bool:
        """Whether a formula counts the operations, of the operator or of one that it is made of."""
        if "flops" in vars(self) or self.spec.flops is not None:
            return True
        if _formula_of_torch(self.spec.overload) is not None:
            return True
        return any(work.has_formula for work in self.inner or ())

    def of_entries(self, flops: int, read: int) -> None:
        """Count what goes by the entries of sparse tensors, which a ``Geometry`` does not tell."""
        self.flops, self.read = flops, read

    def of_body(self, inner: "tuple[CallWork, ...]") -> None:
        """Move the bytes that the calls of the operator's body moved."""
        self.inner = inner
        self.read = sum(work.read for work in inner)
        self.written = sum(work.written for work in inner)

    def __reduce__(self) -> Any:
        return KnownWork, (self.flops, self.read, self.written)


class Geometry:
    """What a formula may ask of a tensor."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.stride = tensor.stride() if tensor.layout is torch.strided else None
        """None where the tensor has no strides (sparse)."""

    def on_meta(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def _formula_of_torch(overload: OpOverload) -> Callable[..., Any] | None:
    """Return torch's own formula of an operator, which is called as the operator is, or None."""
    # Imported when first asked: it imports triton, where there is one.
    from torch.utils.flop_counter import flop_registry

    found: Callable[..., Any] | None = flop_registry.get(overload.overloadpacket)
    return found


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


def _sizes(matrix: Tensor) -> tuple[int, int, int]:
    """Return the number of matrices, their rows and their columns."""
    *batch, rows, columns = matrix.shape
    return math.prod(batch), rows, columns


def _lu(A: Tensor) -> float:
    """GETRF; GEQRF has twice as many."""
    batch, rows, columns = _sizes(A)
    less, more = sorted((rows, columns))
    return batch * less**2 * (more - less / 3)


def _orthogonal(made: Tensor, vectors: int) -> float:
    """ORGQR: the first columns of the product of so many reflections."""
    batch, rows, columns = _sizes(made)
    both = (rows + columns) * vectors
    return batch * vectors * (4 * rows * columns - 2 * both + 4 * vectors**2 / 3)


def _qr(A: Tensor, outputs: tuple[Tensor, Tensor]) -> int:
    """GEQRF, and ORGQR where Q is asked for."""
    q = outputs[0]
    return int(2 * _lu(A)) + (int(_orthogonal(q, min(A.shape[-2:]))) if q.numel() else 0)


def _trilinear(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
) -> int:
    """Two multiplications and an addition for each element of the expanded product, which is made
    over all dimensions and then summed; native/Linear.cpp.
    """
    sizes = [1] * (i1.dim() + len(expand1))
    for tensor, missing in ((i1, expand1), (i2, expand2), (i3, expand3)):
        kept = [at for at in range(len(sizes)) if at not in missing]
        for at, size in zip(kept, tensor.shape, strict=True):
            sizes[at] = max(sizes[at], size)
    return 3 * math.prod(sizes)


def _recurrent(input: Tensor, weight: Sequence[Tensor]) -> int:
    """The products of every step with every matrix of weights."""
    return 2 * input.shape[:-1].numel() * sum(one.numel() for one in weight if one.dim() > 1)


def _attention(query: Tensor, key: Tensor, numbers: int) -> int:
    """So many numbers for each pair of a query and a key."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * numbers


def _distances(x1: Tensor, x2: Tensor) -> int:
    """A difference, its power and the sum of them, for every pair and element."""
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    return 3 * math.prod((*batch, *x1.shape[-2:], x2.shape[-2]))


def _transform(self: Tensor, dim: Sequence[int], outputs: Tensor) -> float:
    """5 N log2 N for each transform of N complex numbers, half of it where one side is real: the
    usual count for radix 2 (Van Loan, Computational Frameworks for the FFT, 1.4).
    """
    larger = max(self, outputs, key=lambda tensor: tensor.numel())
    length = math.prod(larger.shape[at] for at in dim)
    count = 5 * larger.numel() * math.log2(max(length, 2))
    return count if self.is_complex() and outputs.is_complex() else count / 2


_FORMULAS: Mapping[str, Callable[..., float]] = {
    "_int_mm": lambda input, mat2: 2 * input.numel() * mat2.shape[-1],
    "addmm_ _addmm_activation": lambda mat1, mat2: 2 * mat1.numel() * mat2.shape[-1],
    "addbmm addbmm_ baddbmm_": lambda batch1, batch2: 2 * batch1.numel() * batch2.shape[-1],
    # Their weight has a row for each element of the output, or 8 for each tile.
    "_weight_int8pack_mm": lambda input, mat2: 2 * input.numel() * mat2.shape[0],
    "_weight_int4pack_mm": lambda input, mat2: 2 * input.numel() * mat2.shape[0] * 8,
    "mkldnn_linear": lambda input, weight: 2 * input.numel() * weight.shape[0],
    # What ``offs`` cuts is cut into groups, of which each number is in one.
    "_grouped_mm": lambda input, mat2: (
        2 * input.shape[-3 if mat2.dim() == 3 else -2 :].numel() * mat2.shape[-1]
    ),
    # Each element of a matrix or a vector is multiplied and added once.
    "addmv addmv_": lambda mat: 2 * mat.numel(),
    "mv dot vdot": lambda input: 2 * input.numel(),
    "addr addr_": lambda vec1, vec2: 2 * vec1.numel() * vec2.numel(),
    "_trilinear": _trilinear,
    # ``conv_flop_count`` of torch/utils/flop_counter.py: filters go over the output, or the input.
    "cudnn_convolution_relu cudnn_convolution_add_relu slow_conv3d_forward slow_conv_dilated2d "
    "slow_conv_dilated3d": lambda weight, outputs: 2 * outputs.numel() * weight[0].numel(),
    "cudnn_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d": (
        lambda input, weight: 2 * input.numel() * weight[0].numel()
    ),
    # Scores and the weighted sum, causal or not, as torch counts attention on cuda; then scores
    # again, and the gradients of scores, value, query and key.
    "_scaled_dot_product_flash_attention_for_cpu": lambda query, key, value: _attention(
        query, key, query.shape[-1] + value.shape[-1]
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda query, key, value: _attention(
        query, key, 3 * query.shape[-1] + 2 * value.shape[-1]
    ),
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": lambda input, weight: 2 * _recurrent(input, weight),
    "mkldnn_rnn_layer": lambda input, weight0, weight1: _recurrent(input, [weight0, weight1]),
    "mkldnn_rnn_layer_backward": lambda input, weight1, weight2: (
        2 * _recurrent(input, [weight1, weight2])
    ),
    "_cdist_forward": _distances,
    "_fft_c2c _fft_r2c _fft_c2r": _transform,
    # POTRF; GETRF, of determinants too, beside which the product of the diagonal does not count;
    # GETRF and GETRS for each column of the result; GETRF and GETRI.
    "linalg_cholesky_ex": lambda input: _sizes(input)[0] * input.shape[-2] ** 3 // 3,
    "linalg_lu_factor_ex _linalg_det _linalg_slogdet": _lu,
    "_linalg_solve_ex": lambda A, outputs: int(_lu(A)) + 2 * A.shape[-1] * outputs[0].numel(),
    "linalg_inv_ex": lambda A: 2 * _sizes(A)[0] * A.shape[-2] ** 3,
    # GETRS and POTRS: two triangles; TRTRS: one.
    "linalg_lu_solve": lambda LU, outputs: 2 * LU.shape[-1] * outputs.numel(),
    "_cholesky_solve_helper": lambda A, outputs: 2 * A.shape[-1] * outputs.numel(),
    "linalg_solve_triangular": lambda input, outputs: input.shape[-1] * outputs.numel(),
    # GEQRF and ORGQR.
    "geqrf": lambda input: 2 * _lu(input),
    "linalg_qr": _qr,
    "linalg_householder_product": lambda input, tau: _orthogonal(input, tau.shape[-1]),
}
"""Of an operator's arguments and ``outputs``; those without a comment are products."""

for _names, _formula in _FORMULAS.items():
    _formula.__doc__ = _formula.__doc__ or "A row of the table of formulas."
    operator(*aten(_names)).flops()(_formula)
