"""Norms of weights: apart from their directions, and bounded.

native/cpu/WeightNormKernel.cpp, on the CPU along the first or last dimension;
native/Normalization.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall, outputs
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


_renorm, _renorm_in_place = operator("aten::renorm"), operator("aten::renorm_")


@_renorm.decomposition("cpu")
def renorm(call: GivenCall, self: Tensor, p: float, dim: int) -> Tensor:
    """``TORCH_IMPL_FUNC(renorm_out)``; TensorIterator computes factors in a common type."""
    return _renormed(outputs(call), self, p, dim, converts=True)


@_renorm.decomposition("cuda")
def renorm_on_cuda(call: GivenCall, self: Tensor, p: float, dim: int) -> Tensor:
    """``TORCH_IMPL_FUNC(renorm_out)``; the kernel of the factors casts by itself."""
    return _renormed(outputs(call), self, p, dim, converts=False)


@_renorm_in_place.decomposition("cpu")
def renorm_in_place(self: Tensor, p: float, dim: int) -> Tensor:
    """The same, into the input."""
    return _renormed(self, self, p, dim, converts=True)


@_renorm_in_place.decomposition("cuda")
def renorm_in_place_on_cuda(self: Tensor, p: float, dim: int) -> Tensor:
    """The same, into the input."""
    return _renormed(self, self, p, dim, converts=False)


def _renormed(result: Tensor, self: Tensor, p: float, dim: int, converts: bool) -> Tensor:
    """Take norms of 16-bit types in float, and their factors in the type itself."""
    others = [axis for axis in range(self.dim()) if axis != dim % self.dim()]
    half = self.dtype in (torch.float16, torch.bfloat16)
    norms = torch.linalg.vector_norm(
        self, p, others, keepdim=True, dtype=torch.float32 if half else None
    )
    factors = norms
    if norms.dtype != self.dtype:
        factors = self.new_empty(norms.shape)
        if converts:
            converted = torch.empty_like(norms)
            del converted
    torch.mul(self, factors, out=result)
    return result
