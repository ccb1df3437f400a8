"""``torch.cuda`` and its neighbours in a trace, module by module.

Nothing here reaches a CUDA context: with a GPU present, it is as initialised after a trace as it
was before. Raw pointers and what only a driver has are refused; profilers of CUDA run, and see
nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
from torch.autograd import profiler
from torch.nn.parallel import comm

from pytest_torchmem.allocator.caching import segments
from pytest_torchmem.allocator.device_memory import PoolId
from pytest_torchmem.allocator.options import parse_options
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api import backends, data_parallel, device
from pytest_torchmem.fake_cuda.api.data_parallel import NCCL
from pytest_torchmem.fake_cuda.api.generators import Generator, random_functions
from pytest_torchmem.fake_cuda.api.graphs import (
    CUDAGraph,
    Graph,
    MemPool,
    graph_functions,
    pool_functions,
)
from pytest_torchmem.fake_cuda.api.session import Api
from pytest_torchmem.fake_cuda.api.streams import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    stream_functions,
)
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.names import listed
from pytest_torchmem.torch_private.patches import Replacements, unless

_CUDA = (torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
_ACCELERATOR = (torch.accelerator, torch.accelerator.memory)


def torch_cuda(
    trace: TraceContext, memories: Sequence[DeviceMemory], generators: Sequence[Generator]
) -> list[Api]:
    """Return what the modules have about each GPU, with its memory and its default generator."""
    return [_about(trace, index, memories, generators) for index in range(len(memories))]


def _about(
    trace: TraceContext,
    index: int,
    memories: Sequence[DeviceMemory],
    generators: Sequence[Generator],
) -> Api:
    memory = memories[index]
    gpu = memory.gpu
    of_memory = memory_functions(memory, memories)
    of_streams = stream_functions(index)
    cuda = {
        **device.device_functions(trace, gpu, index),
        **device.runtime_functions(memory),
        **of_streams,
        **graph_functions(index),
        **pool_functions(memories),
        **{name: _refused(name) for name in _OF_POINTERS},
        **random_functions(generators[index], generators),
        **of_memory,
    }
    accelerator = {**of_streams, **device.accelerator_functions(trace, index, of_memory)}
    return Api(
        (
            *[(module, cuda) for module in _CUDA],
            *[(module, accelerator) for module in _ACCELERATOR],
            (torch.backends.cudnn, backends.CUDNN),
            (torch.backends.cudnn.rnn, backends.CUDNN_RNN),
            (torch.backends.cuda, {**backends.BUILT, **backends.blas(gpu)}),
            (torch.cuda.nccl, NCCL),
            (torch.cuda.nvtx, NVTX),
            (torch.cuda.profiler, CUDA_PROFILER),
            (comm, data_parallel.communication(trace)),
        ),
        _CLASSES,
    )


_CLASSES = tuple(
    (module, name, kind)
    for name, kind, modules in (
        ("Stream", Stream, (torch, torch.cuda, torch.cuda.streams)),
        ("Event", Event, (torch, torch.cuda, torch.cuda.streams)),
        ("StreamContext", StreamContext, (torch.cuda,)),
        ("ExternalStream", ExternalStream, (torch.cuda, torch.cuda.streams)),
        ("CUDAGraph", CUDAGraph, (torch.cuda, torch.cuda.graphs)),
        ("Graph", Graph, (torch.accelerator,)),
        ("MemPool", MemPool, (torch.cuda, torch.cuda.memory)),
    )
    for module in modules
)


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return what raises ``UsageError`` in the place of ``torch.cuda``'s ``name``."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"torch.cuda.{name}: raw GPU pointers are not available in a trace. Allocate a tensor "
            "of that size, or skip this call while tracing"
        )

    return refuse


_OF_POINTERS = listed("""
    caching_allocator_alloc caching_allocator_delete caching_allocator_enable
    change_current_allocator
