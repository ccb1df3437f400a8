"""The trace that ``torch.cuda`` belongs to, and functions and classes that ask it; the device
functions of ``torch.cuda`` and ``torch.accelerator``.

These are made once for a process, and a trace lends them the GPU that they are about: there are
more than a hundred, and to make them anew would be the most of what a small model's trace takes.

Questions whether there is a GPU are noted: what a fixture makes depends on the answer. C++ asks its
build which accelerator numbers of devices belong to (``at::getAccelerator``), and one for the CPU
has none.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import signature
from numbers import Integral
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.accelerator

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.memory import DeviceMemory, DeviceProperties
from pytest_torchmem.interception.context import Layer, TraceContext
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.target import as_device, index_of
from pytest_torchmem.torch_private import modes, patches
from pytest_torchmem.torch_private.function_holders import is_of_program

Functions = dict[str, Callable[..., Any]]
"""Functions by their names in a module. They are called with a ``FakeGpu`` first: the one that the
program names, or the current one."""


class Api(NamedTuple):
    """What modules of torch have in a trace; what this version of torch lacks is passed over."""

    functions: tuple[tuple[Any, Functions], ...]
    classes: tuple[tuple[ModuleType, str, type], ...]


@dataclass(eq=False, repr=False)
class FakeGpu:
    """A GPU of the trace that is running."""

    index: int
    memory: DeviceMemory
    generator: torch.Generator
    """The default one."""
    sync_debug_mode: int = 0

    @property
    def model(self) -> Gpu:
        return self.memory.gpu


class Session:
    """The trace that is running; a process runs one at a time."""

    def __init__(self) -> None:
        self.trace: TraceContext | None = None
        self.gpus: Sequence[FakeGpu] = ()

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


def api_functions(api: Api, _: TraceContext) -> Layer[None]:
    """Let modules of torch have functions and classes, which ask the ``SESSION``."""
    replacements: list[tuple[Any, dict[str, Any]]] = []
    looked_at: list[patches.LookedAt] = []
    for module, functions in api.functions:
        present = {
            name: _function(getattr(module, name), functions[name], name)
            for name in _present(module, tuple(functions))
        }
        replacements.append((module, present))
    for module, name, kind in api.classes:
        original = vars(module).get(name)
        looked_at.append((vars(module), name, patches.ABSENT if original is None else original))
        if isinstance(original, type) and not is_of_program(module, name, original):
            replacements.append((module, {name: _class(original, kind)}))
    return Layer(replacements, None, looked_at=looked_at)


@cache
def _present(module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a module has: most do not have most of them."""
    return tuple(name for name in names if getattr(module, name, None) is not None)


@cache
def _function(original: Any, in_trace: Callable[..., Any], name: str) -> Callable[..., Any]:
    place, keyword = _device_argument(original)

    def function(*args: Any, **kwargs: Any) -> Any:
        if SESSION.off():
            return original(*args, **kwargs)
        named = None
        if place is not None:
            named = args[place] if len(args) > place else kwargs.get(keyword)
        with SESSION.running.turn():
            return in_trace(SESSION.gpus[SESSION.index_of(named)], *args, **kwargs)

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
    with patches.replaced_all(replacements):
        yield asked


_HAS_CUDA = torch.backends.cuda.is_built()
_CUDA_SUCCESS = 0
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)

#: What the driver measures, of a GPU that does nothing.
_DRIVER_FIGURES = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")


def lazy_init(trace: TraceContext) -> patches.Replacements:
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


def _runtime(gpu: FakeGpu) -> Any:
    return SimpleNamespace(
        cudaError=SimpleNamespace(success=_CUDA_SUCCESS),
        cudaGetErrorString=lambda error: "no error",
        cudaHostRegister=lambda address, size, flags: _CUDA_SUCCESS,
        cudaHostUnregister=lambda address: _CUDA_SUCCESS,
        cudaMemGetInfo=lambda device=0: gpu.memory.free_and_total(),
        cudaProfilerStart=lambda: _CUDA_SUCCESS,
        cudaProfilerStop=lambda: _CUDA_SUCCESS,
    )


