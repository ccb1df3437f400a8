"""The trace that ``torch.cuda`` belongs to, and functions and classes that ask it; the device
functions of ``torch.cuda`` and ``torch.accelerator``.

These are made once for a process, and a trace lends them what they call: there are more than a
hundred, and to make them anew would be the most of what a small model's trace takes.

Questions whether there is a GPU are noted: what a fixture makes depends on the answer. C++ asks its
build which accelerator numbers of devices belong to (``at::getAccelerator``), and one for the CPU
has none.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from numbers import Integral
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.accelerator

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.memory import DeviceMemory, DeviceProperties
from pytest_torchmem.interception.context import LASTING, Layer, TraceContext
from pytest_torchmem.targets.target import as_device, index_of
from pytest_torchmem.torch_private import patches
from pytest_torchmem.torch_private.function_holders import is_of_program
from pytest_torchmem.torch_private.modes import made_by, make
from pytest_torchmem.torch_private.patches import ABSENT, LookedAt, Replacements, replaced_all

Functions = Mapping[str, Callable[..., Any]]
"""Functions by their names in a module."""


@dataclass(frozen=True)
class Api:
    """What modules of torch have in a trace; what this version of torch lacks is passed over."""

    functions: tuple[tuple[Any, Functions], ...]
    classes: tuple[tuple[ModuleType, str, type], ...]


class Session:
    """The trace that is running; a process runs one at a time."""

    def __init__(self) -> None:
        self.trace: TraceContext | None = None
        self.functions: Callable[[], Sequence[Mapping[str, Functions]]] = tuple
        """By the index of the GPU that they are about, and by module; made when first called."""
        self.memories: Sequence[DeviceMemory] = ()
        """Those of the GPUs, by index."""

    def off(self) -> bool:
        """Return whether torch's own function or class is meant."""
        return self.trace is None or self.trace.off()

    def index_of(self, device: Any) -> int:
        """Return the index of the GPU that a program names; None is the current one."""
        trace = self.running
        return index_of(device, trace.target.gpus, trace.target.selected.index)

    @property
    def running(self) -> TraceContext:
        """The trace that is running, while replaced functions are on."""
        assert self.trace is not None
        return self.trace


SESSION = Session()


@contextmanager
def session(
    trace: TraceContext, make_apis: Callable[[], Sequence[Api]], memories: Sequence[DeviceMemory]
) -> Iterator[None]:
    """Let modules of torch have functions and classes; ``make_apis()`` has those about each GPU."""

    @cache
    def functions() -> Sequence[Mapping[str, Functions]]:
        return [
            {module.__name__: functions for module, functions in api.functions}
            for api in make_apis()
        ]

    with (
        patches.having(SESSION, trace=trace, functions=functions, memories=memories),
        LASTING.layer("torch.cuda", partial(_functions, make_apis)),
    ):
        yield


def _functions(make_apis: Callable[[], Sequence[Api]], _: TraceContext) -> Layer[None]:
    api = make_apis()[0]
    replacements: list[tuple[Any, dict[str, Any]]] = []
    looked_at: list[LookedAt] = []
    for module, functions in api.functions:
        present = {
            name: _function(getattr(module, name), module.__name__, name)
            for name in _present(module, tuple(functions))
        }
        replacements.append((module, present))
    for module, name, kind in api.classes:
        original = vars(module).get(name)
        looked_at.append((vars(module), name, ABSENT if original is None else original))
        if isinstance(original, type) and not is_of_program(module, name, original):
            replacements.append((module, {name: _class(original, kind)}))
    return Layer(replacements, None, looked_at=looked_at)