""")

NVTX: dict[str, Callable[..., Any]] = {
    "range_push": lambda msg: 0,
    "range_pop": lambda: 0,
    "range_start": lambda msg: 0,
    "range_end": lambda range_id: None,
    "mark": lambda msg: None,
}
"""``torch.cuda.nvtx``."""

CUDA_PROFILER: dict[str, Callable[..., Any]] = {"start": lambda: None, "stop": lambda: None}
"""``torch.cuda.profiler``."""


def profilers(trace: TraceContext) -> Replacements:
    """Let ``torch.profiler`` look at the host alone, and ``emit_nvtx`` do nothing."""
    original: Any = profiler.profile.__init__
    nvtx: Any = profiler.emit_nvtx

    def init(self: Any, enabled: bool = True, **options: Any) -> None:
        if not trace.off() and (options.get("use_cuda") or options.get("use_device") == "cuda"):
            options.pop("use_cuda", None)  # torch 2.15 has it no more
            options |= {"use_device": None, "use_cpu": True}
        original(self, enabled, **options)

    silent = {
        "__enter__": unless(trace.off, lambda self: self, nvtx.__enter__),
        "__exit__": unless(trace.off, lambda *_: None, nvtx.__exit__),
    }
    return [(profiler.profile, {"__init__": init}), (nvtx, silent)]


#: torch's own function goes through its own ``memory_stats``, which is replaced here.
_SUMMARY: Callable[..., str] = torch.cuda.memory_summary


def memory_functions(
    memory: DeviceMemory, memories: Sequence[DeviceMemory]
) -> dict[str, Callable[..., Any]]:
    """Return the functions about a GPU's memory by name; all of them tell of one replay.

    A snapshot tells of the ``memories`` of all GPUs.
    """

    def all_segments(pool: PoolId | None = None) -> list[dict[str, Any]]:
        of_each = [segments(one.follow(), index, pool) for index, one in enumerate(memories)]
        return [segment for found in of_each for segment in found]

    def snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
        traces: list[list[Any]] = [[] for _ in memories]
        return {"segments": all_segments(), "device_traces": traces, "external_annotations": []}

    return {
        **_figures(memory),
        "memory_stats": lambda device=None: OrderedDict(memory.statistics()),
        "memory_stats_as_nested_dict": lambda device=None: _nested(memory.statistics()),
        "memory_summary": lambda device=None, abbreviated=False: _SUMMARY(device, abbreviated),
        "memory_snapshot": lambda mempool_id=None, include_traces=True: all_segments(mempool_id),
        "_snapshot": snapshot,
        "_record_memory_history": lambda *args, **kwargs: None,
        "mem_get_info": lambda device=None: memory.free_and_total(),
        "device_memory_used": lambda device=None: memory.gpu.memory - memory.free_and_total()[0],
        "reset_accumulated_memory_stats": lambda device=None: (
            memory.follow().statistics.reset_totals()
        ),
        "empty_cache": lambda: _empty_caches(memories),
        "set_per_process_memory_fraction": lambda fraction, device=None: _set_fraction(
            memory, fraction
        ),
        "get_per_process_memory_fraction": lambda device=None: (
            1.0 if (allowed := memory.allocator.allowed) is None else allowed / memory.gpu.memory
        ),
        "_set_allocator_settings": lambda env: memory.set_options(
            parse_options(env, memory.allocator.options)
        ),
        "get_allocator_backend": lambda: "native",
        "host_memory_stats": dict,
        "host_memory_stats_as_nested_dict": dict,
        "reset_accumulated_host_memory_stats": lambda: None,
        "reset_peak_host_memory_stats": lambda: None,
    }


def _figures(memory: DeviceMemory) -> dict[str, Callable[..., Any]]:
    """Return the functions that give one figure of the allocator's statistics, or reset peaks."""

    def reset_peaks(device: Any = None) -> None:
        memory.follow().statistics.reset_peaks()

    def figure(name: str, part: str) -> Callable[..., int]:
        in_all = attrgetter(f"all.{name}_bytes.{part}")
        return lambda device=None: in_all(memory.follow().statistics)

    functions: dict[str, Callable[..., Any]] = dict.fromkeys(
        ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
        reset_peaks,
    )
    for name in ("allocated", "reserved", "cached"):
        counted = "reserved" if name == "cached" else name
        functions[f"memory_{name}"] = figure(counted, "current")
        functions[f"max_memory_{name}"] = figure(counted, "peak")
    return functions


def _empty_caches(memories: Sequence[DeviceMemory]) -> None:
    for memory in memories:
        memory.empty_cache()


def _nested(statistics: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in statistics.items():
        *outer, last = name.split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


def _set_fraction(memory: DeviceMemory, fraction: Any) -> None:
    # As torch.cuda.memory.set_per_process_memory_fraction.
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    memory.set_memory_fraction(fraction)
