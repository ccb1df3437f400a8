"""Streams and events of a GPU that does not exist: they take no time.

A stream decides which blocks the caching allocator may give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.fake_cuda.api.session import SESSION


def _at_once(*_: Any, **__: Any) -> None:
    """Return: all work is done, and there is nothing to wait for."""


class Stream:
    """``torch.cuda.Stream`` and ``torch.Stream``."""

    def __init__(
        self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any
    ) -> None:
        index = _index(device)
        if stream_id is None:
            trace = SESSION.trace
            stream_id = 0 if trace is None else trace.streams[index].new(priority)
        self.device = torch.device("cuda", index)
        self.device_index = index
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = self.native_handle = stream_id
        self._before: list[tuple[Stream, int]] = []

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
        self._before.append((_current(self.device_index), _current_device()))
        _set_current(self)
        return self

    def __exit__(self, *exception: object) -> None:
        stream, device = self._before.pop()
        _set_current(stream)
        if SESSION.trace is not None:
            SESSION.trace.select(device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return False
        return (other.stream_id, other.device) == (self.stream_id, self.device)

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: a stream that something else made."""

    def __init__(self, stream_ptr: int, device: Any = None, **_: Any) -> None:
        super().__init__(device, stream_id=stream_ptr)


class Event:
    """``torch.cuda.Event`` and ``torch.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", _current_device())
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


def _current_device() -> int:
    return 0 if SESSION.trace is None else SESSION.trace.current


def _index(device: Any) -> int:
    """Return the index of the GPU that a stream is for."""
    if SESSION.trace is None:
        return 0
    return SESSION.index_of(device)


def _current(index: int) -> Stream:
    """Return the current stream of a GPU."""
    number = 0 if SESSION.trace is None else SESSION.trace.streams[index].current
    return Stream(index, stream_id=number)


def _set_current(stream: Stream | None) -> None:
    """Make a stream current, and its GPU (torch/csrc/cuda/Module.cpp, setStream); None is none."""
    if stream is not None and SESSION.trace is not None:
        with SESSION.trace.turn():
            SESSION.trace.select(stream.device_index)
            SESSION.trace.streams[stream.device_index].choose(stream.stream_id)


def stream_functions(index: int) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda`` and ``torch.accelerator`` about a GPU's streams."""
    return {
        "stream": StreamContext,
        "set_stream": _set_current,
        "current_stream": lambda device=None: _current(index),
        "default_stream": lambda device=None: Stream(index, stream_id=0),
        "get_stream_from_external": lambda data_ptr, device=None: ExternalStream(data_ptr, index),
    }
