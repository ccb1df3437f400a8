"""Weight norm on the CPU along the first or last dimension; native/cpu/WeightNormKernel.cpp."""

from __future__ import annotations

from torch import Tensor

from pytest_torchmem.operators.geometry import accumulation_type
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.host import Host

_INTERMEDIATE = 3
"""Rows of the sum and of two factors, for which the gradient uses the same buffer."""


@operator("aten::_weight_norm_interface").workspace("cpu")
def norms(machine: Host, g: Tensor, dim: int) -> int:
    """Each thread's sums along the last dimension; weight_norm_last_dim_kernel."""
    return 0 if dim == 0 else _rows(machine.threads, g)


@operator("aten::_weight_norm_interface_backward").workspace("cpu")
def gradient(machine: Host, saved_g: Tensor, dim: int) -> int:
    """The same; weight_norm_backward_last_dim_kernel."""
    return 0 if dim == 0 else _rows(max(_INTERMEDIATE, machine.threads), saved_g)


def _rows(number: int, g: Tensor) -> int:
    return number * g.numel() * accumulation_type(g.dtype).itemsize
