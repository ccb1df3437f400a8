"""Whether a GPU is there, whatever a test has put in the place of torch's functions; and functions
of ``torch._C`` that builds without CUDA lack (torch/csrc/cuda/Module.cpp).

Other packages ask for the raw CUDA stream as they are imported or launch kernels, and
``torch.cuda.graph`` empties the cache of pinned memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pytest_torchmem.torch_private.names import private
from pytest_torchmem.torch_private.patching.patches import added, replaced, unless

#: Asks the driver; builds without CUDA have none.
_count: Callable[[], int] = (
    private("torch._C._cuda_getDeviceCount")
    if hasattr(torch._C, "_cuda_getDeviceCount")
    else lambda: 0
)


def has_gpu() -> bool:
    """Return whether ``is_available()`` and the driver say so: a test may mock the first."""
    return torch.cuda.is_available() and _count() > 0


def raw_stream_known(off: Callable[[], bool]) -> AbstractContextManager[None]:
    """Let torch give the default stream, unless ``off()``."""
    return bindings_known({"_cuda_getCurrentRawStream": lambda device: 0}, off)


@contextmanager
def bindings_known(
    functions: Mapping[str, Callable[..., Any]], off: Callable[[], bool]
) -> Iterator[None]:
    """Let ``torch._C`` have functions by these names, unless ``off()``."""
    own = vars(torch._C)
    either = {name: unless(off, one, own[name]) for name, one in functions.items() if name in own}
    with added({torch._C: functions}), replaced(torch._C, **either):
        yield


@contextmanager
def host_cache_known() -> Iterator[None]:
    """Let a build without CUDA have a cache of pinned memory, which is empty."""
    with added({torch._C: {"_host_emptyCache": lambda: None}}):
        yield
