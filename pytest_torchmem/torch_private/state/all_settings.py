"""What torch lets a program set for its process or thread, and what a thread has entered: all that
is asked for before a trace, and set to the same after it.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.backends.mha
import torch.backends.opt_einsum
import torch.multiprocessing
from torch.autograd import forward_ad
from torch.utils.serialization import config

from pytest_torchmem.torch_private.dispatch.modes import dispatch_modes, global_device_context
from pytest_torchmem.torch_private.names import listed, optional, private, private_name
from pytest_torchmem.torch_private.patching.module_calls import REGISTRATION_HOOKS, STEP_HOOKS
from pytest_torchmem.torch_private.state import settings

NOT_SAID = object()


class Setting(NamedTuple):
    """The getter and the setter of one setting of torch."""

    ask: Callable[[], Any]
    set_to: Callable[[Any], Any]


# In this order: what sets one for all devices also sets those of each.
_ASKED_FOR_AS_SET = listed("""
    float32_matmul_precision cublas_allow_tf32 cudnn_allow_tf32 onednn_allow_tf32 cudnn_enabled
    cudnn_benchmark cudnn_deterministic cudnn_depthwise_kernel mkldnn_enabled
    mkldnn_deterministic nnpack_enabled qengine math_sdp_allow_fp16_bf16_reduction
    sdp_priority_order cublas_allow_fp16_accumulation cpu_allow_fp16_reduced_precision_reduction
    linalg_preferred_backend blas_preferred_backend deterministic_fill_uninitialized_memory
    warnAlways backcompat_broadcast_warn backcompat_keepdim_warn graph_executor_optimize
    dtensor_allow_implicit_replication sm_carveout_experimental miopen_immediate
    cublas_allow_fp16_reduced_precision_reduction cublas_allow_bf16_reduced_precision_reduction
""")
"""Those of ``torch._C._get_`` and ``_set_``; what a version lacks cannot be set there."""
_NAMED_OTHERWISE = {
    "get_flash_sdp_enabled": "set_sdp_use_flash",
    "get_fa3_sdp_enabled": "set_sdp_use_fa3",
    "get_mem_efficient_sdp_enabled": "set_sdp_use_mem_efficient",
    "get_math_sdp_enabled": "set_sdp_use_math",
    "get_cudnn_sdp_enabled": "set_sdp_use_cudnn",
    "get_overrideable_sdp_enabled": "set_sdp_use_overrideable",
    "check_sparse_tensor_invariants": "set_check_sparse_tensor_invariants",
    "is_multithreading_enabled": "set_multithreading_enabled",
    "is_view_replay_enabled": "set_view_replay_enabled",
    "is_fwd_grad_enabled": "set_fwd_grad_enabled",
    "is_grad_layout_enforcement_enabled": "set_grad_layout_enforcement_enabled",
}
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
function_modes: Callable[[], int] = private("torch._C._len_torch_function_stack")
_pop_function_mode: Callable[[], Any] = private("torch.overrides._pop_mode")
_pop_dispatch_mode: Callable[[], Any] = private("torch.utils._python_dispatch._pop_mode")
saved_tensors_hooks: Callable[[bool], Any] = private(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
_hooks_disabled: Callable[[], str | None] = private(
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message"
)
_disable_hooks: Callable[[str], None] = private("torch._C._autograd._saved_tensors_hooks_disable")
_enable_hooks: Callable[[], None] = private("torch._C._autograd._saved_tensors_hooks_enable")
_pop_saved_tensors_hooks: Callable[[], None] = private(
    "torch._C._autograd._pop_saved_tensors_default_hooks"
)
_inference_mode: Callable[[bool], Any] = private("torch._C._InferenceMode")
KEPT_GUARDS: list[Any] = []
"""Guards that end no more: the end of one brings back what was there when it began."""
_LEVEL = private_name("torch.autograd.forward_ad._current_level")
_AUTOCAST_DEVICES = listed("cpu cuda xpu mps hpu ipu mtia maia xla privateuseone")
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
    """Return the settings of a process that this torch has, in the order of putting them back."""
    return (*_of_names(), *_of_python(), *_of_hooks())


def _of_names() -> Iterator[Setting]:
    alike = {f"get_{name}": f"set_{name}" for name in _ASKED_FOR_AS_SET}
    for ask, set_to in (alike | _NAMED_OTHERWISE).items():
        asks, sets = (optional(f"torch._C._{name}") for name in (ask, set_to))
        if asks is not None and sets is not None:
            yield Setting(asks, partial(_set_together, sets))
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
    """Set what newer versions ask for as several values at once."""
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
    return Setting(partial(getattr, owner, name), partial(setattr, owner, name))


def _of_hooks() -> Iterator[Setting]:
    """Return the hooks that hold for all modules and optimizers."""
    yield _attribute(torch.nn.modules.module, _FULL_HOOKS)
    for hooks in _HOOKS:
        if hooks is not None:
            yield Setting(partial(list, hooks.items()), partial(_replace, hooks))


def _replace(hooks: Any, items: list[tuple[Any, Any]]) -> None:
    hooks.clear()
    hooks.update(items)


@cache
def thread_settings() -> tuple[Setting, ...]:
    """Return what a thread has set: its default device, autocast and gradient mode."""
    return (_DEFAULT_DEVICE, *_of_autocast(), _GRADIENTS)


@cache
def entered_settings() -> tuple[Setting, ...]:
    """Return the same and what a thread has entered: function and dispatch modes, hooks of saved
    tensors, dual levels and inference mode. What was never left is left by putting them back.
    """
    entered = (
        Setting(function_modes, partial(_leave, function_modes, _pop_function_mode)),
        Setting(dispatch_modes, partial(_leave, dispatch_modes, _pop_dispatch_mode)),
        Setting(partial(saved_tensors_hooks, False), _leave_saved_tensors_hooks),
        Setting(_hooks_disabled, _disable_hooks_as),
        Setting(_dual_level, partial(_leave, _dual_level, forward_ad.exit_dual_level)),
        Setting(torch.is_inference_mode_enabled, _enter_inference_mode),
    )
    # The default device is one of the function modes; inference mode sets that of gradients.
    return (_DEFAULT_DEVICE, *entered, *_of_autocast(), _GRADIENTS)


def _of_autocast() -> Iterator[Setting]:
    for device in _AUTOCAST_DEVICES:
        yield Setting(
            partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        )
        yield Setting(
            partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
        )
    yield Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    yield Setting(_nesting, partial(_leave, _nesting, torch.autocast_decrement_nesting))


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _dual_level() -> int:
    return int(getattr(forward_ad, _LEVEL))


def _leave(count: Callable[[], int], leave: Callable[[], object], before: int) -> None:
    for _ in range(count() - before):
        leave()


def _leave_saved_tensors_hooks(before: Any) -> None:
    while (now := saved_tensors_hooks(False)) is not None and now != before:
        _pop_saved_tensors_hooks()


def _disable_hooks_as(message: str | None) -> None:
    _enable_hooks() if message is None else _disable_hooks(message)


def _enter_inference_mode(enabled: bool) -> None:
    KEPT_GUARDS.append(_inference_mode(enabled))
    KEPT_GUARDS[-1].__enter__()


def _set_default_device(before: Any) -> None:
    torch.set_default_device(before.device if before is not None else None)


_DEFAULT_DEVICE = Setting(global_device_context, _set_default_device)
_GRADIENTS = Setting(torch.is_grad_enabled, torch.set_grad_enabled)
