"""What CPU kernels take beyond their outputs: ATen's own, MKL's are not counted, oneDNN's."""

from pytest_torchmem.profiler.workspace.cpu import (
    convolution,
    copies,
    elementwise,
    normalization,
    recurrent,
    reduction,
)

__all__ = ["convolution", "copies", "elementwise", "normalization", "recurrent", "reduction"]
