"""Distances between points: exact, native/Distance.cpp and native/cuda/DistanceKernel.cu.

Those of ``cdist`` with p=2 and more than 25 points are products of matrices, and composite.
"""

import math

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import CONTIGUOUS, contiguous_copy, copied, dense_bytes
from pytest_torchmem.operators.reduction.buffers import sum_buffers
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import ALL, Request
from pytest_torchmem.targets.gpus import Gpu

_cdist = operator("aten::_cdist_forward")
_cdist_backward = operator("aten::_cdist_backward")


def _expanded(first: Tensor, second: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return how many batches there are together, and both tensors expanded to them."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    found = (tensor.expand(*batch, *tensor.shape[-2:]) for tensor in (first, second))
    return math.prod(batch), *found


_cdist.workspace("cpu")(copied(x1=CONTIGUOUS, x2=CONTIGUOUS))
_cdist_backward.workspace("cpu")(copied(x1=CONTIGUOUS, x2=CONTIGUOUS))


@_cdist.workspace("cuda")
def cdist_forward(x1: Tensor, x2: Tensor) -> tuple[Request, ...]:
    """Dense copies of both, of all batches; ``cdist_impl``."""
    _, first, second = _expanded(x1, x2)
    return (contiguous_copy(first), contiguous_copy(second), ALL)


@_cdist_backward.workspace("cuda")
def cdist_backward(
    machine: Gpu, outputs: Tensor, grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor
) -> tuple[int, ...]:
    """Dense copies, and the gradient of every pair before the sum; cdist_backward_kernel_impl."""
    batches, x1, x2 = _expanded(x1, x2)
    copies = tuple(map(contiguous_copy, (x1, x2, cdist, grad)))
    if p == 0 or not grad.numel() or not x1.numel():
        return copies
    points, others, width = x1.shape[-2], x2.shape[-2], x1.shape[-1]
    pairs = batches * others * points * width * outputs.element_size()
    sums = sum_buffers(machine, (batches, others, points, width), 1, outputs.dtype)
    return (*copies, pairs, *sums)


@operator("aten::_pdist_backward").workspace("cuda")
def pdist_backward(
    machine: Gpu, outputs: Tensor, grad: Tensor, input: Tensor, p: float
) -> tuple[int, ...]:
    """The gradient of every pair before they are added up; ``pdist_backward_kernel_impl``."""
    points = input.shape[0]
    if p == 0 or not grad.numel() or not input.numel():
        return ()
    sums = sum_buffers(machine, (points - 1, *input.shape), 0, outputs.dtype)
    return ((points - 1) * dense_bytes(outputs), *sums)
