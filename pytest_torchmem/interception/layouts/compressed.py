"""Compressed sparse tensors: CSR, CSC, BSR and BSC.

Such a tensor has no storage of its own; it holds two tensors of indices, which have to be known
where they decide anything, and its values, which are hollow like all others. torch's kernels for it
are for the most part C++ functions that call operators on those three, and are run as they are
while those are intercepted. The products read the values, and have a kernel here
(aten/src/ATen/native/sparse/SparseCsrTensorMath.cpp, SparseBlas.cpp, mkl/SparseBlasImpl.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.plan import unsupported_layout
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_compressed_kernel
from pytest_torchmem.torch_private.operators import has_compressed_kernel
from pytest_torchmem.torch_private.tensors import specified_elements

LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_aten: Any = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WITH_PLACES = ("amax", "amin")
_MADE_OF_OPERATORS = frozenset(
    {
        "_nnz",
        "_sparse_compressed_tensor_unsafe",
        "_sparse_compressed_tensor_with_dims",
        "_to_copy",
        "_to_dense",
        "_to_sparse",
        "_to_sparse_bsc",
        "_to_sparse_bsr",
        "_to_sparse_csc",
        "_to_sparse_csr",
        "alias",
        "ccol_indices",
        "clone",
        "col_indices",
        "crow_indices",
        "dense_dim",
        "detach",
        "empty",
        "empty_like",
        "fill_",
        "is_same_size",
        "mm",
        "row_indices",
        "sparse_compressed_tensor",
        "sparse_dim",
        "sparse_mask",
        "sum",
        "transpose",
        "values",
        "zero_",
    }
)
"""Operators whose kernel for compressed tensors calls others, and reads no values itself; as those
that are composite for all layouts do.
"""


def has_compressed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a compressed sparse tensor is among the arguments of an operator, or asked
    for.
    """
    return kwargs.get("layout") in LAYOUTS or any(
        tensor.layout in LAYOUTS for tensor in argument_tensors((args, kwargs))
    )


def storage_holder(tensor: Tensor) -> Tensor:
    """Return the tensor whose storage tells where ``tensor`` is: the values of a compressed one."""
    return tensor.values() if tensor.layout in LAYOUTS else tensor


def without_entries(tensor: Tensor) -> Tensor:
    """Return a compressed tensor of the same shape, type and layout with no entry."""
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = tensor.crow_indices() if by_rows else tensor.ccol_indices()
    plain = tensor.col_indices() if by_rows else tensor.row_indices()
    values = tensor.values()
    made: Tensor = _aten._sparse_compressed_tensor_unsafe.default(
        torch.zeros(compressed.shape, dtype=compressed.dtype),
        torch.empty((*plain.shape[:-1], 0), dtype=plain.dtype),
        torch.empty((*plain.shape[:-1], 0, *values.shape[plain.dim() :]), dtype=values.dtype),
        list(tensor.shape),
        dtype=values.dtype,
        layout=tensor.layout,
    )
    return made


