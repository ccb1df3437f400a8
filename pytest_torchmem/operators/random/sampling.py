"""Random numbers whose parameters are tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import operator


@operator("aten::multinomial").decomposition("cpu")
def multinomial(self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """native/Distributions.cpp, multinomial_out: checks, and a race of exponential variables; with
    replacement (native/cpu/MultinomialKernel.cpp) the cumulated distribution of a row, of 16 bits
    in float.
    """
    shape = (*self.shape[:-1], num_samples)
    result = torch.empty(shape, dtype=torch.int64)
    if replacement and num_samples > 1:
        dtype = torch.float32 if self.dtype.itemsize == 2 else self.dtype
        self.new_empty((self.shape[-1],), dtype=dtype)
        return result
    least, most = torch.aminmax(self)
    valid = (least >= 0) & (most < torch.inf)
    impossible = self.sum(-1) == 0
    if self.dim() > 1:
        impossible = impossible.any()
    torch.bitwise_not(impossible)
    race = torch.empty_like(self)
    if num_samples > 1:
        values = self.new_empty(shape)
        del values
    del race, impossible, valid, least, most
    return result
