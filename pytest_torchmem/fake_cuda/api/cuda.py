"""What ``torch.cuda`` answers while a trace stands for a GPU, with the ledger's own figures.

Nothing here reaches a CUDA context: with a GPU present, it is as initialised after a trace as it
was before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nvtx
import torch.cuda.profiler

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.data_parallel import communication_answers, scattering
from pytest_torchmem.fake_cuda.api.factories import standing_in
from pytest_torchmem.fake_cuda.api.generators import (
    default_generator,
    generators,
    random_answers,
)
from pytest_torchmem.fake_cuda.api.memory import memory_answers
from pytest_torchmem.fake_cuda.api.profilers import profilers_of_nothing, runtime_answers
from pytest_torchmem.fake_cuda.api.streams import (
    CUDAGraph,
    Event,
    ExternalStream,
    MemPool,
    Stream,
    StreamContext,
    no_graphs,
    stream_answers,
    streams_of,
)
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.matmul.cuda import cublas_workspace, cublaslt_workspace
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.patches import replaced

CUDNN_VERSION = 91900
"""The cuDNN that comes with torch 2.13's CUDA wheels is 9.19 or newer."""

_CUDA_VERSION = "13.0"
"""What torch 2.13's CUDA wheels on PyPI are built with; a build with CUDA has its own."""

_HAS_CUDA = torch.backends.cuda.is_built()

#: ``cudnnRNNMode_t``, which a build without cuDNN does not have.
_RNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}


@contextmanager
def cuda_answers(trace: TraceContext, device_memory: DeviceMemory) -> Iterator[None]:
    """Answer for the GPU on the trace's thread; nothing reaches a real CUDA context."""
    gpu = trace.gpu
    memory = memory_answers(device_memory)
    streams = stream_answers()
    generator = default_generator()
    device = {
        **_device(gpu),
        **_sync_debug_mode(),
        **runtime_answers(device_memory),
        **streams,
        **random_answers(generator),
        **memory,
    }
    accelerator = {**streams, **_accelerator(gpu, memory)}
    functions: list[tuple[Any, dict[str, Callable[..., Any]]]] = [
        *[
            (module, device)
            for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
        ],
        *[(module, accelerator) for module in (torch.accelerator, torch.accelerator.memory)],
        (torch.backends.cudnn, _cudnn()),
        (torch.backends.cudnn.rnn, {"get_cudnn_mode": _RNN_MODES.__getitem__}),
        (torch.cuda.nvtx, _nvtx()),
        (torch.cuda.profiler, {"start": lambda: None, "stop": lambda: None}),
        (torch.backends.cuda, {**_BUILT, **_blas(gpu)}),
        communication_answers(),
    ]
    classes: list[tuple[ModuleType, str, type]] = [
        (module, name, stand_in)
        for name, stand_in in (("Stream", Stream), ("Event", Event))
        for module in (torch, torch.cuda, torch.cuda.streams)
    ]
    classes += [
        (torch.cuda, "StreamContext", StreamContext),
        *[
            (module, "ExternalStream", ExternalStream)
            for module in (torch.cuda, torch.cuda.streams)
        ],
        *[(module, "CUDAGraph", CUDAGraph) for module in (torch.cuda, torch.cuda.graphs)],
        (torch.accelerator, "Graph", CUDAGraph),
        *[(module, "MemPool", MemPool) for module in (torch.cuda, torch.cuda.memory)],
    ]
    with (
        streams_of(trace.streams),
        standing_in(trace, functions, classes),
        generators(generator),
        profilers_of_nothing(trace),
        scattering(trace),
        replaced(torch.version, cuda=torch.version.cuda or _CUDA_VERSION),
        replaced(torch.cuda, _lazy_init=_lazy_init(trace)),
    ):
        yield


def _lazy_init(trace: TraceContext) -> Callable[[], None]:
    """Return what C++ calls before it makes its first tensor on cuda, and then remembers.

    Every known way of making one is rewritten before it gets there. Where another does, a build
    with CUDA must not go on: it would take its context for initialised ever after.
    """
    original: Any = torch.cuda._lazy_init

    def lazy_init() -> None:
        if trace.off():
            original()
        elif _HAS_CUDA:
            raise UsageError(
                f"{trace.user_line()}: a trace on "
                'fake cuda does not know this way of making a tensor on "cuda"; make it with '
                'torch.empty(..., device="cuda") or move it there with .cuda()'
            )

    return lazy_init


def _device(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: gpu.product,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: DeviceProperties(gpu),
        "get_arch_list": lambda: [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
        "can_device_access_peer": lambda device, peer: False,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or gpu.capability >= (8, 0)
        ),
        "is_tf32_supported": lambda: gpu.capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "current_blas_handle": lambda: 0,
        "current_solver_handle": lambda: 0,
        "ipc_collect": lambda: None,
        **dict.fromkeys(_DRIVER_FIGURES, _at_rest),
        "graph_pool_handle": _graph_pool,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_sleep": lambda cycles: None,
    }


