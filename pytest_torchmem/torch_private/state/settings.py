"""Settings of a process on which memory depends; all of them are listed in ``all_settings.py``."""

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast

import torch

from pytest_torchmem.torch_private.names import (
    listed,
    optional,
    private,
    private_name,
    torch_library,
)
from pytest_torchmem.torch_private.patching.patches import replaced

_default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
uses_cudnn: Callable[[], bool] = private("torch._C._get_cudnn_enabled")
_is_deterministic: Callable[[], bool] = private("torch._C._get_deterministic_algorithms")
_only_warns: Callable[[], bool] = private("torch._C._get_deterministic_algorithms_warn_only")
tries_all: Callable[[], bool] = private("torch._C._get_cudnn_benchmark")
is_cudnn_deterministic: Callable[[], bool] = private("torch._C._get_cudnn_deterministic")
#: Which kernels take depthwise convolutions in float16; torch 2.12 and later.
get_depthwise_kernel: Callable[[], str] | None = optional("torch._C._get_cudnn_depthwise_kernel")
#: The precision of float32 on a backend, for one kind of operators.
precision: Callable[[str, str], str] = private("torch._C._get_fp32_precision_getter")
priority: Callable[[], Any] = private("torch._C._get_sdp_priority_order")


LIBRARY_VARIABLES = listed("""
    CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE TORCH_CUBLASLT_UNIFIED_WORKSPACE
    TORCH_CUDNN_USE_HEURISTIC_MODE_B
""")
"""What of the environment the workspaces of NVIDIA's libraries depend on."""


def host_settings() -> tuple[Any, ...]:
    """Return the settings on which operators of the CPU depend: default dtype, deterministic."""
    return _default_dtype(), _is_deterministic()


def prefers_deterministic() -> bool:
    """Return whether a kernel with a deterministic form takes it: also where others only warn;
    ``at::Context::deterministicAlgorithms``.
    """
    return _is_deterministic()


def must_be_deterministic() -> bool:
    """Return whether a kernel is refused that is not deterministic, and not only warned of."""
    return _is_deterministic() and not _only_warns()


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings by which dtypes, and kernels of a GPU, are chosen.

    The default dtype; cuDNN used, deterministic, warns only; and of cuDNN: all kernels tried,
    deterministic, precision of float32.
    """
    return (
        _default_dtype(),
        uses_cudnn(),
        _is_deterministic(),
        _only_warns(),
        tries_all(),
        is_cudnn_deterministic(),
        precision("cuda", "conv"),
        depthwise_kernel(),
    )


def depthwise_kernel() -> str:
    """Return whose kernels take depthwise convolutions in float16: ``"auto"`` by their shapes,
    ``"native"`` or ``"cudnn"``; ``torch.backends.cudnn.depthwise_kernel``.
    """
    return str(get_depthwise_kernel()) if get_depthwise_kernel is not None else "auto"


def is_deterministic_convolution() -> bool:
    """Return whether cuDNN may take deterministic engines alone; native/Convolution.cpp."""
    return is_cudnn_deterministic() or _is_deterministic()


def allows_tf32_convolution() -> bool:
    """Return whether cuDNN may convolve float32 as TF32; ``at::Context::allowTF32CuDNN``."""
    return precision("cuda", "conv") == "tf32"


def library_settings() -> tuple[str, ...]:
    """Return the settings by which cuDNN chooses between kernels, those that are not the default.

    ``torch.backends.cudnn``: ``benchmark``, ``deterministic`` (as
    ``torch.use_deterministic_algorithms``), ``allow_tf32`` or ``conv.fp32_precision``.
    """
    float32 = precision("cuda", "conv")
    chosen = {
        "benchmark": tries_all(),
        "deterministic": is_deterministic_convolution(),
        f"float32 as {'ieee' if float32 == 'none' else float32}": float32 != "tf32",
        f"depthwise {depthwise_kernel()}": depthwise_kernel() != "auto",
    }
    return tuple(name for name, holds in chosen.items() if holds)


def figure_settings(device: str) -> dict[str, str]:
    """Return what decides figures on a device and is not torch's default, by its name."""
    found: dict[str, tuple[Any, Any]] = {
        "torch.set_default_dtype": (_default_dtype(), torch.float32),
        "torch.use_deterministic_algorithms": (_is_deterministic(), False),
    }
    if compilers := sys.modules.get("torch._functorch.config"):
        budget = "activation_memory_budget"  # of the partitioner of AOTAutograd
        found[f"{compilers.__name__}.{budget}"] = (getattr(compilers, budget, 1.0), 1.0)
    if device == "cuda":
        found |= {name: (os.environ.get(name, ""), "") for name in LIBRARY_VARIABLES}
        found |= {
            f"torch.backends.cudnn.{name}": values
            for name, values in {
                "enabled": (uses_cudnn(), True),
                "benchmark": (tries_all(), False),
                "deterministic": (is_cudnn_deterministic(), False),
                "conv.fp32_precision": (precision("cuda", "conv"), "tf32"),
            }.items()
        }
    return {name: str(now) for name, (now, default) in found.items() if now != default}


def attention_priority() -> tuple[int, ...]:
    """Return the order in which implementations of attention are tried, by their numbers."""
    return tuple(int(backend) for backend in priority())


class OneThread:
    """A context that runs the kernels that the calling thread asks for on that thread alone.

    ``torch.set_num_threads`` is for the process: a thread that runs its first kernel meanwhile
    keeps what it finds (ATen/ParallelOpenMP.cpp, ``set_num_threads``, ``init_num_threads``). The
    number that OpenMP itself has is each thread's own (``nthreads-var`` of the OpenMP
    specification), and the one that ``at::get_num_threads`` returns.

    For a few thousand elements others do not help, and where they have no core of their own the
    kernel waits for them a thousand times as long as it takes (``at::tril`` starts them for any
    size).
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        before = torch.get_num_threads()  # which sets it on a thread that is new
        set_to = _setter() if before != 1 else None
        self._before = before if set_to is not None else 1
        if set_to is not None:
            set_to(1)

    def __exit__(self, *_: object) -> None:
        set_to = _setter() if self._before != 1 else None
        if set_to is not None:
            set_to(self._before)


@cache
def _setter() -> Callable[[int], None] | None:
    set_to = getattr(torch_library(), "omp_set_num_threads", None)
    # None without OpenMP, and on Windows: there kernels run on as many threads as ever.
    if set_to is not None:
        set_to.argtypes, set_to.restype = (ctypes.c_int,), None
    return set_to


_ANY_ENABLED = private_name("torch._C._is_any_autocast_enabled")
_DEVICES = ("cpu", "cuda", "xpu", "mps")


def own_keys_are_no_autocast() -> AbstractContextManager[None]:
    """Return a context in which torch does not take a trace's keys, which are those of two devices,
    for autocast: at::autocast::is_autocast_enabled. An RNN refuses no input then.
    """

    def enabled() -> bool:
        return any(map(torch.is_autocast_enabled, _DEVICES))

    return replaced(cast(Any, torch)._C, **{_ANY_ENABLED: enabled})