def nothing(*_: Any, **__: Any) -> None:
    """Return nothing: all work is done, and there is none to wait for."""


_SYNC_DEBUG_MODES = {"default": 0, "warn": 1, "error": 2}


def _set_sync_debug_mode(gpu: FakeGpu, debug_mode: Any) -> None:
    """``torch.cuda.set_sync_debug_mode``, without effect: nothing synchronizes."""
    if debug_mode not in (*_SYNC_DEBUG_MODES, *_SYNC_DEBUG_MODES.values()):
        raise RuntimeError(
            "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
        )
    gpu.sync_debug_mode = _SYNC_DEBUG_MODES.get(debug_mode, debug_mode)


def _select(gpu: FakeGpu, device: Any) -> int:
    return SESSION.running.select(gpu.index)


DEVICE: Functions = {
    "cudart": _runtime,
    "check_error": lambda gpu, res: None,
    "is_available": lambda gpu: True,
    "is_initialized": lambda gpu: True,
    "init": lambda gpu: None,
    "device_count": lambda gpu: SESSION.running.target.gpus,
    "current_device": lambda gpu: gpu.index,
    "set_device": lambda gpu, device: nothing(_select(gpu, device)),
    "synchronize": lambda gpu, device=None: None,
    "get_device_properties": lambda gpu, device=None: DeviceProperties(gpu.model),
    "get_arch_list": lambda gpu: ["sm_{}{}".format(*gpu.model.capability)],
    "can_device_access_peer": lambda gpu, device, peer: (
        SESSION.running.device(as_device(peer)).index != gpu.index
    ),
    "is_bf16_supported": lambda gpu, including_emulation=True: (
        including_emulation or gpu.model.capability >= (8, 0)
    ),
    "current_blas_handle": lambda gpu: 0,
    "current_solver_handle": lambda gpu: 0,
    "ipc_collect": lambda gpu: None,
    **dict.fromkeys(_DRIVER_FIGURES, lambda gpu, device=None: 0),
    "_exchange_device": _select,
    "_maybe_exchange_device": _select,
    "_sleep": lambda gpu, cycles: None,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_sync_debug_mode": lambda gpu: gpu.sync_debug_mode,
}
"""The functions of ``torch.cuda`` about a GPU itself, with ``cudart`` and the check of its results.
"""

ACCELERATOR: Functions = {
    "is_available": lambda gpu: True,
    "device_count": lambda gpu: SESSION.running.target.gpus,
    "current_accelerator": lambda gpu, check_available=False: torch.device("cuda"),
    **dict.fromkeys(("current_device_index", "current_device_idx"), lambda gpu: gpu.index),
    **dict.fromkeys(("set_device_index", "set_device_idx"), DEVICE["set_device"]),
    "get_device_capability": lambda gpu, device=None: {"supported_dtypes": set(_DTYPES)},
    "synchronize": lambda gpu, device=None: None,
    "empty_host_cache": lambda gpu: None,
    "device_index": lambda gpu, device: patches.having(
        SESSION.running.target.selected, index=gpu.index
    ),
}
"""Those of ``torch.accelerator``, but for streams and memory, which it shares with ``torch.cuda``.
"""

_CUDA = torch.device("cuda")


def device_numbers(trace: TraceContext) -> Layer[Callable[..., Any]]:
    """Let ``torch.device(0)`` be ``cuda:0``, and cuda the accelerator, on the trace's thread. The
    layer's owner makes devices.
    """

    def device(*args: Any, **kwargs: Any) -> Any:
        number = args[0] if args else kwargs.get("device")
        if isinstance(number, Integral) and not isinstance(number, bool) and not trace.off():
            if number < 0:
                raise RuntimeError("Device index must not be negative")
            return modes.make(torch.device, "cuda", int(number))
        return modes.make(torch.device, *args, **kwargs)

    return Layer([patches.accelerator.unless(trace.off, lambda *_: _CUDA)], device)
