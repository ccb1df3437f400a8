"""The exponential of matrices; native/LinearAlgebra.cpp, ``mexp_impl``."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import dense_bytes
from pytest_torchmem.operators.matmul.products import bmm
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, as_workspace, bounded
from pytest_torchmem.targets.host import Host

_POWERS = 5
"""The powers of a matrix that ``compute_T18`` keeps."""

_LONG = 8
"""Bytes of a position."""


@operator("aten::linalg_matrix_exp").workspace("cpu")
def matrix_exp(machine: Host, input: Tensor) -> int | Workspace:
    """compute_T18_scale_square: scaled matrices, their powers and as many sums of these, beside
    norms, exponents and scales, and what a product of several takes.

    One matrix is copied first, and takes a polynomial of a lower degree if its norm is small: these
    are at most the bytes that it needs.
    """
    order = input.shape[-1]
    if order <= 1 or input.numel() == 0:
        return 0
    matrices = input.numel() // order**2
    norm = input.element_size() // (2 if input.is_complex() else 1)
    scaled = dense_bytes(input) * (1 + 2 * _POWERS)
    if matrices > 1:
        batch = torch.empty((matrices, order, order), dtype=input.dtype, device="meta")
        product = as_workspace(bmm(machine, batch, batch, batch), "aten::bmm")
        return scaled - dense_bytes(input) + 3 * matrices * norm + product.nbytes
    return bounded(scaled, dense_bytes(input), _LONG, 4 * norm)
