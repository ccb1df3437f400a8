"""What CPU kernels take beyond their outputs: ATen's own, MKL's are not counted, oneDNN's."""

from pytest_torchmem.profiler.workspace.cpu import (
    attention,
    convolution,
    copies,
    elementwise,
    indexing,
    losses,
    matmul,
    normalization,
    recurrent,
    reduction,
    resampling,
    sorting,
)

__all__ = [
    "attention",
    "convolution",
    "copies",
    "elementwise",
    "indexing",
    "losses",
    "matmul",
    "normalization",
    "recurrent",
    "reduction",
    "resampling",
    "sorting",
]
