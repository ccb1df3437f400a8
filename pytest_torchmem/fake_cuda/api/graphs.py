"""``torch.cuda.MemPool`` and ``use_mem_pool``, memory apart, which requests are sent to; and
``torch.cuda.CUDAGraph``, a capture that makes its tensors in a pool apart, and replays.

aten/src/ATen/cuda/CUDAGraph.cpp. ``torch.cuda.graph`` and ``make_graphed_callables`` are torch's
own. A replay requests nothing; what it computes is computed again on the values that are there.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple, NoReturn
from weakref import finalize

import torch

from pytest_torchmem.allocator.caching import segments
from pytest_torchmem.allocator.device_memory import PoolId
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.fake_cuda.api.streams import capture_of
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.values.captured import GraphRecording
from pytest_torchmem.torch_private.devices import host_cache_known
from pytest_torchmem.torch_private.patches import replaced

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
        self._index = SESSION.running.current
        self._memory: DeviceMemory = SESSION.memories[self._index]
        self._memory.retain_pool(self.id)
        finalize(self, _release, self._memory, self.id).atexit = False

    @property
    def device(self) -> int:
        """The index of the GPU that the pool is on."""
        return self._index

    def use_count(self) -> int:
        """Return how many use the pool."""
        return self._memory.follow().private.uses(self.id)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments as ``torch.cuda.memory_snapshot`` does."""
        return segments(self._memory.follow(), self._index, self.id)


def _release(memory: DeviceMemory, pool: PoolId) -> None:
    # MemPool.cpp, ~MemPool
    memory.release_pool(pool)
    memory.empty_cache(pool)


def pool_functions(memories: Sequence[DeviceMemory]) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda`` about pools."""

    @contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        # torch/cuda/memory.py, use_mem_pool
        memory, thread = memories[SESSION.index_of(device)], get_ident()
        end = memory.serve(pool.id, lambda _: get_ident() == thread, graph=False)
        try:
            yield
        finally:
            end()
            memory.release_pool(pool.id)

    return {"use_mem_pool": use_mem_pool, "graph_pool_handle": pool_handle}


class _Captured(NamedTuple):
    """What a graph has after its capture."""

    trace: TraceContext
    memory: DeviceMemory
    pool: PoolId
    recording: GraphRecording


class CUDAGraph:
    """``torch.cuda.CUDAGraph`` and ``torch.accelerator.Graph``."""

    def __init__(self, keep_graph: bool = False, **_: Any) -> None:
        self._capture: Capture | None = None
        self._captured: _Captured | None = None
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
        stream = trace.streams[trace.current].current
        if not stream:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. (However, after capture, "
                "it's ok to replay them on the default stream.)"
            )
        with trace.turn():
            pool = pool_handle(made_by_user=False) if pool is None else pool
            self._capture = Capture(trace, trace.current, stream, pool)

    def capture_end(self) -> None:
        """End the capture."""
        capture, self._capture = self._capture, None
        if capture is None:
            raise RuntimeError("capture_end() called before capture_begin().")
        with capture.trace.turn():
            self._captured = captured = capture.end()
        self._ended = finalize(self, _end, captured)
        self._ended.atexit = False

    def replay(self) -> None:
        """Run what was captured."""
        captured = self._after_capture("replay")
        with captured.trace.working():
            captured.trace.values.replay(captured.recording)

    def reset(self) -> None:
        """Delete the graph; its pool may be given back."""
        if self._ended is not None:
            self._ended()
        self._ended = self._captured = None

    def pool(self) -> PoolId:
        """Return the pool on whose memory it was captured."""
        return self._after_capture("pool()").pool

    def instantiate(self) -> None:
        """Make the graph ready to be replayed, which takes nothing that is counted."""
        if self._captured is None:
            raise RuntimeError("capture_end() must have been called before calling instantiate")

    def register_generator_state(self, *_: Any) -> None:
        """Let the graph use a generator."""

    def enable_debug_mode(self) -> None:
        """Let ``debug_dump`` write something, which a trace does not."""

    def debug_dump(self, *_: Any) -> None:
        """Write nothing: there is no graph of the driver's."""

    def raw_cuda_graph(self) -> NoReturn:
        """Raise ``UsageError``."""
        raise UsageError(
            "torch.cuda.CUDAGraph: a trace has no cudaGraph_t to hand out. Skip this line while "
            "tracing"
        )

    raw_cuda_graph_exec = get_graph_data = raw_cuda_graph

    def _after_capture(self, what: str) -> _Captured:
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
        """Capture what runs on the current stream from now on."""
        super().capture_begin(self.graph_pool)

    def __enter__(self) -> None:
        torch.accelerator.empty_cache()
        self.capture_begin()

    def __exit__(self, *_: object) -> None:
        self.capture_end()


class Capture:
    """A capture in progress, and the streams that belong to it."""

    def __init__(self, trace: TraceContext, index: int, stream: int, pool: PoolId) -> None:
        self.trace = trace
        self.index = index
        self.streams = {stream}
        self._pool = pool
        self._memory = SESSION.memories[index]
        device = torch.device("cuda", index)
        self._recording = trace.values.begin_capture(device, self.streams.__contains__)
        self._end_serving = self._memory.serve(pool, self.streams.__contains__, graph=True)
        SESSION.captures.append(self)

    def end(self) -> _Captured:
        """End the capture, and return what it leaves."""
        SESSION.captures.remove(self)
        self.trace.values.end_capture(self._recording)
        self._end_serving()
        return _Captured(self.trace, self._memory, self._pool, self._recording)


def _end(captured: _Captured) -> None:
    """Delete a graph (``CUDAGraph::reset``)."""
    captured.recording.drop(captured.trace.values.contents)
    captured.memory.release_pool(captured.pool)


def graph_functions(index: int) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda`` about a GPU's graphs."""
    return {
        "is_current_stream_capturing": lambda: (
            capture_of(index, SESSION.running.streams[index].current) is not None
        )
    }


@contextmanager
def graphs_captured() -> Iterator[None]:
    """Let ``torch.cuda.graph`` begin without a stream of its own, as in a new process."""
    with replaced(torch.cuda.graphs.graph, default_capture_stream=None), host_cache_known():
        yield
