"""Streams and events of a GPU that does not exist: they take no time.

A stream decides which blocks the caching allocator may give. Graphs and pools of memory are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.streams import Streams
from pytest_torchmem.targets.device_index import check_ordinal

_CUDA = torch.device("cuda", 0)


class _Session:
    """The streams of the trace that is running; a process runs one at a time."""

    streams: Streams | None = None


@contextmanager
def streams_of(streams: Streams) -> Iterator[None]:
    """Let streams that become current be those of one trace."""
    _Session.streams = streams
    try:
        yield
    finally:
        _Session.streams = None


class Stream:
    """What ``torch.cuda.Stream`` and ``torch.Stream`` are while a trace stands for a GPU."""

    def __init__(
        self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any
    ) -> None:
        check_ordinal(device)
        if stream_id is None:
            stream_id = _Session.streams.new(priority) if _Session.streams is not None else 0
        self.device = _CUDA
        self.device_index = 0
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = self.native_handle = stream_id
        self._before: list[int] = []

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
        self._before.append(current())
        choose(self)
        return self

    def __exit__(self, *exception: object) -> None:
        choose(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class ExternalStream(Stream):
    """What ``torch.cuda.ExternalStream`` is: a stream that something else made."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(stream_id=stream_ptr)


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
        """Return half a microsecond, in milliseconds: nothing runs, so nothing takes time.

        It is what CUDA can tell apart (CUDA Runtime API, cudaEventElapsedTime). Programs divide by
        it.
        """
        return 0.0005


class StreamContext:
    """``with torch.cuda.stream(...)``."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exception)


def current() -> int:
    """Return the number of the current stream."""
    return _Session.streams.current if _Session.streams is not None else 0


def choose(stream: Stream | int | None) -> None:
    """Make a stream current, given as such or by its number; ``None`` changes nothing."""
    if stream is not None and _Session.streams is not None:
        _Session.streams.choose(stream if isinstance(stream, int) else stream.stream_id)


def stream_answers() -> dict[str, Callable[..., Any]]:
    """Return what ``torch.cuda`` and ``torch.accelerator`` answer about streams, by name."""
    return {
        "stream": StreamContext,
        "set_stream": choose,
        "current_stream": lambda device=None: Stream(stream_id=current()),
        "default_stream": lambda device=None: Stream(stream_id=0),
        "get_stream_from_external": lambda data_ptr, device=None: ExternalStream(data_ptr),
    }


class CUDAGraph:
    """``torch.cuda.CUDAGraph`` and ``torch.accelerator.Graph``, which cannot be had."""

    def __new__(cls, *_: Any, **__: Any) -> CUDAGraph:
        """Refuse: what a graph holds stays in a pool of its own as long as the graph lives."""
        raise no_graphs("torch.cuda.CUDAGraph")


def no_graphs(name: str) -> UsageError:
    """Return the error for what makes CUDA graphs, by its name."""
    return UsageError(
        f"{name}: a trace does not model CUDA graphs, whose memory stays in a pool of their own. "
        "Trace the function that is captured, without capturing it"
    )


class MemPool:
    """``torch.cuda.MemPool``, which cannot be had."""

    def __new__(cls, *_: Any, **__: Any) -> MemPool:
        """Refuse: a trace has one pool."""
        raise UsageError(
            "torch.cuda.MemPool: a trace does not model pools of memory besides the allocator's "
            "own. Leave it out of what is traced"
        )
