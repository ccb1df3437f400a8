"""Streams, events, pools of memory and graphs of a GPU that does not exist: they take no time.

A stream decides which blocks the caching allocator may give, and so do ``torch.cuda.MemPool`` and
the pool of ``torch.cuda.CUDAGraph`` (aten/src/ATen/cuda/CUDAGraph.cpp). ``torch.cuda.graph`` and
``make_graphed_callables`` are torch's own. A replay requests nothing; what it computes is computed
again on the values that are there.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NoReturn
from weakref import finalize

import torch

from pytest_torchmem.allocator.caching import segments
from pytest_torchmem.allocator.device_memory import PoolId
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.session import SESSION, FakeGpu, Functions, nothing
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.values.computed import GraphRecording


class Stream:
    """``torch.cuda.Stream`` and ``torch.Stream``."""

    def __init__(
        self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any
    ) -> None:
        index = 0 if SESSION.trace is None else SESSION.index_of(device)
        if stream_id is None:
            trace = SESSION.trace
            stream_id = 0 if trace is None else trace.streams[index].new(priority)
        self.device = torch.device("cuda", index)
        self.device_index = index
        self.device_type = 1
        self.priority = priority
        self.stream_id = self.cuda_stream = self.native_handle = stream_id
        self._before: list[tuple[Stream, int]] = []

    synchronize = nothing

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
        return True

    def is_capturing(self) -> bool:
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
        own, others = vars(self), vars(other)
        return all(own.get(name) == others.get(name) for name in ("stream_id", "device"))

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
        self.capture: GraphRecording | None = None
        """That of the graph in whose capture it was recorded."""

    synchronize = nothing

    def record(self, stream: Any = None) -> None:
        stream = _current(_current_device()) if stream is None else stream
        self.capture = capture_of(stream.device_index, stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        (_current(_current_device()) if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """Return half a microsecond, in milliseconds: nothing runs, so nothing takes time.

        It is what CUDA can tell apart (CUDA Runtime API, cudaEventElapsedTime). Programs divide by
        it.
        """
        return 0.0005


def _captures() -> Sequence[GraphRecording]:
    """Return the captures of graphs that go on, in order."""
    return () if SESSION.trace is None else SESSION.trace.values.recordings


def capture_of(index: int, stream: int) -> GraphRecording | None:
    captures = (one for one in _captures() if one.index == index and stream in one.streams)
    return next(captures, None)


def _join(stream: Stream, capture: GraphRecording | None) -> None:
    """Let a stream that waits for a captured one be captured too (CUDA, stream capture)."""
    if capture is not None and capture in _captures():
        capture.streams.add(stream.stream_id)


def _current_device() -> int:
    return 0 if SESSION.trace is None else SESSION.trace.target.selected.index


def _current(index: int) -> Stream:
    number = 0 if SESSION.trace is None else SESSION.trace.streams[index].current
    return Stream(index, stream_id=number)


def _set_current(stream: Stream | None) -> None:
    """Make a stream current, and its GPU (torch/csrc/cuda/Module.cpp, setStream); None is none."""
    if stream is not None and SESSION.trace is not None:
        with SESSION.trace.turn():
            SESSION.trace.select(stream.device_index)
            SESSION.trace.streams[stream.device_index].choose(stream.stream_id)


STREAMS: Functions = {
    "set_stream": lambda gpu, stream: _set_current(stream),
    "current_stream": lambda gpu, device=None: _current(gpu.index),
    "default_stream": lambda gpu, device=None: Stream(gpu.index, stream_id=0),
    "get_stream_from_external": lambda gpu, data_ptr, device=None: ExternalStream(
        data_ptr, gpu.index
    ),
    "is_current_stream_capturing": lambda gpu: _current(gpu.index).is_capturing(),
}
"""The functions of ``torch.cuda`` and ``torch.accelerator`` about a GPU's streams, and whether the
current one is captured."""

_NUMBERS = itertools.count(1)


def pool_handle(*, made_by_user: bool = True) -> PoolId:
    """Return the number of a new pool (aten/src/ATen/cuda/MemPool.cpp, ``graph_pool_handle``)."""
    number = next(_NUMBERS)
    return (0, number) if made_by_user else (number, 0)


class MemPool:
    """``torch.cuda.MemPool``, on the GPU that is current."""

    def __init__(
        self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None or use_on_oom or no_split:
            raise UsageError(
                "torch.cuda.MemPool: a trace models pools of the caching allocator alone, without "
                "allocator, use_on_oom and no_split. Leave these out while tracing"
            )
        self.id = pool_handle()
        self._index = SESSION.running.target.selected.index
        self._memory = SESSION.gpus[self._index].memory
        self._memory.follow().private.retain(self.id)
        finalize(self, _release, self._memory, self.id).atexit = False

    @property
    def device(self) -> int:
        """The index of the GPU that the pool is on."""
        return self._index

    def use_count(self) -> int:
        return self._memory.follow().private.uses(self.id)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments as ``torch.cuda.memory_snapshot`` does."""
        return segments(self._memory.follow(), self._index, self.id)


