"""Nested tensors: conversion from and to strided ones, and the arguments of their kernels.

Sizes, strides and offsets stay on the host; a kernel on a GPU is given those it needs.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.indexing import selects_serially
from pytest_torchmem.operators.registry import OperatorKind, aten, operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.torch_private.kernels import run_nested_kernel
from pytest_torchmem.torch_private.tensors import nested_sizes


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


_aten: Any = torch.ops.aten
_from_tensors = operator("aten::_nested_tensor_from_tensor_list", kind=OperatorKind.NESTED)
_from_padded = operator("aten::_nested_from_padded", kind=OperatorKind.NESTED)
operator(
    *aten("_nested_tensor_from_mask _nested_tensor_from_mask_left_aligned"),
    kind=OperatorKind.NESTED,
)
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
