"""Whether a GPU is there, whatever a test has put in the place of torch's functions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_torchmem.torch_private.names import private

#: Asks the driver; builds without CUDA have none.
_count: Callable[[], int] = (
    private("torch._C._cuda_getDeviceCount")
    if hasattr(torch._C, "_cuda_getDeviceCount")
    else lambda: 0
)


def has_gpu() -> bool:
    """Return whether ``torch.cuda.is_available()`` says so, and the driver as well: a test may have
    a mock answer the first question.
    """
    return torch.cuda.is_available() and _count() > 0
