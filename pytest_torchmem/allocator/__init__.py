"""Replay of torch's CUDA caching allocator: what is allocated and reserved for given requests.

Nothing here needs torch.
"""

from __future__ import annotations

from pytest_torchmem.allocator.caching import CachingAllocator, OutOfMemory
from pytest_torchmem.allocator.options import AllocatorOptions, parse_options
from pytest_torchmem.allocator.recorded import Peaks, replay

__all__ = [
    "AllocatorOptions",
    "CachingAllocator",
    "OutOfMemory",
    "Peaks",
    "parse_options",
    "replay",
]
