"""Distances between points: exact, native/Distance.cpp and native/cuda/DistanceKernel.cu.

Those of ``cdist`` with p=2 and more than 25 points are products of matrices, and composite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.reduction.cuda import sum_buffers
from pytest_torchmem.operators.workspace import workspace
from pytest_torchmem.targets.gpus import Gpu


def _expanded(first: Tensor, second: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return how many batches there are together, and both tensors expanded to them."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    found = (tensor.expand(*batch, *tensor.shape[-2:]) for tensor in (first, second))
    return math.prod(batch), *found


@workspace("aten::_cdist_forward", device="cuda")
def cdist(
    gpu: Gpu, outputs: Tensor, first: Tensor, second: Tensor, *options: object
) -> tuple[int, ...]:
    """Dense copies of both, of all batches; ``cdist_impl``."""
    _, first, second = _expanded(first, second)
    return (contiguous_copy(first), contiguous_copy(second))


@workspace("aten::_cdist_backward", device="cuda")
def cdist_backward(
    gpu: Gpu, outputs: Tensor, grad: Tensor, first: Tensor, second: Tensor, p: float, cdist: Tensor
) -> tuple[int, ...]:
    """Dense copies, and the gradient of every pair of points before they are added up;
    ``cdist_backward_kernel_impl``.
    """
    batches, first, second = _expanded(first, second)
    copies = tuple(map(contiguous_copy, (first, second, cdist, grad)))
    if p == 0 or not grad.numel() or not first.numel():
        return copies
    points, others, width = first.shape[-2], second.shape[-2], first.shape[-1]
    pairs = batches * others * points * width * outputs.element_size()
    sums = sum_buffers(gpu, (batches, others, points, width), 1, outputs.dtype)
    return (*copies, pairs, *sums)


@workspace("aten::_pdist_forward", device="cuda")
def pdist(gpu: Gpu, outputs: Tensor, input: Tensor, p: float = 2) -> int:
    """Nothing: the input is dense; ``pdist_forward_kernel_impl``."""
    return 0


@workspace("aten::_pdist_backward", device="cuda")
def pdist_backward(
    gpu: Gpu, outputs: Tensor, grad: Tensor, input: Tensor, p: float, pdist: Tensor
) -> tuple[int, ...]:
    """The gradient of every pair before they are added up; ``pdist_backward_kernel_impl``."""
    points = input.shape[0]
    if p == 0 or not grad.numel() or not input.numel():
        return ()
    sums = sum_buffers(gpu, (points - 1, *input.shape), 0, outputs.dtype)
    return ((points - 1) * dense_bytes(outputs), *sums)
