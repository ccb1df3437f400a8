"""The raw CUDA stream that other packages ask torch for, as they are imported or launch kernels.

And the cache of pinned memory, which ``torch.cuda.graph`` empties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.torch_private.patching.patches import added

_NAME = "_cuda_getCurrentRawStream"
"""Builds without CUDA lack it; torch/csrc/cuda/Module.cpp."""


@contextmanager
def raw_stream_known(off: Callable[[], bool]) -> Iterator[None]:
    """Let torch give the default stream, unless ``off()``."""
    original: Any = getattr(torch._C, _NAME, None)

    def raw_stream(device: int) -> int:
        return int(original(device)) if original is not None and off() else 0

    setattr(torch._C, _NAME, raw_stream)
    try:
        yield
    finally:
        if original is None:
            delattr(torch._C, _NAME)
        else:
            setattr(torch._C, _NAME, original)


@contextmanager
def host_cache_known() -> Iterator[None]:
    """Let a build without CUDA have a cache of pinned memory, which is empty."""
    with added({torch._C: {"_host_emptyCache": lambda: None}}):
        yield
