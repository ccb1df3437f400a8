"""Settings of a process on which memory depends; all of them are listed in ``all_settings.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.torch_private.names import optional, private

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


def attention_priority() -> tuple[int, ...]:
    """Return the order in which implementations of attention are tried, by their numbers."""
    return tuple(int(backend) for backend in priority())