#: What the driver measures, of a GPU that does nothing.
_DRIVER_FIGURES = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")


def _at_rest(device: Any = None) -> int:
    return 0


def _graph_pool() -> Any:
    raise no_graphs("torch.cuda.graph_pool_handle")


def _sync_debug_mode() -> dict[str, Callable[..., Any]]:
    """``torch.cuda.set_sync_debug_mode``: nothing synchronizes, so that nothing is told."""
    mode = 0

    def set_mode(debug_mode: int | str) -> None:
        nonlocal mode
        if debug_mode not in (*_SYNC_DEBUG_MODES, 0, 1, 2):
            raise RuntimeError(
                "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
            )
        mode = (
            _SYNC_DEBUG_MODES.index(debug_mode) if isinstance(debug_mode, str) else int(debug_mode)
        )

    return {"set_sync_debug_mode": set_mode, "get_sync_debug_mode": lambda: mode}


def _accelerator(gpu: Gpu, memory: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """``torch.accelerator``, whose memory functions are those of ``torch.cuda``."""
    return {
        **{name: memory[name] for name in memory if not name.startswith("_")},
        "get_memory_info": memory["mem_get_info"],
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": lambda device: None,
        "set_device_idx": lambda device: None,
        "get_device_capability": lambda device=None: {"supported_dtypes": set(_DTYPES)},
        "synchronize": lambda device=None: None,
        "empty_host_cache": lambda: None,
        "device_index": lambda device: nullcontext(),
    }


_SYNC_DEBUG_MODES = ("default", "warn", "error")

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)


#: What every build with CUDA has.
_BUILT: dict[str, Callable[..., Any]] = {
    "is_built": lambda: True,
    "is_flash_attention_available": lambda: True,
}


def _cudnn() -> dict[str, Callable[..., Any]]:
    def is_acceptable(tensor: torch.Tensor) -> bool:
        return (
            torch.backends.cudnn.enabled
            and tensor.device.type == "cuda"
            and tensor.dtype in (torch.float16, torch.float32, torch.float64)
        )

    return {
        "is_available": lambda: True,
        "version": lambda: CUDNN_VERSION,
        "is_acceptable": is_acceptable,
    }


def _blas(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    def size_of(name: str, bytes_of: Callable[[Gpu], int]) -> Callable[..., int]:
        def size(size: int | None = None) -> int:
            if size is not None:
                raise UsageError(
                    f"torch.backends.cuda.{name}({size}): a trace takes the size from the "
                    "environment (CUBLAS_WORKSPACE_CONFIG, CUBLASLT_WORKSPACE_SIZE); set it there"
                )
            return bytes_of(gpu)

        return size

    return {
        "cublas_workspace_size": size_of("cublas_workspace_size", cublas_workspace),
        "cublaslt_workspace_size": size_of("cublaslt_workspace_size", cublaslt_workspace),
    }


def _nvtx() -> dict[str, Callable[..., Any]]:
    return {
        "range_push": lambda msg: 0,
        "range_pop": lambda: 0,
        "range_start": lambda msg: 0,
        "range_end": lambda range_id: None,
        "mark": lambda msg: None,
    }


#: Shared memory in KiB by compute capability: of a multiprocessor, and the most of it for a block
#: (CUDA C++ Programming Guide, technical specifications per compute capability).
_SHARED_MEMORY = {
    (7, 0): (96, 96),
    (7, 5): (64, 64),
    (8, 0): (164, 163),
    (8, 6): (100, 99),
    (8, 9): (100, 99),
    (9, 0): (228, 227),
    (10, 0): (228, 227),
    (12, 0): (100, 99),
}


class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` returns."""

    def __init__(self, gpu: Gpu) -> None:
        self.name = gpu.product
        self.major, self.minor = gpu.capability
        self.total_memory = gpu.memory
        self.multi_processor_count = gpu.multiprocessors
        self.max_threads_per_multi_processor = gpu.threads_per_multiprocessor
        self.warp_size = 32
        self.regs_per_multiprocessor = 65536
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName = gpu.product
        self.max_threads_per_block = 1024
        self.shared_memory_per_block = 48 * 1024
        if gpu.capability in _SHARED_MEMORY:
            multiprocessor, block = _SHARED_MEMORY[gpu.capability]
            self.shared_memory_per_multiprocessor = multiprocessor * 1024
            self.shared_memory_per_block_optin = block * 1024

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 1024**2}MB, "
            f"multi_processor_count={self.multi_processor_count})"
        )
