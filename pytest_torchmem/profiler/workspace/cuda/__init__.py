"""What CUDA kernels take beyond their outputs, from the sources of ATen and the libraries' APIs."""

from pytest_torchmem.profiler.workspace.cuda import (
    attention,
    blas,
    convolution,
    distance,
    embedding,
    foreach,
    indexing,
    losses,
    normalization,
    nothing,
    recurrent,
    reduction,
    resampling,
    softmax,
    sorting,
)

__all__ = [
    "attention",
    "blas",
    "convolution",
    "distance",
    "embedding",
    "foreach",
    "indexing",
    "losses",
    "normalization",
    "nothing",
    "recurrent",
    "reduction",
    "resampling",
    "softmax",
    "sorting",
]
