"""Products whose parts are sent while they run: torch/distributed/_symmetric_memory/__init__.py.

Inductor makes them of collectives and products (``_micro_pipeline_tp``, asynchronous tensor
parallelism). What a GPU sends or gets goes through symmetric memory, which is outside of
PyTorch's allocator (torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemory.cu). The rest are
ordinary tensors. They multiply part by part: one part asks for what all do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.distributed.collectives import size_of
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.torch_private import distributed, keys

_aten: Any = torch.ops.aten
_Multiply = Callable[..., Tensor]


def describe() -> None:
    """Make the records of those operators that this torch has."""
    there = frozenset(keys.all_operators())
    for name, kernel in (
        ("symm_mem::fused_all_gather_matmul", _gather_and_multiply),
        ("symm_mem::fused_all_gather_scaled_matmul", _gather_and_multiply_scaled),
        ("symm_mem::fused_matmul_reduce_scatter", _multiply_and_scatter),
        ("symm_mem::fused_scaled_matmul_reduce_scatter", _multiply_scaled_and_scatter),
    ):
        if name in there:
            source = "torch/distributed/_symmetric_memory/__init__.py"
            operator(name, source=source).decomposition("cuda")(kernel)


def _gather_and_multiply(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, return_A: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """``_fused_all_gather_matmul_impl``, and its variant for the last dimension."""
    size = size_of(group_name)
    if gather_dim not in (-1, A.dim() - 1):
        products = [(B, B.dtype, partial(_aten.mm.out, mat2=B)) for B in Bs]
        gathered, found = _gathered(A, products, gather_dim, size)
        return (gathered if return_A else None), found
    shard = A.flatten(0, -2)
    gathered = shard.new_empty(shard.shape[0] * size, shard.shape[1])
    found = [shard.new_empty(shard.shape[0], B.shape[1], dtype=B.dtype) for B in Bs]
    for B, product in zip(Bs, found, strict=True):
        _aten.mm.out(shard, B.chunk(size)[0], out=product)
    joined = torch.cat(gathered.chunk(size), dim=-1) if return_A else None
    shapes = list(A.shape[:-1])
    return (
        None if joined is None else joined.view(*shapes, -1),
        [product.view(*shapes, -1) for product in found],
    )


def _gather_and_multiply_scaled(
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """``_fused_all_gather_matmul_impl`` with ``_scaled_mm``."""
    size, scale = size_of(group_name), A_scale
    if A_scale.dim() and A_scale.shape[:-1] == A.shape[:-1]:
        # Those of this process's rows; the others' are gathered.
        scale = A_scale.movedim(gather_dim, 0).flatten(0, -2)
        scale.new_empty(scale.shape[0] * size, scale.shape[1])
    elif A_scale.numel() > 1:
        scale = A_scale.movedim(gather_dim, 0).flatten(0, -2).chunk(size)[0]
    products = []
    dtypes = distributed.dtypes_of_numbers(out_dtypes)
    each = zip(Bs, B_scales, biases, result_scales, dtypes, use_fast_accum, strict=True)
    for B, *given in each:
        names = ("scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum")
        options = dict(zip(names, given, strict=True))
        multiply = partial(_aten._scaled_mm.out, mat2=B, scale_a=scale, **options)
        products.append((B, options["out_dtype"] or B.dtype, multiply))
    return _gathered(A, products, gather_dim, size)


def _gathered(
    A: Tensor, products: Sequence[tuple[Tensor, torch.dtype, _Multiply]], gather_dim: int, size: int
) -> tuple[Tensor, list[Tensor]]:
    """What was gathered, in any case, and its products; the rows that are gathered come first."""
    moved = A.movedim(gather_dim, 0)
    leading, shard = [size, *moved.shape[:-1]], moved.flatten(0, -2)
    gathered = shard.new_empty(shard.shape[0] * size, shard.shape[1])
    found = [
        gathered.new_empty(gathered.shape[0], B.shape[1], dtype=dtype) for B, dtype, _ in products
    ]
    for (_, _, multiply), product in zip(products, found, strict=True):
        multiply(shard, out=product.chunk(size)[0])
    shaped = [
        one.view(*leading, -1).flatten(0, 1).movedim(0, gather_dim) for one in (gathered, *found)
    ]
    return shaped[0], shaped[1:]


def _multiply_and_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """``_fused_matmul_reduce_scatter_impl``: the parts of all processes are stacked and added."""
    size, add = size_of(group_name), torch.sum if reduce_op == "sum" else torch.mean
    if scatter_dim == A.dim() - 1:
        rows = A.flatten(0, -2)
        stacked = rows.new_empty(rows.shape[0], B.shape[1])
        _aten.mm.out(rows, B.chunk(size, dim=1)[0], out=stacked.chunk(size, dim=1)[0])
        return add(stacked.reshape(*A.shape[:-1], size, -1), dim=-2)
    moved = A.movedim(scatter_dim, 0)
    leading, rows = [size, *moved.shape[:-1]], moved.flatten(0, -2)
    leading[1] //= size
    stacked = rows.new_empty(rows.shape[0], B.shape[1])
    _aten.mm.out(rows.chunk(size)[0], B, out=stacked.chunk(size)[0])
    parts = stacked.view(*leading, -1).movedim(1, scatter_dim + 1).movedim(0, scatter_dim)
    return add(parts, dim=scatter_dim)


def _multiply_scaled_and_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int],
    bias: Tensor | None,
    result_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> Tensor:
    """``_fused_scaled_matmul_reduce_scatter_impl``."""
    size, add = size_of(group_name), torch.sum if reduce_op == "sum" else torch.mean
    place = scatter_dim_after_maybe_reshape
    moved = A.movedim(place, 0)
    leading, rows = [size, *moved.shape[:-1]], moved.flatten(0, -2)
    leading[orig_scatter_dim or 1] //= size
    if A_scale.numel() > 1:
        A_scale = A_scale.movedim(place, 0).contiguous().flatten(0, -2).chunk(size)[0]
    stacked = moved.new_empty(rows.shape[0], B.shape[1], dtype=out_dtype or A.dtype)
    rest = B, A_scale, B_scale, bias, result_scale, out_dtype, use_fast_accum
    _aten._scaled_mm.out(rows.chunk(size)[0], *rest, out=stacked.chunk(size)[0])
    found = add(stacked.view(*leading, -1).movedim(1, place + 1), dim=0)
    shape = list(output_shape)
    shape[orig_scatter_dim] //= size
    return found.view(shape)
