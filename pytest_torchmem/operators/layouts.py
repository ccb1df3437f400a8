"""Sparse and nested tensors: operators on the strided ones that they hold, in place of kernels.

An operator on a COO tensor (gradients of ``nn.Embedding(sparse=True)`` and their optimizers) is put
together here from operators on its indices and values, as its CPU kernel does
(native/sparse/SparseTensor.cpp, SparseTensorMath.cpp).

A compressed one (CSR, CSC, BSR, BSC) holds two tensors of indices, which have to be known where
they decide anything, and its values. torch's kernels for it are for the most part C++ functions
that call operators on those three. The products read the values, and have a kernel here
(native/sparse/SparseCsrTensorMath.cpp, SparseBlas.cpp, native/mkl/SparseBlasImpl.cpp).

Sizes, strides and offsets of a nested tensor's parts stay on the host; a kernel on a GPU is given
those that it needs.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.indexing import selects_serially
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.operators.workspace import HALVES
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_cpu_kernel, run_nested_kernel
from pytest_torchmem.torch_private.keys import OpOverload, outside_interception
from pytest_torchmem.torch_private.tensors import (
    nested_sizes,
    sparse_indices,
    sparse_values,
    specified_elements,
)

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_aten: Any = torch.ops.aten


def compressed_indices(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor's compressed indices (where rows or columns begin) and its plain ones."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def compressed_like(tensor: Tensor, compressed: Tensor, plain: Tensor, values: Tensor) -> Tensor:
    """Return a compressed tensor of the shape and layout of ``tensor``, of other parts."""
    made: Tensor = _aten._sparse_compressed_tensor_unsafe.default(
        compressed, plain, values, list(tensor.shape), dtype=values.dtype, layout=tensor.layout
    )
    return made


def sparse_of(
    shape: Sequence[int], indices: Tensor, values: Tensor, coalesced: bool | None
) -> Tensor:
    made: Tensor = _aten._sparse_coo_tensor_unsafe.default(
        indices, values, list(shape), is_coalesced=coalesced
    )
    return made


def entries(tensor: Tensor) -> int:
    """Return how many numbers a sparse tensor has: all of a block that has any."""
    values = sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
    return values.numel()


def multiplied(first: Tensor, second: Tensor) -> int:
    """Return the floating-point operations of a product of a sparse and a dense matrix; 0 of two
    sparse ones, where it goes by which entries meet.
    """
    if second.layout is torch.strided:
        return 2 * entries(first) * second.shape[-1]
    return 2 * entries(second) * first.shape[-2] if first.layout is torch.strided else 0


def unsupported_layout(operator: OpOverload, reason: str) -> UnsupportedOperatorError:
    """Return the error for an operator on sparse tensors that a trace does not model."""
    return UnsupportedOperatorError(
        f"{operator.name()} is not supported in a trace: {reason}. Convert sparse tensors with "
        "to_dense(), or skip this call while tracing"
    )


_WITH_PLACES = ("amax", "amin", "max", "min")

# Their kernels for compressed tensors call others, and read no values themselves; as those that are
# composite for all layouts do.
operator(
    """
        _nnz _sparse_compressed_tensor_unsafe _sparse_compressed_tensor_with_dims _to_copy
        _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr alias
        ccol_indices clone col_indices crow_indices dense_dim detach empty empty_like fill_
        is_same_size mm row_indices sparse_compressed_tensor sparse_dim sparse_mask sum transpose
        values zero_
    """,
    compressed_by_operators=True,
)
# The same function of each value (native/sparse/SparseCsrTensorMath.cpp, CREATE_UNARY_UFUNC and its
# like): to a new tensor, in place, or to one that is given.
_OF_EACH_VALUE = """
    abs asin asinh atan atanh ceil deg2rad erf erfinv expm1 floor frac isinf isnan isneginf isposinf
    log1p neg rad2deg relu round sgn sign signbit sin sinh sqrt tan tanh trunc
