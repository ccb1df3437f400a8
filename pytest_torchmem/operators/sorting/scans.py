"""Prefix sums, products and extremes; native/ReduceOps.cpp, native/cuda/ScanKernels.cpp."""

from __future__ import annotations

from torch import Tensor

from pytest_torchmem.operators.elementwise import converted
from pytest_torchmem.operators.formats import CONTIGUOUS, copied, made_like
from pytest_torchmem.operators.geometry import ceil_div, contiguous_copy
from pytest_torchmem.operators.libraries import cub
from pytest_torchmem.operators.reduction.cuda_buffers import HALVES
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.state.settings import prefers_deterministic

logcumsumexp = operator("aten::_logcumsumexp")
logcumsumexp.meta()(made_like(self=CONTIGUOUS))  # native/ReduceOps.cpp
extremes = operator("aten::_cummax_helper", "aten::_cummin_helper")


sums = operator("aten::cumsum", "aten::cumsum_", "aten::cumprod", "aten::cumprod_")


@sums.workspace("cpu")
def in_type_of_result(outputs: Tensor, input: Tensor) -> int:
    """The input in the type of the result; native/ReduceOps.cpp, impl_func_cum_ops."""
    return converted(input, outputs.dtype)


@operator("aten::cumsum", "aten::cumsum_").workspace("cuda")
def added_up(machine: Gpu, outputs: Tensor, input: Tensor, dim: int) -> tuple[int, ...]:
    """As any, or deterministic: a sum of every block; ATen/cuda/cub.cuh,
    ``inclusive_deterministic_scan``.
    """
    copy, *scan = cumulative(outputs, input, dim)
    rounds = outputs.dtype.is_floating_point or outputs.dtype.is_complex
    if not (scan and rounds and prefers_deterministic()):
        return (copy, *scan)
    size = outputs.element_size()
    blocks = ceil_div(input.numel(), 16 * (128 if size >= 16 else 256 if size >= 8 else 512))
    return (copy, min(machine.multiprocessors, blocks) * size)


@operator("aten::cumprod", "aten::cumprod_").workspace("cuda")
@logcumsumexp.workspace("cuda")  # LogcumsumexpKernel.cu
def cumulative(outputs: Tensor, input: Tensor, dim: int) -> tuple[int, ...]:
    """Copies of another type or not dense; of one dimension CUB's tiles. ScanKernels.cpp;
    ScanUtils.cuh, ``scan_dim``.
    """
    if not input.dim():
        return (0,)
    number, dtype = input.numel(), outputs.dtype
    copy = converted(input, dtype) or contiguous_copy(input)
    if not number or number != input.shape[dim]:
        return (copy,)
    return (copy, cub.scan(number, dtype.itemsize, not (dtype in HALVES or dtype.is_complex)))


@extremes.meta()
def nothing() -> None:
    """What it finds is written to arguments; native/ReduceOps.cpp, cummax_out."""


# ScanKernels.cpp, ``cummax_helper_cuda``
extremes.workspace("cuda")(copied(self=CONTIGUOUS, values=CONTIGUOUS, indices=CONTIGUOUS))
