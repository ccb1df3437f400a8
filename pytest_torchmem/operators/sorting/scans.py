"""Prefix sums, products and extremes; native/ReduceOps.cpp, native/cuda/ScanKernels.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.formats import CONTIGUOUS, copied, made_like
from pytest_torchmem.operators.geometry import contiguous_copy
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.cuda_buffers import HALVES
from pytest_torchmem.operators.registry import operator

logcumsumexp = operator("aten::_logcumsumexp")
logcumsumexp.meta()(made_like(self=CONTIGUOUS))  # native/ReduceOps.cpp
extremes = operator("aten::_cummax_helper", "aten::_cummin_helper")


sums = operator("aten::cumsum", "aten::cumsum_", "aten::cumprod", "aten::cumprod_")


@sums.workspace("cpu")
def in_type_of_result(outputs: Tensor, input: Tensor) -> int:
    """The input in the type of the result; native/ReduceOps.cpp, impl_func_cum_ops."""
    return converted(input, outputs.dtype)


@sums.workspace("cuda")
@logcumsumexp.workspace("cuda")  # LogcumsumexpKernel.cu
def cumulative(outputs: Tensor, input: Tensor, dim: int) -> tuple[int, ...]:
    """Copies of another type or not dense; of one dimension CUB's tiles. ScanKernels.cpp,
    ``scan_dim``.
    """
    copies = (converted(input, outputs.dtype) or contiguous_copy(input),)
    if input.numel() and input.numel() == (input.shape[dim] if input.dim() else 1):
        return (*copies, prefix_sum(input.numel(), outputs.dtype))
    return copies


def prefix_sum(number: int, dtype: torch.dtype) -> int:
    """Return what the prefix sum of a vector takes; ATen/cuda/cub.cuh, ``inclusive_scan``."""
    return cub.scan(number, dtype.itemsize, not (dtype in HALVES or dtype.is_complex))


@extremes.meta()
def nothing() -> None:
    """What it finds is written to arguments; native/ReduceOps.cpp, cummax_out."""


# ScanKernels.cpp, ``cummax_helper_cuda``
extremes.workspace("cuda")(copied(self=CONTIGUOUS, values=CONTIGUOUS, indices=CONTIGUOUS))