"""
_ONLY_NEW = ("isinf", "isnan", "isneginf", "isposinf", "signbit")
operator(
    _OF_EACH_VALUE,
    " ".join(f"{name}_" for name in _OF_EACH_VALUE.split() if name not in _ONLY_NEW),
    "angle conj_physical conj_physical_ copy_ resize_as_sparse_ select",
    compressed_by_operators=True,
)
operator(
    """
        _sparse_compressed_tensor_unsafe _sparse_compressed_tensor_with_dims _to_sparse_bsc
        _to_sparse_bsr _to_sparse_csc _to_sparse_csr sparse_compressed_tensor.comp_plain_value
        sparse_compressed_tensor.comp_plain_value_size
    """,
    kind=OperatorKind.COMPRESSED,
)


@operator("aten::addmm", asks_cusparse=True).compressed()
def product(machine: Host | Gpu, self: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """A sparse matrix by a dense one. MKL wants indices of 32 bits, and MKL and cuSPARSE the dense
    matrix by rows or by columns; native/mkl/SparseBlasImpl.cpp, addmm_dense_result,
    prepare_dense_matrix_for_mkl; native/sparse/cuda/SparseBlasImpl.cpp, spmm.
    """
    if self.layout is not torch.strided:
        raise unsupported_layout(_aten.addmm.default, "it adds a product to a sparse tensor")
    result = self.new_empty((mat1.size(0), mat2.size(1)))
    if not result.numel() or any(
        tensor.layout is not torch.strided and not specified_elements(tensor)
        for tensor in (mat1, mat2)
    ):
        return result
    if mat1.layout is torch.sparse_csr and mat2.layout is torch.strided:
        _multiply(machine, mat1, mat2, by_rows=True)
    elif mat1.layout is torch.strided and mat2.layout is torch.sparse_csr:
        _multiply(
            machine, mat2.transpose(0, 1).to_sparse_csr(), mat1.transpose(0, 1), by_rows=False
        )
    elif mat1.layout is torch.strided and mat2.layout is torch.sparse_csc:
        _multiply(machine, mat2.transpose(0, 1), mat1.transpose(0, 1), by_rows=False)
    else:
        raise unsupported_layout(
            _aten.addmm.default, f"it multiplies {mat1.layout} by {mat2.layout}"
        )
    return result


def _multiply(machine: Host | Gpu, sparse: Tensor, matrix: Tensor, by_rows: bool) -> None:
    """Copies of what the library cannot read; MKL wants the dense matrix in the result's order."""
    rows, columns = matrix.shape
    across, along = matrix.stride()
    fits_by_rows = along == 1 and across >= max(1, columns)
    fits_by_columns = across == 1 and along >= max(1, rows)
    by_mkl = isinstance(machine, Host)
    in_order = fits_by_rows if by_rows else fits_by_columns
    fits = in_order if by_mkl else fits_by_rows or fits_by_columns
    dense = matrix if fits else matrix.clone(memory_format=torch.contiguous_format)
    if by_mkl:
        crow = sparse.crow_indices().to(torch.int32)
        column = sparse.col_indices().to(torch.int32)
        del column, crow
    del dense


@operator("aten::mul.Tensor").compressed()
def scaled(self: Tensor, other: Tensor) -> Tensor:
    """The entries by a number; native/sparse/SparseCsrTensorMath.cpp, mul_sparse_csr."""
    matrix, factor = (self, other) if self.layout in COMPRESSED else (other, self)
    if factor.layout is not torch.strided or factor.dim():
        raise unsupported_layout(_aten.mul.Tensor, "its arguments are compressed sparse tensors")
    compressed, plain = compressed_indices(matrix)
    return compressed_like(matrix, compressed.clone(), plain.clone(), matrix.values() * factor)


