"""The device functions of ``torch.cuda`` and ``torch.accelerator``.

C++ asks its build which accelerator numbers of devices belong to (``at::getAccelerator``), and one
for the CPU has none.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.memory import DeviceMemory, DeviceProperties
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private import patches
from pytest_torchmem.torch_private.modes import made_by, make
from pytest_torchmem.torch_private.patches import Replacements

_HAS_CUDA = torch.backends.cuda.is_built()
_CUDA_SUCCESS = 0
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)

#: What the driver measures, of a GPU that does nothing.
_DRIVER_FIGURES = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")


def lazy_init(trace: TraceContext) -> Replacements:
    """Replace what C++ calls before it makes its first tensor on cuda, and then remembers.

    Every known way of making one is rewritten before it gets there. Where another does, a build
    with CUDA must not go on: it would take its context for initialised ever after.
    """

    def lazy_init() -> None:
        if _HAS_CUDA:
            raise UsageError(
                f"{trace.user_line()}: this way of creating a CUDA tensor is not supported in a "
                'trace. Use torch.empty(..., device="cuda"), or create the tensor on the CPU and '
                "move it with .cuda()"
            )

    return [patches.lazy_init.unless(trace.off, lazy_init)]


def device_functions(trace: TraceContext, gpu: Gpu, index: int) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda`` about one of the GPUs itself, by name.

    Where a program names none it is the current one.
    """
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: trace.gpus,
        "current_device": lambda: index,
        "set_device": lambda device: _nothing(trace.select(index)),
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: gpu.product,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: DeviceProperties(gpu),
        "get_arch_list": lambda: [f"sm_{gpu.capability[0]}{gpu.capability[1]}"],
        "can_device_access_peer": lambda device, peer: trace.device(as_device(peer)).index != index,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or gpu.capability >= (8, 0)
        ),
        "is_tf32_supported": lambda: gpu.capability >= (8, 0),
        "current_blas_handle": lambda: 0,
        "current_solver_handle": lambda: 0,
        "ipc_collect": lambda: None,
        **dict.fromkeys(_DRIVER_FIGURES, lambda device=None: 0),
        "_exchange_device": lambda device: trace.select(index),
        "_maybe_exchange_device": lambda device: trace.select(index),
        "_sleep": lambda cycles: None,
        **_sync_debug_mode(),
    }


def accelerator_functions(
    trace: TraceContext, index: int, memory: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Return those of ``torch.accelerator``, whose memory functions are ``torch.cuda``'s."""
    return {
        **{name: memory[name] for name in memory if not name.startswith("_")},
        "get_memory_info": memory["mem_get_info"],
        "is_available": lambda: True,
        "device_count": lambda: trace.gpus,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: index,
        "current_device_idx": lambda: index,
        "set_device_index": lambda device: _nothing(trace.select(index)),
        "set_device_idx": lambda device: _nothing(trace.select(index)),
        "get_device_capability": lambda device=None: {"supported_dtypes": set(_DTYPES)},
        "synchronize": lambda device=None: None,
        "empty_host_cache": lambda: None,
        "device_index": lambda device: _selected(trace, index),
    }


def _nothing(_: object) -> None:
    """Return nothing."""


@contextmanager
def _selected(trace: TraceContext, index: int) -> Iterator[None]:
    """Let a GPU be the current one for a while."""
    before = trace.select(index)
    try:
        yield
    finally:
        trace.select(before)


def runtime_functions(memory: DeviceMemory) -> dict[str, Callable[..., Any]]:
    """Return ``torch.cuda.cudart`` and the check of its results, by name."""
    runtime = SimpleNamespace(
        cudaError=SimpleNamespace(success=_CUDA_SUCCESS),
        cudaGetErrorString=lambda error: "no error",
        cudaHostRegister=lambda address, size, flags: _CUDA_SUCCESS,
        cudaHostUnregister=lambda address: _CUDA_SUCCESS,
        cudaMemGetInfo=lambda device=0: memory.free_and_total(),
        cudaProfilerStart=lambda: _CUDA_SUCCESS,
        cudaProfilerStop=lambda: _CUDA_SUCCESS,
    )
    return {"cudart": lambda: runtime, "check_error": lambda res: None}


def _sync_debug_mode() -> dict[str, Callable[..., Any]]:
    """``torch.cuda.set_sync_debug_mode``, without effect: nothing synchronizes."""
    modes = {"default": 0, "warn": 1, "error": 2}
    mode = 0

    def set_mode(debug_mode: int | str) -> None:
        nonlocal mode
        if debug_mode not in (*modes, *modes.values()):
            raise RuntimeError(
                "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
            )
        mode = modes[debug_mode] if isinstance(debug_mode, str) else int(debug_mode)

    return {"set_sync_debug_mode": set_mode, "get_sync_debug_mode": lambda: mode}


_CUDA = torch.device("cuda")


@contextmanager
def device_numbers() -> Iterator[None]:
    """Let ``torch.device(0)`` be ``cuda:0``, and cuda the accelerator, on the trace's thread."""
    with LASTING.layer("device numbers", _functions) as device, made_by(torch.device, device):
        yield


def _functions(trace: TraceContext) -> Layer[Callable[..., Any]]:
    """Return the layer, whose owner makes devices."""

    def device(*args: Any, **kwargs: Any) -> Any:
        number = args[0] if args else kwargs.get("device")
        if isinstance(number, Integral) and not isinstance(number, bool) and not trace.off():
            if number < 0:
                raise RuntimeError("Device index must not be negative")
            return make(torch.device, "cuda", int(number))
        return make(torch.device, *args, **kwargs)

    return Layer([patches.accelerator.unless(trace.off, lambda *_: _CUDA)], device)
