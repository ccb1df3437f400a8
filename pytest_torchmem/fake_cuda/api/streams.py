"""Streams and events of a GPU that does not exist: they take no time.

A stream decides which blocks the caching allocator may give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.targets.device_index import check_device_index

_CUDA = torch.device("cuda", 0)


def _at_once(*_: Any, **__: Any) -> None:
    """Return: all work is done, and there is nothing to wait for."""


class Stream:
    """``torch.cuda.Stream`` and ``torch.Stream``."""

    def __init__(
        self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any
    ) -> None:
        check_device_index(device)
        if stream_id is None:
            stream_id = 0 if SESSION.trace is None else SESSION.trace.streams.new(priority)
        self.device = _CUDA
        self.device_index = 0
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = self.native_handle = stream_id
        self._before: list[int] = []

    wait_event = wait_stream = synchronize = _at_once

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return Event() if event is None else event

    def query(self) -> bool:
        """All work is done at once."""
        return True

    def is_capturing(self) -> bool:
        """No graph is ever captured."""
        return False

    def __enter__(self) -> Stream:
        self._before.append(_current())
        _set_current(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _set_current(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: a stream that something else made."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(stream_id=stream_ptr)


class Event:
    """``torch.cuda.Event`` and ``torch.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _CUDA
        self.event_id = self.cuda_event = 0

    record = wait = synchronize = _at_once

    def query(self) -> bool:
        """Return that the event has happened."""
        return True

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


def _current() -> int:
    """Return the number of the current stream."""
    return 0 if SESSION.trace is None else SESSION.trace.streams.current


def _set_current(stream: Stream | int | None) -> None:
    """Make a stream current, given as such or by its number; ``None`` changes nothing."""
    if stream is not None and SESSION.trace is not None:
        SESSION.trace.streams.choose(stream if isinstance(stream, int) else stream.stream_id)


STREAM_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "stream": StreamContext,
    "set_stream": _set_current,
    "current_stream": lambda device=None: Stream(stream_id=_current()),
    "default_stream": lambda device=None: Stream(stream_id=0),
    "get_stream_from_external": lambda data_ptr, device=None: ExternalStream(data_ptr),
}
"""The functions of ``torch.cuda`` and ``torch.accelerator`` about streams."""
