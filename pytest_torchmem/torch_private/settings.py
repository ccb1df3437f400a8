"""Settings of a process on which memory depends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem.torch_private.names import private

_default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
_uses_cudnn: Callable[[], bool] = private("torch._C._get_cudnn_enabled")
_is_deterministic: Callable[[], bool] = private("torch._C._get_deterministic_algorithms")
_only_warns: Callable[[], bool] = private("torch._C._get_deterministic_algorithms_warn_only")
_set_deterministic: Callable[..., None] = private("torch._C._set_deterministic_algorithms")
_tries_all: Callable[[], bool] = private("torch._C._get_cudnn_benchmark")
_is_cudnn_deterministic: Callable[[], bool] = private("torch._C._get_cudnn_deterministic")
_precision: Callable[[str, str], str] = private("torch._C._get_fp32_precision_getter")
_set_precision: Callable[[str, str, str], None] = private("torch._C._set_fp32_precision_setter")
_priority: Callable[[], Any] = private("torch._C._get_sdp_priority_order")


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
        _uses_cudnn(),
        _is_deterministic(),
        _only_warns(),
        _tries_all(),
        _is_cudnn_deterministic(),
        _precision("cuda", "conv"),
    )


#: Settings of a process on which memory depends: what asks for one, and what sets it to that.
PROCESS_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_default_dtype, torch.set_default_dtype),
    (
        lambda: (_is_deterministic(), _only_warns()),
        lambda both: _set_deterministic(both[0], warn_only=both[1]),
    ),
    (_uses_cudnn, private("torch._C._set_cudnn_enabled")),
    (_tries_all, private("torch._C._set_cudnn_benchmark")),
    (_is_cudnn_deterministic, private("torch._C._set_cudnn_deterministic")),
    (
        lambda: _precision("cuda", "conv"),
        lambda precision: _set_precision("cuda", "conv", precision),
    ),
    (private("torch._C._get_mkldnn_enabled"), private("torch._C._set_mkldnn_enabled")),
    (private("torch._C._get_flash_sdp_enabled"), private("torch._C._set_sdp_use_flash")),
    (
        private("torch._C._get_mem_efficient_sdp_enabled"),
        private("torch._C._set_sdp_use_mem_efficient"),
    ),
    (private("torch._C._get_math_sdp_enabled"), private("torch._C._set_sdp_use_math")),
    (private("torch._C._get_cudnn_sdp_enabled"), private("torch._C._set_sdp_use_cudnn")),
    (_priority, private("torch._C._set_sdp_priority_order")),
)


def library_settings() -> tuple[str, ...]:
    """Return the settings by which cuDNN chooses between kernels, those that are not the default.

    ``torch.backends.cudnn``: ``benchmark``, ``deterministic`` (as
    ``torch.use_deterministic_algorithms``), ``allow_tf32`` or ``conv.fp32_precision``.
    """
    precision = _precision("cuda", "conv")
    chosen = {
        "benchmark": _tries_all(),
        "deterministic": _is_cudnn_deterministic() or _is_deterministic(),
        f"float32 as {'ieee' if precision == 'none' else precision}": precision != "tf32",
    }
    return tuple(name for name, holds in chosen.items() if holds)


def attention_priority() -> tuple[int, ...]:
    """Return the order in which implementations of attention are tried, by their numbers."""
    return tuple(int(backend) for backend in _priority())