@cache
def _present(module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a module has: most do not have most of them."""
    return tuple(name for name in names if getattr(module, name, None) is not None)


@cache
def _function(original: Any, module: str, name: str) -> Callable[..., Any]:
    place, keyword = _device_argument(original)

    def function(*args: Any, **kwargs: Any) -> Any:
        if SESSION.off():
            return original(*args, **kwargs)
        named = None
        if place is not None:
            named = args[place] if len(args) > place else kwargs.get(keyword)
        with SESSION.running.turn():
            return SESSION.functions()[SESSION.index_of(named)][module][name](*args, **kwargs)

    function.__name__ = name
    function.__doc__ = original.__doc__
    function.__wrapped__ = original  # type: ignore[attr-defined]
    return function


#: Functions of C++ that ``_exchange_device`` and its like are in a build with CUDA. They name no
#: argument; from Python 3.13 on their signature is ``(object, /)``.
_OF_A_DEVICE = ("_cuda_exchangeDevice", "_cuda_maybeExchangeDevice")


def _device_argument(function: Any) -> tuple[int | None, str]:
    """Return position and name of the argument that says which device, if there is one."""
    if getattr(function, "__name__", "") in _OF_A_DEVICE:
        return 0, "device"
    try:
        names = list(signature(function).parameters)
    except (TypeError, ValueError):  # of C++
        return None, ""
    for name in ("device", "device_index"):
        if name in names:
            return names.index(name), name
    return None, ""


@cache
def _class(original: Any, in_trace: type) -> Any:
    return patches.class_unless(SESSION.off, in_trace, original, in_trace)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_QUESTIONS = (
    (torch.cuda, ("is_available", "device_count", "is_bf16_supported")),
    (torch.accelerator, ("is_available", "device_count", "current_accelerator")),
)


@contextmanager
def questions_noted() -> Iterator[list[str]]:
    """Yield the names of what is asked meanwhile, by code that is not torch's own."""
    asked: list[str] = []

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def question(*args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.startswith(_TORCH):
                asked.append(name)
            return original(*args, **kwargs)

        return question

    replacements = [
        (module, {name: noting(name, getattr(module, name)) for name in names})
        for module, names in _QUESTIONS
    ]
    with replaced_all(replacements):
        yield asked


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


def device_functions(
    trace: TraceContext, memory: DeviceMemory, index: int
) -> dict[str, Callable[..., Any]]:
    """Return the functions of ``torch.cuda`` about one of the GPUs itself, by name, with
    ``cudart`` and the check of its results. Where a program names none it is the current one.
    """
    gpu = memory.gpu
    runtime = SimpleNamespace(
        cudaError=SimpleNamespace(success=_CUDA_SUCCESS),
        cudaGetErrorString=lambda error: "no error",
        cudaHostRegister=lambda address, size, flags: _CUDA_SUCCESS,
        cudaHostUnregister=lambda address: _CUDA_SUCCESS,
        cudaMemGetInfo=lambda device=0: memory.free_and_total(),
        cudaProfilerStart=lambda: _CUDA_SUCCESS,
        cudaProfilerStop=lambda: _CUDA_SUCCESS,
    )
    return {
        "cudart": lambda: runtime,
        "check_error": lambda res: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: trace.target.gpus,
        "current_device": lambda: index,
        "set_device": lambda device: nothing(trace.select(index)),
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
        "device_count": lambda: trace.target.gpus,
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: index,
        "current_device_idx": lambda: index,
        "set_device_index": lambda device: nothing(trace.select(index)),
        "set_device_idx": lambda device: nothing(trace.select(index)),
        "get_device_capability": lambda device=None: {"supported_dtypes": set(_DTYPES)},
        "synchronize": lambda device=None: None,
        "empty_host_cache": lambda: None,
        "device_index": lambda device: patches.having(trace.target.selected, index=index),
    }


def nothing(*_: object) -> None:
    """Return nothing, whatever was done."""


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
    with (
        LASTING.layer("device numbers", _device_functions) as device,
        made_by(torch.device, device),
    ):
        yield


def _device_functions(trace: TraceContext) -> Layer[Callable[..., Any]]:
    """Return the layer, whose owner makes devices."""

    def device(*args: Any, **kwargs: Any) -> Any:
        number = args[0] if args else kwargs.get("device")
        if isinstance(number, Integral) and not isinstance(number, bool) and not trace.off():
            if number < 0:
                raise RuntimeError("Device index must not be negative")
            return make(torch.device, "cuda", int(number))
        return make(torch.device, *args, **kwargs)

    return Layer([patches.accelerator.unless(trace.off, lambda *_: _CUDA)], device)