@operator("aten::sparse_sampled_addmm", asks_cusparse=True).compressed()
def sampled_product(machine: Host | Gpu, self: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
    """Products where there is an entry; native/sparse/SparseBlas.cpp,
    sparse_sampled_addmm_out_sparse_csr_cpu; native/sparse/cuda/SparseBlas.cpp.
    """
    crow = self.crow_indices()
    empty = crow.new_empty((1,))
    compressed = crow.new_empty(crow.shape)
    del empty
    columns = self.col_indices().new_empty(self.col_indices().shape)
    values = self.values().new_empty(self.values().shape)
    if isinstance(machine, Host) and mat1.numel() and mat2.numel():
        first, second = mat1.contiguous(), mat2.transpose(-2, -1).contiguous()
        del second, first
    return compressed_like(self, compressed, columns, values)


# A row by a column for each entry; as ``mm``, each entry by a row.
operator("aten::sparse_sampled_addmm").entry_flops()(
    lambda input, mat1: 2 * entries(input) * mat1.shape[-1]
)
operator("_sparse_mm_reduce_impl").entry_flops()(lambda input, other: multiplied(input, other))


@operator("aten::_sparse_mm_reduce_impl", not_on=frozenset({"cuda"})).compressed()
def reduced_product(
    machine: Host, self: Tensor, other: Tensor, reduce: str
) -> tuple[Tensor, Tensor]:
    """A dense product, and for extremes the entries it comes from where a backward follows;
    native/sparse/SparseCsrTensorMath.cpp, _sparse_mm_reduce_impl_sparse_csr_cpu.
    """
    out = other.new_zeros((self.size(0), other.size(1)))
    places = self.col_indices().new_empty((0,))
    trains = torch.is_grad_enabled() and (self.requires_grad or other.requires_grad)
    if reduce in _WITH_PLACES and trains:
        places = places.new_empty(out.shape)
    _sum_in_float(machine, out)
    return out, places


def _sum_in_float(machine: Host, out: Tensor) -> None:
    """A row for each thread; native/cpu/SpmmReduceKernel.cpp, spmm_reduce_kernel_impl."""
    if out.dtype in HALVES:
        buffer = out.new_empty((machine.threads, out.size(-1)), dtype=torch.float32)
        del buffer


@operator("aten::_sparse_mm_reduce_impl_backward", not_on=frozenset({"cuda"})).compressed()
def reduced_product_backward(
    machine: Host,
    self: Tensor,
    grad_out: Tensor,
    weight: Tensor,
    reduce: str,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of values and of the dense matrix, the latter by the entries in the order of their
    columns; _sparse_mm_reduce_impl_backward_sparse_csr_cpu.
    """
    crow, columns, values = self.crow_indices(), self.col_indices(), self.values()
    rows = _aten._convert_indices_from_csr_to_coo.default(crow, columns).select(0, 0)
    order = (columns * self.size(0)).add_(rows)
    by_column = order.argsort()
    in_order = columns.index_select(0, by_column)
    ends = _aten._convert_indices_from_coo_to_csr.default(in_order, self.size(1))
    del order, in_order
    of_values = of_weight = None
    if output_mask[0]:
        made = values.new_empty(values.shape)
        of_values = compressed_like(self, crow.clone(), columns.clone(), made)
        _reduced_gradient(grad_out, reduce)
    if output_mask[1]:
        of_weight = weight.new_zeros(weight.shape)
        if reduce in _WITH_PLACES:
            _reduced_gradient(grad_out, reduce)
        else:
            picked = rows.index_select(0, by_column)
            divided = values.new_empty(values.shape) if reduce == "mean" else values
            weights = divided.index_select(0, by_column)
            del divided
            dense = grad_out.contiguous()
            _sum_in_float(machine, of_weight)
            del dense, weights, picked
    del ends, by_column, rows
    return of_values, of_weight


def _reduced_gradient(grad_out: Tensor, reduce: str) -> None:
    """A contiguous gradient, and of extremes what each element adds; native/cpu/
    SpmmReduceKernel.cpp, spmm_reduce_backward_input_arg.
    """
    dense = grad_out.contiguous()
    added = dense.new_empty(dense.shape) if reduce in _WITH_PLACES else None
    del added, dense


class Known(Protocol):
    """What is known of tensors' values."""

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor in real memory, or None where they are not known."""

    def learn(self, tensor: Tensor, values: Tensor) -> None:
        """Know the values of a new tensor."""


# Torch's own kernel takes the tensor apart, and reads no data.
operator(
    """
        _coalesced_ _dimI _dimV _indices _nnz _values alias dense_dim detach is_coalesced
        sparse_dim
    """,
    sparse_metadata=True,
)
# Their kernels call others on indices and values; SparseUnaryOps.cpp, SparseTensorMath.cpp,
# SparseTensor.cpp.
operator(
    _OF_EACH_VALUE,
    """
        _sparse_addmm _sparse_coo_tensor_with_dims _sparse_mm _sparse_sum sparse_coo_tensor
        sparse_resize_ sparse_resize_and_clear_ copy_ copy_sparse_to_sparse_ empty zeros mm mv
        nan_to_num norm sum cat stack unsqueeze transpose t transpose_ _to_sparse_csr empty_like
        zeros_like permute zero_
    """,
    sparse_by_operators=True,
)
# Made of the indices and values that are given.
operator("aten::_sparse_coo_tensor_with_dims_and_tensors", kind=OperatorKind.NATIVE)


@operator("aten::_spdiags", not_on=frozenset({"cuda"})).decomposition("cpu")
def of_diagonals(
    diagonals: Tensor, offsets: Tensor, shape: Sequence[int], layout: torch.layout | None
) -> Tensor:
    """``spdiags``; native/sparse/SparseFactories.cpp. Its kernel takes nothing to fill the parts:
    here each diagonal is copied to its place.
    """
    diagonals = diagonals.unsqueeze(0) if diagonals.dim() == 1 else diagonals
    offsets = offsets.unsqueeze(0) if offsets.dim() == 0 else offsets
    if offsets.numel() != _aten._unique(offsets)[0].numel():
        raise RuntimeError("Offset tensor contains duplicate values")
    length = diagonals.size(1)
    below = offsets.add(shape[0]).clamp_max_(length)
    lengths = torch.where(offsets.le(0), below, offsets.add(-min(shape[1], length)).neg())
    del below
    ends = lengths.cumsum(-1)
    count = int(ends[-1]) if diagonals.size(0) else 0
    starts = ends.sub(lengths)
    indices = offsets.new_empty((2, count))
    values = diagonals.new_empty((count,))
    of_each = torch.arange(offsets.size(0), dtype=offsets.dtype)
    places = zip(offsets.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    for number, (offset, start, size) in enumerate(places):
        if size > 0:
            column, end = max(offset, 0), start + size
            row = column - offset
            torch.arange(row, row + size, out=indices[0, start:end])
            torch.arange(column, column + size, out=indices[1, start:end])
            values[start:end].copy_(diagonals[number, column : column + size])
    made = torch.sparse_coo_tensor(indices, values, tuple(shape))
    del of_each
    if layout is torch.sparse_csr:
        return made.to_sparse_csr()
    return made.to_sparse_csc() if layout is torch.sparse_csc else made


@operator("aten::_to_sparse").sparse()
def unchanged(input: Tensor) -> Tensor | None:
    """The tensor itself; SparseTensor.cpp, sparse_coo_to_sparse."""
    return input if input.layout is torch.sparse_coo else None


@operator("aten::_to_sparse", "aten::_to_sparse.sparse_dim").decomposition()
def of_dense(call: GivenCall) -> Any:
    """Positions of what is not zero, and the values: C++ that calls operators; dense_to_sparse."""
    return run_cpu_kernel(call.overload, *call.args, **call.kwargs)


@operator("aten::clone", "aten::_to_copy").sparse()
def copied(input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copies of indices and values; copy_sparse_, clone_sparse."""
    values = sparse_values(input)
    converted = values.clone() if dtype in (None, values.dtype) else values.to(dtype)
    return sparse_of(input.shape, sparse_indices(input).clone(), converted, input.is_coalesced())


@operator("aten::mul", "aten::div", "aten::pow").sparse()
def by_number(operands: list[Any]) -> Tensor | None:
    """Values of their own, with the same indices; not modelled with another tensor."""
    first = operands[0]
    if not isinstance(first, Tensor) or isinstance(operands[-1], Tensor):
        return None
    indices, values = sparse_indices(first), sparse_values(first)
    return sparse_of(first.shape, indices.clone(), torch.empty_like(values), first.is_coalesced())


# Values are written where they are.
operator("aten::div_", "aten::mul_", "aten::neg_").sparse()(lambda input: input)


@operator("aten::add", "aten::sub").sparse()
def added(machine: Host | Gpu, known: Known, input: Tensor, other: Tensor) -> Tensor:
    """One tensor with the entries of both, or a dense one; ``sub_sparse`` adds, too."""
    if input.layout is torch.strided:
        return torch.empty_like(input)
    return _joined(machine, known, _aten.add.Tensor, input, other)


@operator("aten::add_", "aten::sub_").sparse()
def added_in_place(machine: Host | Gpu, known: Known, input: Tensor, other: Tensor) -> Tensor:
    """As ``added``, in place of the first."""
    if input.layout is not torch.strided:
        input.data = _joined(machine, known, _aten.add_.Tensor, input, other)
    return input


def _joined(machine: Host | Gpu, known: Known, called: Any, left: Tensor, right: Tensor) -> Tensor:
    """The GPU puts the entries of one behind those of the other, the CPU merges equal ones as it
    goes through both; cuda/SparseCUDATensorMath.cu, add_out_sparse_cuda; SparseTensorMath.cpp,
    add_out_sparse_contiguous.
    """
    if right.layout is torch.strided:
        raise unsupported_layout(called, "it adds a dense tensor to a sparse one")
    if isinstance(machine, Gpu):
        return _one_behind_the_other(left, right, sparse_values(right))
    count = most = specified_elements(left) + specified_elements(right)
    entries = sparse_values(left)
    indices = sparse_indices(left).new_empty((left.sparse_dim(), most))
    values = entries.new_empty((most, *entries.shape[1:]))
    merged = _merged(known, left, right)
    if merged is not None:
        count = merged.size(1)
        with outside_interception():
            whole = torch.zeros((left.sparse_dim(), most), dtype=indices.dtype)
            whole[:, :count] = merged
        known.learn(indices, whole)
    both = left.is_coalesced() and right.is_coalesced()
    return sparse_of(left.shape, indices.narrow(1, 0, count), values.narrow(0, 0, count), both)


def _merged(known: Known, left: Tensor, right: Tensor) -> Tensor | None:
    """Return the indices of a sum on the CPU, None where those of its terms are not known."""
    terms = []
    for one in (left, right):
        real, coalesced = known.of(sparse_indices(one)), one.is_coalesced()
        if real is None:
            return None
        with outside_interception():
            ones = torch.ones(real.size(1))
            terms.append(sparse_of(one.shape[: one.sparse_dim()], real, ones, coalesced))
    with outside_interception():
        return sparse_indices(terms[0] + terms[1])


def _one_behind_the_other(left: Tensor, right: Tensor, added: Tensor) -> Tensor:
    indices = torch.cat([sparse_indices(left), sparse_indices(right)], 1)
    values = torch.cat([sparse_values(left), added], 0)
    joined = sparse_of(left.shape, indices, values, False)
    return joined.coalesce() if indices.size(1) > left.numel() else joined


def sum_on_gpu(left: Tensor, right: Tensor, alpha: Any = 1) -> Tensor:
    """Return the sum of two real tensors with their entries as ``add_out_sparse_cuda`` has them."""
    if left.layout is not torch.sparse_coo or right.layout is not torch.sparse_coo:
        return torch.add(left, right, alpha=alpha)
    return _one_behind_the_other(left, right, sparse_values(right) * alpha)


def difference_on_gpu(left: Tensor, right: Tensor, alpha: Any = 1) -> Tensor:
    """Return the difference of two real tensors; ``sub_sparse`` adds (SparseTensorMath.cpp)."""
    return sum_on_gpu(left, right, -alpha)


def written_to_first(function: Callable[[Tensor, Tensor, Any], Tensor]) -> Callable[..., Tensor]:
    """Return the function that writes to its first argument what another one returns."""

    def run(left: Tensor, right: Tensor, alpha: Any = 1) -> Tensor:
        return left.copy_(function(left, right, alpha))

    return run


@operator("aten::_coalesce").sparse()
def coalesced(machine: Host | Gpu, known: Known, input: Tensor) -> Tensor:
    """One entry for each distinct index; SparseTensor.cpp, _coalesce_sparse_cpu;
    cuda/SparseCUDATensor.cu, coalesce_sparse_cuda. The CPU narrows what it made for all entries.

    Where indices are not known, they count as distinct: there are at most so many entries.
    """
    if input.is_coalesced():
        return input
    count = specified_elements(input)
    if count < 2:
        return copied(input)
    real = known.of(sparse_indices(input))
    distinct = None
    if real is not None:
        with outside_interception():
            distinct = torch.unique(real, dim=1)
            count = distinct.shape[1]
    if isinstance(machine, Gpu):
        indices, values = _coalesced_on_gpu(machine, input, count)
    else:
        indices, values = _coalesced_on_host(input)
    if distinct is not None:
        with outside_interception():
            whole = torch.zeros((distinct.shape[0], indices.shape[1]), dtype=indices.dtype)
            whole[:, :count] = distinct
        known.learn(indices, whole)
    return sparse_of(input.shape, indices.narrow(1, 0, count), values.narrow(0, 0, count), True)


def _coalesced_on_host(input: Tensor) -> tuple[Tensor, Tensor]:
    indices, values = sparse_indices(input), sparse_values(input).contiguous()
    # one number for each index; SparseTensorUtils.cpp, flatten_indices
    flat = indices.squeeze(0) if len(indices) == 1 else torch.empty_like(indices).sum(0)
    made = indices.new_empty(indices.shape), torch.empty_like(values)
    flat.sort(0)
    return made


def _coalesced_on_gpu(gpu: Gpu, input: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """cuda/SparseCUDATensor.cu, coalesce_sparse_cuda: one number for each index, sorted."""
    indices, values = sparse_indices(input), sparse_values(input)
    flat = indices.new_empty(indices.shape[1:])
    origins = torch.empty_like(flat), torch.empty_like(flat)
    flat.new_empty((cub.merge_sort(flat.numel(), pairs=True),), dtype=torch.uint8)
    flat.new_empty((cub.distinct_rows(gpu, flat.numel(), True),), dtype=torch.uint8)
    made = values.new_empty((count, *values.shape[1:]))
    if indices.shape[0] == 1:
        return flat.unsqueeze(0), made
    del origins
    return indices.new_empty((indices.shape[0], count)), made


@operator("aten::sparse_mask").sparse()
def masked(input: Tensor, mask: Tensor) -> Tensor:
    """The entries of a tensor where the mask has some; SparseTensor.cpp, sparse_mask. What it
    picks of a dense one is multiplied by a one; SparseTensorMath.cpp, _mul_dense_sparse_out.
    """
    values, indices = sparse_values(mask), sparse_indices(mask)
    if input.layout is not torch.strided or not specified_elements(mask):
        of_input = input if input.layout is torch.strided else sparse_values(input)
        kept = of_input.new_empty(values.shape)
        return sparse_of(mask.shape, indices.clone(), kept, mask.is_coalesced())
    one = values.new_empty((1,))
    picked = input.new_empty(values.shape)
    copied = indices.clone()
    kept = picked.new_empty(values.shape, dtype=torch.result_type(input, mask))
    del one, picked
    kept = kept.to(input.dtype)
    return sparse_of(mask.shape, copied, kept, mask.is_coalesced())


@operator("aten::addmm", asks_cusparse=True).sparse()
def coo_product(self: Tensor, mat1: Tensor, mat2: Tensor, machine: Host | Gpu) -> Tensor | None:
    """A sparse matrix by a dense one; SparseTensorMath.cpp, s_addmm_out_sparse_dense_cpu;
    cuda/SparseCUDABlas.cpp and SparseCUDATensorMath.cu, s_addmm_out_sparse_dense_cuda.
    """
    if self.layout is not torch.strided or mat2.layout is not torch.strided:
        return None
    if not isinstance(machine, Gpu):
        return self.new_empty((mat1.size(0), mat2.size(1)))
    coalesced = mat1.coalesce()
    rows, columns = sparse_indices(coalesced).unbind(0)
    result = self.new_empty((mat1.size(0), mat2.size(1)))
    if specified_elements(coalesced):
        compressed = rows.new_empty((mat1.size(0) + 1,), dtype=torch.int32)
        plain = columns.new_empty(columns.shape, dtype=torch.int32)
        dense = mat2 if mat2.is_contiguous() or mat2.t().is_contiguous() else mat2.contiguous()
        del compressed, plain, dense
    return result


operator("aten::addmm").entry_flops()(lambda mat1, mat2: multiplied(mat1, mat2))
operator("aten::bmm").entry_flops()(lambda input, mat2: multiplied(input, mat2))


@operator("aten::bmm").sparse()
def batched_product(self: Tensor, mat2: Tensor) -> Tensor:
    """Products of the batches of a sparse tensor; SparseTensorMath.cpp, bmm_out_sparse_cpu."""
    result = mat2.new_empty((self.size(0), self.size(1), mat2.size(2)))
    self.coalesce()
    return result


@operator("aten::_sparse_softmax", "aten::_sparse_log_softmax").sparse()
def softmax(input: Tensor) -> Tensor:
    """Indices and values of its own; native/sparse/SoftMax.cpp, softmax_sparse_cpu."""
    return copied(input.coalesce())


@operator("aten::_sparse_softmax_backward_data", "aten::_sparse_log_softmax_backward_data").sparse()
def softmax_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    """The entries of the output; native/sparse/SoftMax.cpp, softmax_backward_sparse_cpu."""
    gradient = grad_output.coalesce()
    made = copied(output.coalesce())
    del gradient
    return made


@operator("aten::_sparse_sum_backward").sparse()
def sum_backward(grad: Tensor, input: Tensor) -> Tensor:
    """The entries of the input; SparseTensorMath.cpp, _sparse_sum_backward_cpu."""
    gradient = grad if grad.layout is torch.strided else grad.coalesce()
    values = sparse_values(input)
    made = values.new_empty(values.shape)
    del gradient
    return sparse_of(input.shape, sparse_indices(input).clone(), made, input.is_coalesced())


@operator("aten::_to_dense", "aten::to_dense").sparse()
def dense(input: Tensor) -> Tensor:
    """Zeros, and the entries added; sparse_to_dense."""
    return sparse_values(input).new_zeros(input.shape)


class NestedTensors(Protocol):
    """Makes nested tensors of tensors without data, while operators are intercepted."""

    @property
    def host(self) -> Host:
        """The host that kernels for the CPU run on."""

    @property
    def gpu(self) -> Gpu:
        """The GPU that kernels for cuda run on."""

    def wrap(self, buffer: Tensor, sizes: Tensor) -> Tensor:
        """Return the nested tensor of the parts that lie one behind the other in ``buffer``."""

    def table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the sizes of parts as the tensor that a nested one holds."""

    def launch(
        self, name: str, kernel: Callable[..., object], written: Tensor, *read: Tensor
    ) -> None:
        """Compute what a kernel writes to a new tensor, ``kernel(written, *read)`` on values."""

    def with_last_size(self, sizes: Tensor, size: int) -> Tensor:
        """Return a copy of ``sizes`` with another last column."""


def sizes_on_gpu(beside: Tensor, count: int) -> Tensor:
    """Return sizes and offsets for a kernel: one array of 32-bit integers on the GPU."""
    return beside.new_empty((count,), dtype=torch.int32)


_from_tensors = operator("aten::_nested_tensor_from_tensor_list", kind=OperatorKind.NESTED)
_from_padded = operator("aten::_nested_from_padded", kind=OperatorKind.NESTED)
operator("_nested_tensor_from_mask _nested_tensor_from_mask_left_aligned", kind=OperatorKind.NESTED)
operator("aten::_nested_tensor_size", kind=OperatorKind.NATIVE)


@_from_tensors.nested("cpu")
def one_buffer(nested: NestedTensors, call: GivenCall) -> Tensor:
    """One buffer that the parts are copied to where all of them are contiguous, else the buffer of
    a concatenation; native/nested/NestedTensorUtils.h, wrap_tensor_node.
    """
    parts, *options = call.args
    dtypes = {part.dtype for part in parts}
    dense = len(dtypes) == 1 and all(part.is_contiguous() for part in parts)
    if not dense or any(option is not None for option in (*options, *call.kwargs.values())):
        made: Tensor = run_nested_kernel(call.overload, *call.args, **call.kwargs)
        return made
    buffer = parts[0].new_empty((sum(part.numel() for part in parts),))
    for part, piece in zip(parts, buffer.split([part.numel() for part in parts]), strict=True):
        piece.copy_(part.view(-1))
    return nested.wrap(buffer, nested.table([list(part.shape) for part in parts]))


@_from_tensors.nested("cuda")
def concatenated(nested: NestedTensors, list: Sequence[Tensor]) -> Tensor:
    """A concatenation of the parts; native/nested/NestedTensorUtils.h, wrap_tensor_node."""
    buffer = torch.cat([part.reshape(-1) for part in list])
    return nested.wrap(buffer, nested.table([part.shape for part in list]))


@operator("aten::_padded_dense_to_jagged_forward", kind=OperatorKind.NESTED).nested()
def padded_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """The values of a jagged tensor; native/nested/NestedTensorTransformerFunctions.cpp,
    _padded_dense_to_jagged_forward_cpu; native/nested/cuda/NestedTensorTransformerFunctions.cu.
    """
    places: list[int] = offsets[0].tolist()
    total = places[-1] if total_L is None else total_L
    values = dense.new_empty((total, *dense.shape[2:]))
    for part, (start, end) in zip(dense, pairwise(places), strict=True):
        values[start:end].copy_(part[: end - start])
    return values


def _fill(buffer: Tensor, padded: Tensor, rows: list[list[int]]) -> None:
    """Copy what is no padding to where it lies in the buffer of a nested tensor."""
    pieces = buffer.split([math.prod(row) for row in rows])
    for piece, part, row in zip(pieces, padded, rows, strict=True):
        piece.view(row).copy_(part[tuple(map(slice, row))])


@_from_padded.nested("cpu")
def selected_by_mask(
    nested: NestedTensors,
    padded: Tensor,
    cpu_nested_shape_example: Tensor,
    fuse_transform_0213: bool = False,
) -> Tensor:
    """native/nested/NestedTensorMath.cpp, nested_from_padded_generic.

    ``masked_select`` is written out, because a mask for every element is too large to be known:
    native/TensorAdvancedIndexing.cpp, masked_select_out_impl_cpu.
    """
    if fuse_transform_0213:
        batch, heads, steps, size = padded.shape
        padded = padded.permute(0, 2, 1, 3).contiguous().view(batch, steps, heads * size)
    rows: list[list[int]] = cpu_nested_shape_example.tolist()
    axes = range(padded.dim() - 1)
    target = [max(padded.size(one + 1), *(row[one] for row in rows)) for one in axes]
    masks = []
    for row in rows:  # a mask for each part, of the shape of the largest
        mask = padded.new_full(row, True, dtype=torch.bool)
        sizes = zip(reversed(row), reversed(target), strict=True)
        missing = [side for size, goal in sizes for side in (0, goal - size)]
        masks.append(functional.pad(mask, missing))
        del mask
    mask = torch.stack(masks)
    count = mask.sum()
    del count
    buffer = padded.new_empty((sum(map(math.prod, rows)),))
    if buffer.numel() and not selects_serially(nested.host, padded):
        selected = torch.empty(mask.shape, dtype=torch.int64)
        positions = torch.empty(mask.shape, dtype=torch.int64)
        del selected, positions
    _fill(buffer, padded, rows)
    made = nested.wrap(buffer, cpu_nested_shape_example)
    del masks
    return made


@_from_padded.nested("cuda")
def one_kernel(
    nested: NestedTensors,
    padded: Tensor,
    cpu_nested_shape_example: Tensor,
    fuse_transform_0213: bool = False,
) -> Tensor:
    """native/nested/cuda/NestedTensorTransformerFunctions.cpp, nested_from_padded_cuda."""
    dimensions = 4 if fuse_transform_0213 else 3
    if padded.dim() != dimensions or padded.dtype not in (torch.float32, torch.float16):
        return selected_by_mask(nested, padded, cpu_nested_shape_example, fuse_transform_0213)
    rows: list[list[int]] = cpu_nested_shape_example.tolist()
    buffer = padded.new_empty((sum(map(math.prod, rows)),))
    metadata = sizes_on_gpu(padded, cpu_nested_shape_example.numel() + padded.dim() + len(rows) + 1)
    if fuse_transform_0213:  # each part is of the steps, and of the heads beside each other
        parts = [[row[0], padded.size(1), padded.size(3)] for row in rows]
        _fill(buffer, padded.transpose(1, 2), parts)
    else:
        _fill(buffer, padded, rows)
    del metadata
    return nested.wrap(buffer, cpu_nested_shape_example)


@operator("aten::to_padded_tensor").nested("cuda")
def to_padded_tensor(self: Tensor, padding: float, output_size: list[int] | None = None) -> Tensor:
    """NestedTensorTransformerFunctions.cpp, NestedTensor_to_padded_tensor_cuda."""
    dtypes = (torch.float32, torch.float64, torch.float16)
    if self.dim() not in (2, 3, 4) or self.dtype not in dtypes:
        # NestedTensor_to_padded_tensor_generic
        padded: Tensor = run_nested_kernel(
            _aten.to_padded_tensor.default, self, padding, output_size
        )
        return padded
    sizes = nested_sizes(self)
    rows: list[list[int]] = sizes.tolist()
    shape = [len(rows), *(max(column) for column in zip(*rows, strict=True))]
    output = self.values().new_empty(shape if output_size is None else output_size)
    columns = sizes.size(1)
    if self.dim() == 3 and output_size is None:  # the last two dimensions are taken for one
        columns = 1
    metadata = sizes_on_gpu(output, len(rows) + 1 + len(rows) * columns)
    output.fill_(padding)
    pieces = self.values().split([math.prod(row) for row in rows])
    for piece, part, row in zip(pieces, output, rows, strict=True):
        part[tuple(map(slice, row))].copy_(piece.view(row))
    del metadata
    return output
