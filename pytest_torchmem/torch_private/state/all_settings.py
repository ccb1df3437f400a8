"""What torch lets a program set for its process or thread, to be put back after a trace."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.backends.mha
import torch.backends.opt_einsum
import torch.multiprocessing
from torch.utils.serialization import config

from pytest_torchmem.torch_private.names import optional, private, private_name
from pytest_torchmem.torch_private.patching.registrations import REGISTRATION_HOOKS, STEP_HOOKS
from pytest_torchmem.torch_private.state import settings
from pytest_torchmem.torch_private.tensors.autograd import engine_has_threads

NOT_SAID = object()


class Setting(NamedTuple):
    """What asks for a setting, and what sets it to that."""

    ask: Callable[[], Any]
    set_to: Callable[[Any], Any]


_PAIRS = (
    # In this order: what sets one for all devices also sets those of each.
    (
        optional("torch._C._get_float32_matmul_precision"),
        optional("torch._C._set_float32_matmul_precision"),
    ),
    (optional("torch._C._get_cublas_allow_tf32"), optional("torch._C._set_cublas_allow_tf32")),
    (optional("torch._C._get_cudnn_allow_tf32"), optional("torch._C._set_cudnn_allow_tf32")),
    (optional("torch._C._get_onednn_allow_tf32"), optional("torch._C._set_onednn_allow_tf32")),
    (settings.uses_cudnn, optional("torch._C._set_cudnn_enabled")),
    (settings.tries_all, optional("torch._C._set_cudnn_benchmark")),
    (settings.is_cudnn_deterministic, optional("torch._C._set_cudnn_deterministic")),
    (
        settings.get_depthwise_kernel,
        optional("torch._C._set_cudnn_depthwise_kernel"),
    ),
    (optional("torch._C._get_mkldnn_enabled"), optional("torch._C._set_mkldnn_enabled")),
    (
        optional("torch._C._get_mkldnn_deterministic"),
        optional("torch._C._set_mkldnn_deterministic"),
    ),
    (optional("torch._C._get_nnpack_enabled"), optional("torch._C._set_nnpack_enabled")),
    (optional("torch._C._get_qengine"), optional("torch._C._set_qengine")),
    (optional("torch._C._get_flash_sdp_enabled"), optional("torch._C._set_sdp_use_flash")),
    (optional("torch._C._get_fa3_sdp_enabled"), optional("torch._C._set_sdp_use_fa3")),
    (
        optional("torch._C._get_mem_efficient_sdp_enabled"),
        optional("torch._C._set_sdp_use_mem_efficient"),
    ),
    (optional("torch._C._get_math_sdp_enabled"), optional("torch._C._set_sdp_use_math")),
    (optional("torch._C._get_cudnn_sdp_enabled"), optional("torch._C._set_sdp_use_cudnn")),
    (
        optional("torch._C._get_overrideable_sdp_enabled"),
        optional("torch._C._set_sdp_use_overrideable"),
    ),
    (
        optional("torch._C._get_math_sdp_allow_fp16_bf16_reduction"),
        optional("torch._C._set_math_sdp_allow_fp16_bf16_reduction"),
    ),
    (settings.priority, optional("torch._C._set_sdp_priority_order")),
    (
        optional("torch._C._get_cublas_allow_fp16_accumulation"),
        optional("torch._C._set_cublas_allow_fp16_accumulation"),
    ),
    (
        optional("torch._C._get_cpu_allow_fp16_reduced_precision_reduction"),
        optional("torch._C._set_cpu_allow_fp16_reduced_precision_reduction"),
    ),
    (
        optional("torch._C._get_linalg_preferred_backend"),
        optional("torch._C._set_linalg_preferred_backend"),
    ),
    (
        optional("torch._C._get_blas_preferred_backend"),
        optional("torch._C._set_blas_preferred_backend"),
    ),
    (
        optional("torch._C._get_deterministic_fill_uninitialized_memory"),
        optional("torch._C._set_deterministic_fill_uninitialized_memory"),
    ),
    (
        optional("torch._C._check_sparse_tensor_invariants"),
        optional("torch._C._set_check_sparse_tensor_invariants"),
    ),
    (optional("torch._C._get_warnAlways"), optional("torch._C._set_warnAlways")),
    (
        optional("torch._C._get_backcompat_broadcast_warn"),
        optional("torch._C._set_backcompat_broadcast_warn"),
    ),
    (
        optional("torch._C._get_backcompat_keepdim_warn"),
        optional("torch._C._set_backcompat_keepdim_warn"),
    ),
    (
        optional("torch._C._get_graph_executor_optimize"),
        optional("torch._C._set_graph_executor_optimize"),
    ),
    (
        engine_has_threads,
        optional("torch._C._set_multithreading_enabled"),
    ),
    (optional("torch._C._is_view_replay_enabled"), optional("torch._C._set_view_replay_enabled")),
    (optional("torch._C._is_fwd_grad_enabled"), optional("torch._C._set_fwd_grad_enabled")),
    (
        optional("torch._C._is_grad_layout_enforcement_enabled"),
        optional("torch._C._set_grad_layout_enforcement_enabled"),
    ),
    (
        optional("torch._C._get_dtensor_allow_implicit_replication"),
        optional("torch._C._set_dtensor_allow_implicit_replication"),
    ),
    (
        optional("torch._C._get_sm_carveout_experimental"),
        optional("torch._C._set_sm_carveout_experimental"),
    ),
    (optional("torch._C._get_miopen_immediate"), optional("torch._C._set_miopen_immediate")),
)
"""What a version lacks cannot be set there."""
_TUPLES = (
    (
        optional("torch._C._get_cublas_allow_fp16_reduced_precision_reduction"),
        optional("torch._C._set_cublas_allow_fp16_reduced_precision_reduction"),
    ),
    (
        optional("torch._C._get_cublas_allow_bf16_reduced_precision_reduction"),
        optional("torch._C._set_cublas_allow_bf16_reduced_precision_reduction"),
    ),
)
"""Those that are asked for and set with several values at once in newer versions."""
_PRECISIONS = (
    ("generic", "all"),
    *(
        (backend, what)
        for backend in ("cuda", "mkldnn")
        for what in ("all", "conv", "rnn", "matmul")
    ),
)
_set_precision: Callable[[str, str, str], None] = private("torch._C._set_fp32_precision_setter")
_print_options: Any = private("torch._tensor_str.PRINT_OPTS")
_set_anomaly: Callable[..., None] = private("torch._C.set_anomaly_enabled")
_SEEDS: tuple[Any, ...] = tuple(
    optional(f"torch.{device}._lazy_seed_tracker") for device in ("cuda", "xpu", "mtia")
)
"""What ``torch.manual_seed`` leaves for a device that is not used yet: it is seeded when it is."""
_VALIDATES = private_name("torch.distributions.Distribution._validate_args")
_FULL_HOOKS = private_name("torch.nn.modules.module._global_is_full_backward_hook")
"""Which of two kinds of backward hooks of all modules there are: the other is refused then."""
_SMALLEST = 5e-324
"""The smallest number above 0, which is taken for 0 where denormal ones are flushed."""
_HOOKS = (
    optional("torch.nn.modules.module._global_backward_pre_hooks"),
    optional("torch.nn.modules.module._global_backward_hooks"),
    optional("torch.nn.modules.module._global_forward_pre_hooks"),
    optional("torch.nn.modules.module._global_forward_hooks"),
    optional("torch.nn.modules.module._global_buffer_registration_hooks"),
    *REGISTRATION_HOOKS,
    *STEP_HOOKS,
)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return the settings that this torch has, in the order in which they are put back."""
    return (*_of_pairs(), *_of_python(), *_of_hooks())


