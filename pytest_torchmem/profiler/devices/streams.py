"""Streams and events of a GPU that does not exist: they order nothing and take no time.

Graphs and pools of memory are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchmem.errors import UsageError

_CUDA = torch.device("cuda", 0)


class Stream:
    """What ``torch.cuda.Stream`` and ``torch.Stream`` are while a trace stands for a GPU."""

    _numbers = iter(range(1, 1 << 62))

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = _CUDA
        self.device_index = 0
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = self.native_handle = next(self._numbers)

    def wait_event(self, event: Any) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return Event() if event is None else event

    def query(self) -> bool:
        """All work is done at once."""
        return True

    def synchronize(self) -> None:
        """All work is done at once."""

    def is_capturing(self) -> bool:
        """No graph is ever captured."""
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class Event:
    """What ``torch.cuda.Event`` and ``torch.Event`` are while a trace stands for a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _CUDA
        self.event_id = self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        """Happen at once."""

    def wait(self, stream: Any = None) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Return that the event has happened."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def elapsed_time(self, end: Any) -> float:
        """Return 0: nothing runs, so nothing takes time."""
        return 0.0


class StreamContext:
    """``with torch.cuda.stream(...)``."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


class CUDAGraph:
    """``torch.cuda.CUDAGraph``, which cannot be had."""

    def __new__(cls, *_: Any, **__: Any) -> CUDAGraph:
        """Refuse: what a graph holds stays in a pool of its own as long as the graph lives."""
        raise UsageError(
            "torch.cuda.CUDAGraph: a trace does not model CUDA graphs, whose memory stays in a "
            "pool of their own. Trace the function that is captured, without capturing it"
        )


class MemPool:
    """``torch.cuda.MemPool``, which cannot be had."""

    def __new__(cls, *_: Any, **__: Any) -> MemPool:
        """Refuse: a trace has one pool."""
        raise UsageError(
            "torch.cuda.MemPool: a trace does not model pools of memory besides the allocator's "
            "own. Leave it out of what is traced"
        )