def run_compressed(
    host: Host, on_gpu: bool, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator that takes or makes compressed tensors; inner operators are intercepted.

    On a GPU the products are cuSPARSE's, whose workspace is unknown (``asks_library``).

    Raises ``UnsupportedOperatorError`` for one whose kernel may read values and that has none here,
    and ``UnknownValueError`` where the values of a dense tensor decide how many entries there are.
    """
    args = operator.with_numbers_as_tensors(args, "cpu")
    kernel = _KERNELS.get(operator.name)
    if kernel is not None:
        if on_gpu and "_mm_reduce_" in operator.name:
            raise NotImplementedError(
                f"Could not run '{operator.name}' with arguments from the 'SparseCsrCUDA' backend"
            )
        return kernel(None if on_gpu else host, *args, **kwargs)
    base = operator.name.removeprefix("aten::").partition(".")[0]
    if base not in _MADE_OF_OPERATORS and has_compressed_kernel(operator.overload):
        raise unsupported_layout(operator.overload, "its arguments are compressed sparse tensors")
    return run_compressed_kernel(operator.overload, *args, **kwargs)


def asks_library(operator: OperatorSpec) -> bool:
    """Return whether an operator's workspace on a GPU is cuSPARSE's to say."""
    return operator.name in ("aten::addmm", "aten::sparse_sampled_addmm")


def _addmm(
    host: Host | None,
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
) -> Tensor:
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
        _multiply(host, mat1, mat2, by_rows=True)
    elif mat1.layout is torch.strided and mat2.layout is torch.sparse_csr:
        _multiply(host, mat2.transpose(0, 1).to_sparse_csr(), mat1.transpose(0, 1), by_rows=False)
    elif mat1.layout is torch.strided and mat2.layout is torch.sparse_csc:
        _multiply(host, mat2.transpose(0, 1), mat1.transpose(0, 1), by_rows=False)
    else:
        raise unsupported_layout(
            _aten.addmm.default, f"it multiplies {mat1.layout} by {mat2.layout}"
        )
    return result


def _multiply(host: Host | None, sparse: Tensor, matrix: Tensor, by_rows: bool) -> None:
    """Copies of what the library cannot read as it is; MKL wants the dense matrix in the order of
    the result.
    """
    rows, columns = matrix.shape
    across, along = matrix.stride()
    fits_by_rows = along == 1 and across >= max(1, columns)
    fits_by_columns = across == 1 and along >= max(1, rows)
    if host is None:
        fits = fits_by_rows or fits_by_columns
    else:
        fits = fits_by_rows if by_rows else fits_by_columns
    dense = matrix if fits else matrix.clone(memory_format=torch.contiguous_format)
    if host is not None:
        crow = sparse.crow_indices().to(torch.int32)
        column = sparse.col_indices().to(torch.int32)
        del column, crow
    del dense


def _scaled(host: Host | None, self: Tensor, other: Tensor) -> Tensor:
    """The entries by a number; native/sparse/SparseCsrTensorMath.cpp, mul_sparse_csr."""
    matrix, factor = (self, other) if self.layout in LAYOUTS else (other, self)
    if factor.layout is not torch.strided or factor.dim():
        raise unsupported_layout(_aten.mul.Tensor, "its arguments are compressed sparse tensors")
    by_rows = matrix.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = matrix.crow_indices() if by_rows else matrix.ccol_indices()
    plain = matrix.col_indices() if by_rows else matrix.row_indices()
    return _like(matrix, compressed.clone(), plain.clone(), matrix.values() * factor)


def _sampled_addmm(
    host: Host | None,
    self: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
) -> Tensor:
    """Products where there is an entry; native/sparse/SparseBlas.cpp,
    sparse_sampled_addmm_out_sparse_csr_cpu; native/sparse/cuda/SparseBlas.cpp.
    """
    crow = self.crow_indices()
    empty = crow.new_empty((1,))
    compressed = crow.new_empty(crow.shape)
    del empty
    columns = self.col_indices().new_empty(self.col_indices().shape)
    values = self.values().new_empty(self.values().shape)
    if host is not None and mat1.numel() and mat2.numel():
        first, second = mat1.contiguous(), mat2.transpose(-2, -1).contiguous()
        del second, first
    return _like(self, compressed, columns, values)


def _mm_reduce(host: Host, self: Tensor, other: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """A dense product, and for extremes the entries it comes from where a backward follows;
    native/sparse/SparseCsrTensorMath.cpp, _sparse_mm_reduce_impl_sparse_csr_cpu.
    """
    out = other.new_zeros((self.size(0), other.size(1)))
    places = self.col_indices().new_empty((0,))
    trains = torch.is_grad_enabled() and (self.requires_grad or other.requires_grad)
    if reduce in _WITH_PLACES and trains:
        places = places.new_empty(out.shape)
    _sum_in_float(host, out)
    return out, places


def _sum_in_float(host: Host, out: Tensor) -> None:
    """A row for each thread; native/cpu/SpmmReduceKernel.cpp, spmm_reduce_kernel_impl."""
    if out.dtype in _HALF:
        buffer = out.new_empty((host.threads, out.size(-1)), dtype=torch.float32)
        del buffer


def _mm_reduce_backward(
    host: Host,
    self: Tensor,
    grad_out: Tensor,
    weight: Tensor,
    reduce: str,
    arg_out: Tensor,
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
        of_values = _like(self, crow.clone(), columns.clone(), made)
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
            _sum_in_float(host, of_weight)
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


def _like(tensor: Tensor, compressed: Tensor, plain: Tensor, values: Tensor) -> Tensor:
    made: Tensor = _aten._sparse_compressed_tensor_unsafe.default(
        compressed, plain, values, list(tensor.shape), dtype=values.dtype, layout=tensor.layout
    )
    return made


_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_sparse_mm_reduce_impl": _mm_reduce,
    "aten::_sparse_mm_reduce_impl_backward": _mm_reduce_backward,
    "aten::addmm": _addmm,
    "aten::mul.Tensor": _scaled,
    "aten::sparse_sampled_addmm": _sampled_addmm,
}