def _of_pairs() -> Iterator[Setting]:
    for ask, set_to in _PAIRS:
        if ask is not None and set_to is not None:
            yield Setting(ask, set_to)
    for ask, set_to in _TUPLES:
        if ask is not None and set_to is not None:
            yield Setting(ask, partial(_set_together, set_to))
    for backend, what in _PRECISIONS:
        yield Setting(
            partial(settings.precision, backend, what), partial(_set_precision, backend, what)
        )


def answers(settings: Sequence[Setting]) -> list[Any]:
    """Return the present settings; ``NOT_SAID`` where torch does not say.

    It does not where old and new ways of setting a precision were mixed (aten/src/ATen/Context.cpp,
    ``float32MatmulPrecision``): the new ones are put back anyway.
    """
    try:
        return [setting.ask() for setting in settings]
    except RuntimeError:
        return [answer(setting) for setting in settings]


def answer(setting: Setting) -> Any:
    """Return one of ``answers``."""
    try:
        return setting.ask()
    except RuntimeError:
        return NOT_SAID


def _set_together(set_to: Callable[..., Any], values: Any) -> None:
    set_to(*values) if isinstance(values, tuple) else set_to(values)


def _of_python() -> Iterator[Setting]:
    yield Setting(torch.get_default_dtype, torch.set_default_dtype)
    yield Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    )
    yield Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: _set_anomaly(*both),
    )
    yield Setting(torch.get_num_threads, torch.set_num_threads)
    yield Setting(lambda: dict(vars(_print_options)), vars(_print_options).update)
    yield Setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled)
    for name in ("enabled", "strategy"):
        yield _attribute(torch.backends.opt_einsum, name)
    yield _attribute(torch.distributions.Distribution, _VALIDATES)
    for name in ("overwrite_module_params_on_conversion", "swap_module_params_on_conversion"):
        future: Any = torch.__future__
        yield Setting(getattr(future, f"get_{name}"), getattr(future, f"set_{name}"))
    for part, name in (("load", "endianness"), ("load", "mmap"), ("save", "compute_crc32")):
        if hasattr(getattr(config, part, None), name):
            yield _attribute(getattr(config, part), name)
    for tracker in _SEEDS:
        if tracker is not None:
            yield Setting(lambda of=tracker: dict(vars(of)), vars(tracker).update)  # type: ignore[misc]
    sharing: Any = torch.multiprocessing
    yield Setting(sharing.get_sharing_strategy, sharing.set_sharing_strategy)
    if platform.machine().lower() in ("x86_64", "amd64", "arm64", "aarch64"):
        yield Setting(lambda: _SMALLEST * float(len("x")) == 0.0, torch.set_flush_denormal)


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), partial(setattr, owner, name))


def _of_hooks() -> Iterator[Setting]:
    """Return the hooks that hold for all modules and optimizers."""
    yield _attribute(torch.nn.modules.module, _FULL_HOOKS)
    for hooks in _HOOKS:
        if hooks is not None:
            yield Setting(lambda hooks=hooks: [*hooks.items()], partial(_replace, hooks))  # type: ignore[misc]


def _replace(hooks: Any, items: list[tuple[Any, Any]]) -> None:
    hooks.clear()
    hooks.update(items)
