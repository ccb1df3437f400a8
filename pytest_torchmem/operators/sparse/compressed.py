"""Kernels for compressed sparse tensors: CSR, CSC, BSR and BSC.

Such a tensor has no storage of its own; it holds two tensors of indices, which have to be known
where they decide anything, and its values. torch's kernels for it are for the most part C++
functions that call operators on those three. The products read the values, and have a kernel here
(native/sparse/SparseCsrTensorMath.cpp, SparseBlas.cpp, native/mkl/SparseBlasImpl.cpp).
"""

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import HALVES
from pytest_torchmem.operators.registry import OperatorKind, aten, operator
from pytest_torchmem.operators.sparse.parts import (
    COMPRESSED,
    compressed_indices,
    compressed_like,
    entries,
    multiplied,
    unsupported_layout,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.tensors import specified_elements

_aten: Any = torch.ops.aten
_WITH_PLACES = ("amax", "amin", "max", "min")

# Their kernels for compressed tensors call others, and read no values themselves; as those that are
# composite for all layouts do.
operator(
    *aten("""
        _nnz _sparse_compressed_tensor_unsafe _sparse_compressed_tensor_with_dims _to_copy
        _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr alias
        ccol_indices clone col_indices crow_indices dense_dim detach empty empty_like fill_
        is_same_size mm row_indices sparse_compressed_tensor sparse_dim sparse_mask sum transpose
        values zero_
    """),
    compressed_by_operators=True,
)
# The same function of each value (native/sparse/SparseCsrTensorMath.cpp, CREATE_UNARY_UFUNC and its
# like): to a new tensor, in place, or to one that is given.
_OF_EACH_VALUE = """
    abs angle asin asinh atan atanh ceil conj_physical deg2rad erf erfinv expm1 floor frac isinf
    isnan isneginf isposinf log1p neg rad2deg relu round sgn sign signbit sin sinh sqrt tan tanh
    trunc
"""
_ONLY_NEW = ("angle", "isinf", "isnan", "isneginf", "isposinf", "signbit")
operator(
    *aten(_OF_EACH_VALUE),
    *aten(" ".join(f"{name}_" for name in _OF_EACH_VALUE.split() if name not in _ONLY_NEW)),
    *aten("copy_ resize_as_sparse_ select"),
    compressed_by_operators=True,
)
operator(
    *aten("""
        _sparse_compressed_tensor_unsafe _sparse_compressed_tensor_with_dims _to_sparse_bsc
        _to_sparse_bsr _to_sparse_csc _to_sparse_csr sparse_compressed_tensor.comp_plain_value
        sparse_compressed_tensor.comp_plain_value_size
    """),
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
operator("aten::_sparse_mm_reduce_impl").entry_flops()(
    lambda input, other: multiplied(input, other)
)


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