def _release(memory: DeviceMemory, pool: PoolId) -> None:
    # MemPool.cpp, ~MemPool
    memory.follow().private.release(pool)
    memory.empty_cache(pool)


@contextmanager
def _use_mem_pool(gpu: FakeGpu, pool: MemPool, device: Any = None) -> Iterator[None]:
    """Let a pool serve this thread's requests (torch/cuda/memory.py, ``use_mem_pool``)."""
    memory, thread = gpu.memory, get_ident()
    end = memory.serve(pool.id, lambda _: get_ident() == thread, graph=False)
    try:
        yield
    finally:
        end()
        memory.follow().private.release(pool.id)


POOLS: Functions = {"use_mem_pool": _use_mem_pool, "graph_pool_handle": lambda gpu: pool_handle()}


class CUDAGraph:
    """``torch.cuda.CUDAGraph`` and ``torch.accelerator.Graph``."""

    def __init__(self, keep_graph: bool = False, **_: Any) -> None:
        self._capture: GraphCapture | None = None
        self._captured: GraphCapture | None = None
        self._ended: Any = None

    def capture_begin(
        self, pool: PoolId | None = None, capture_error_mode: str = "global", **_: Any
    ) -> None:
        """Capture what runs on the current stream from now on, on memory of ``pool``."""
        if self._captured is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, "
                "create a new instance."
            )
        trace = SESSION.running
        current = trace.target.selected.index
        stream = trace.streams[current].current
        if not stream:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        with trace.turn():
            pool = pool_handle(made_by_user=False) if pool is None else pool
            self._capture = GraphCapture(trace, current, stream, pool)

    def capture_end(self) -> None:
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        with capture.trace.turn():
            capture.end()
        self._captured = capture
        self._ended = finalize(self, _end, capture)
        self._ended.atexit = False

    def replay(self) -> None:
        captured = self._after_capture("replay")
        with captured.trace.working():
            captured.trace.values.replay(captured.recording)

    def reset(self) -> None:
        if self._ended is not None:
            self._ended()
        self._ended = self._captured = None

    def pool(self) -> PoolId:
        return self._after_capture("pool()").pool

    def instantiate(self) -> None:
        """Make the graph ready to be replayed, which takes nothing that is counted."""
        if self._captured is None:
            raise RuntimeError("capture_end() must have been called before calling instantiate")

    #: There is no graph of the driver's that would use a generator, or could be written down.
    register_generator_state = enable_debug_mode = debug_dump = nothing

    def raw_cuda_graph(self) -> NoReturn:
        raise UsageError(
            "torch.cuda.CUDAGraph: a trace has no cudaGraph_t to hand out. Skip this line while "
            "tracing"
        )

    raw_cuda_graph_exec = get_graph_data = raw_cuda_graph

    def _after_capture(self, what: str) -> "GraphCapture":
        if self._captured is None:
            raise RuntimeError(f"Called CUDAGraph::{what} without a preceding successful capture.")
        return self._captured


class Graph(CUDAGraph):
    """``torch.accelerator.Graph``, which is captured as it is entered."""

    def __init__(
        self,
        keep_graph: bool = False,
        *,
        pool: PoolId | None = None,
        capture_error_mode: str = "default",
    ) -> None:
        super().__init__(keep_graph)
        self.graph_pool = pool
        self.capture_error_mode = capture_error_mode

    def capture_begin(
        self, pool: PoolId | None = None, capture_error_mode: str = "default", **_: Any
    ) -> None:
        super().capture_begin(self.graph_pool)

    def __enter__(self) -> None:
        torch.accelerator.empty_cache()
        self.capture_begin()

    def __exit__(self, *_: object) -> None:
        self.capture_end()


class GraphCapture:
    """A capture, and the pool that serves it while it is in progress."""

    def __init__(self, trace: TraceContext, index: int, stream: int, pool: PoolId) -> None:
        self.trace = trace
        self.pool, self.stream = pool, stream
        self.memory = SESSION.gpus[index].memory
        self.recording = trace.values.begin_capture(index, stream)
        streams = self.recording.streams
        self._end_serving = self.memory.serve(pool, streams.__contains__, graph=True)

    def end(self) -> None:
        self.trace.values.recordings.remove(self.recording)
        self._end_serving()


def _end(captured: GraphCapture) -> None:
    """Delete a graph, and what cuBLAS keeps for its stream (``CUDAGraph::reset``,
    ``clearCublasWorkspacesForStream``).
    """
    captured.recording.drop()
    captured.memory.release_workspaces(captured.stream)
    captured.memory.follow().private.release(captured.pool)
