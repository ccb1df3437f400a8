"""Streams and events of a GPU that does not exist: they take no time.

A stream decides which blocks the caching allocator may give.
"""

from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.fake_cuda.api.session import SESSION, Capture


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

    synchronize = _at_once

    def wait_event(self, event: Any) -> None:
        """Do nothing but join the capture that the event was recorded in."""
        _join(self, getattr(event, "capture", None))

    def wait_stream(self, stream: Any) -> None:
        """Do nothing but join the capture that another stream belongs to."""
        _join(self, capture_of(stream.device_index, stream.stream_id))

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """All work is done at once."""
        return True

    def is_capturing(self) -> bool:
        """Return whether a graph is captured on this stream."""
        return capture_of(self.device_index, self.stream_id) is not None

    def __enter__(self) -> "Stream":
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
        # Dynamo makes streams that have nothing yet, to compare them.
        return (getattr(other, "stream_id", None), getattr(other, "device", None)) == (
            getattr(self, "stream_id", None),
            getattr(self, "device", None),
        )

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
        self.capture: Capture | None = None
        """The capture of a graph that it was recorded in."""

    synchronize = _at_once

    def record(self, stream: Any = None) -> None:
        """Happen at once."""
        stream = _current(_current_device()) if stream is None else stream
        self.capture = capture_of(stream.device_index, stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        """Let a stream, or the current one, wait."""
        (_current(_current_device()) if stream is None else stream).wait_event(self)

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


def capture_of(index: int, stream: int) -> Capture | None:
    """Return the capture that a stream of a GPU belongs to, None for no capture."""
    captures = (one for one in SESSION.captures if one.index == index and stream in one.streams)
    return next(captures, None)


def _join(stream: Stream, capture: Capture | None) -> None:
    """Let a stream that waits for a captured one be captured too (CUDA, stream capture)."""
    if capture is not None and capture in SESSION.captures:
        capture.streams.add(stream.stream_id)


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
