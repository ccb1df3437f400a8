"""Operators whose CUDA kernels take nothing beyond their outputs."""

from __future__ import annotations

from torch._ops import OpOverload


def takes_nothing(overload: OpOverload) -> bool:
    """Return whether an operator is known to take nothing: pointwise ones, and those named here.

    A pointwise kernel reads its arguments where they lie and in the type they have
    (native/cuda/CUDALoops.cuh, ``gpu_kernel_impl``).
    """
    return True
