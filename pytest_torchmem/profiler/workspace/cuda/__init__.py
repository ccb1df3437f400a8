"""What CUDA kernels take beyond their outputs, from the sources of ATen and the libraries' APIs."""

from pytest_torchmem.profiler.workspace.cuda import (
    nothing,
)

__all__ = [
    "nothing",
]
