"""What torch lets a program set for its process or thread, and what a thread has entered.

All of it is asked for before a trace, and set to the same after it; contexts that a program enters
in a trace and leaves open end with it, and only once. Memory depends on some of the settings.
"""

import ast
import ctypes
import gc
import inspect
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, suppress
from functools import cache, partial, wraps
from itertools import product
from textwrap import dedent
from types import BuiltinMethodType, GeneratorType
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.backends.mha
import torch.backends.opt_einsum
import torch.multiprocessing
from torch.autograd import forward_ad
from torch.cpu.amp.autocast_mode import autocast as cpu_autocast
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.serialization import config

from pytest_torchmem.torch_private.devices import has_gpu
from pytest_torchmem.torch_private.modes import dispatch_modes, global_device_context
from pytest_torchmem.torch_private.names import (
    listed,
    optional,
    private,
    private_name,
    torch_library,
)
from pytest_torchmem.torch_private.patches import Patch, having, replaced

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
_ATTENTION = listed("flash fa3 mem_efficient math cudnn overrideable")
_ENABLED = listed("multithreading view_replay fwd_grad grad_layout_enforcement")
_NAMED_OTHERWISE = {
    **{f"get_{name}_sdp_enabled": f"set_sdp_use_{name}" for name in _ATTENTION},
    "check_sparse_tensor_invariants": "set_check_sparse_tensor_invariants",
    **{f"is_{name}_enabled": f"set_{name}_enabled" for name in _ENABLED},
}
_PRECISIONS = ("generic", "all"), *product(("cuda", "mkldnn"), ("all", "conv", "rnn", "matmul"))
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
_C = "torch._C._autograd"
saved_tensors_hooks: Callable[[bool], Any] = private(f"{_C}._top_saved_tensors_default_hooks")
_hooks_disabled: Callable[[], str | None] = private(
    f"{_C}._saved_tensors_hooks_get_disabled_error_message"
)
_disable_hooks: Callable[[str], None] = private(f"{_C}._saved_tensors_hooks_disable")
_enable_hooks: Callable[[], None] = private(f"{_C}._saved_tensors_hooks_enable")
_pop_saved_tensors_hooks: Callable[[], None] = private(f"{_C}._pop_saved_tensors_default_hooks")
_inference_mode: Callable[[bool], Any] = private("torch._C._InferenceMode")
KEPT_GUARDS: list[Any] = []
"""Guards that end no more: the end of one brings back what was there when it began."""
_LEVEL = private_name("torch.autograd.forward_ad._current_level")
_AUTOCAST_DEVICES = listed("cpu cuda xpu mps hpu ipu mtia maia xla privateuseone")
_SMALLEST = 5e-324
"""The smallest number above 0, which is taken for 0 where denormal ones are flushed."""
_HOOKS = tuple(
    optional(f"torch.{path}_hooks")
    for path in listed("""
        nn.modules.module._global_backward_pre nn.modules.module._global_backward
        nn.modules.module._global_forward_pre nn.modules.module._global_forward
        nn.modules.module._global_buffer_registration
        nn.modules.module._global_parameter_registration
        nn.modules.module._global_module_registration
        optim.optimizer._global_optimizer_pre optim.optimizer._global_optimizer_post
    """)
)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return the settings of a process that this torch has, in the order of putting them back."""
    return tuple(_of_process())


def _of_process() -> Iterator[Setting]:
    alike = {f"get_{name}": f"set_{name}" for name in _ASKED_FOR_AS_SET}
    for ask, set_to in (alike | _NAMED_OTHERWISE).items():
        asks, sets = (optional(f"torch._C._{name}") for name in (ask, set_to))
        if asks is not None and sets is not None:
            yield Setting(asks, partial(_set_together, sets))
    for backend, what in _PRECISIONS:
        yield Setting(partial(precision, backend, what), partial(_set_precision, backend, what))
    yield Setting(torch.get_default_dtype, torch.set_default_dtype)
    yield Setting(
        lambda: (prefers_deterministic(), _only_warns()),
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
    # The hooks that hold for all modules and optimizers.
    yield _attribute(torch.nn.modules.module, _FULL_HOOKS)
    for hooks in _HOOKS:
        if hooks is not None:
            yield Setting(partial(list, hooks.items()), partial(_replace, hooks))


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
    try:
        return setting.ask()
    except RuntimeError:
        return NOT_SAID


def _set_together(set_to: Callable[..., Any], values: Any) -> None:
    """Set what newer versions ask for as several values at once."""
    set_to(*values) if isinstance(values, tuple) else set_to(values)


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(partial(getattr, owner, name), partial(setattr, owner, name))


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
        Setting(
            _hooks_disabled, lambda why: _enable_hooks() if why is None else _disable_hooks(why)
        ),
        Setting(_dual_level, partial(_leave, _dual_level, forward_ad.exit_dual_level)),
        Setting(torch.is_inference_mode_enabled, _enter_inference_mode),
    )
    # The default device is one of the function modes; inference mode sets that of gradients.
    return (_DEFAULT_DEVICE, *entered, *_of_autocast(), _GRADIENTS)


def _of_autocast() -> Iterator[Setting]:
    enabled: Any = torch.is_autocast_enabled, torch.set_autocast_enabled
    dtype: Any = torch.get_autocast_dtype, torch.set_autocast_dtype
    for device, (ask, set_to) in product(_AUTOCAST_DEVICES, (enabled, dtype)):
        yield Setting(partial(ask, device), partial(set_to, device))
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


def _enter_inference_mode(enabled: bool) -> None:
    KEPT_GUARDS.append(_inference_mode(enabled))
    KEPT_GUARDS[-1].__enter__()


_DEFAULT_DEVICE = Setting(
    global_device_context,
    lambda before: torch.set_default_device(None if before is None else before.device),
)
_GRADIENTS = Setting(torch.is_grad_enabled, torch.set_grad_enabled)

_default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
uses_cudnn: Callable[[], bool] = private("torch._C._get_cudnn_enabled")
#: Whether a kernel with a deterministic form takes it: also where others only warn
#: (``at::Context::deterministicAlgorithms``).
prefers_deterministic: Callable[[], bool] = private("torch._C._get_deterministic_algorithms")
_fills_memory: Callable[[], bool] = private("torch._C._get_deterministic_fill_uninitialized_memory")
_only_warns: Callable[[], bool] = private("torch._C._get_deterministic_algorithms_warn_only")
tries_all: Callable[[], bool] = private("torch._C._get_cudnn_benchmark")
is_cudnn_deterministic: Callable[[], bool] = private("torch._C._get_cudnn_deterministic")
#: Whose kernels take depthwise convolutions in float16: ``"auto"`` by their shapes, ``"native"`` or
#: ``"cudnn"``; ``torch.backends.cudnn.depthwise_kernel`` of torch 2.12 and later.
depthwise_kernel: Callable[[], str] = optional("torch._C._get_cudnn_depthwise_kernel") or (
    lambda: "auto"
)
#: The precision of float32 on a backend, for one kind of operators.
precision: Callable[[str, str], str] = private("torch._C._get_fp32_precision_getter")
#: The order in which implementations of attention are tried, by their numbers.
attention_priority: Callable[[], Any] = private("torch._C._get_sdp_priority_order")

LIBRARY_VARIABLES = listed("""
    CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE TORCH_CUBLASLT_UNIFIED_WORKSPACE
    TORCH_CUDNN_USE_HEURISTIC_MODE_B
""")
"""What of the environment the workspaces of NVIDIA's libraries depend on."""


def host_settings() -> tuple[Any, ...]:
    """Return the settings on which operators of the CPU depend: default dtype, deterministic."""
    return _default_dtype(), prefers_deterministic()


def fills_new_memory() -> bool:
    """Return whether new memory is NaN, or the largest number; native/TensorFactories.h."""
    return prefers_deterministic() and _fills_memory()


def must_be_deterministic() -> bool:
    """Return whether a kernel is refused that is not deterministic, and not only warned of."""
    return prefers_deterministic() and not _only_warns()


def kernel_settings() -> tuple[Any, ...]:
    """Return the settings by which dtypes, and kernels of a GPU, are chosen.

    The default dtype; cuDNN used, deterministic, warns only; and of cuDNN: all kernels tried,
    deterministic, precision of float32.
    """
    of_cudnn = tries_all(), is_cudnn_deterministic(), precision("cuda", "conv"), depthwise_kernel()
    return _default_dtype(), uses_cudnn(), prefers_deterministic(), _only_warns(), *of_cudnn


def is_deterministic_convolution() -> bool:
    """Return whether cuDNN may take deterministic engines alone; native/Convolution.cpp."""
    return is_cudnn_deterministic() or prefers_deterministic()


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
        "torch.use_deterministic_algorithms": (prefers_deterministic(), False),
    }
    if compilers := sys.modules.get("torch._functorch.config"):
        budget = "activation_memory_budget"  # of the partitioner of AOTAutograd
        found[f"{compilers.__name__}.{budget}"] = (getattr(compilers, budget, 1.0), 1.0)
    if device == "cuda":
        found |= {name: (os.environ.get(name, ""), "") for name in LIBRARY_VARIABLES}
        found |= {
            "torch.backends.cudnn.enabled": (uses_cudnn(), True),
            "torch.backends.cudnn.benchmark": (tries_all(), False),
            "torch.backends.cudnn.deterministic": (is_cudnn_deterministic(), False),
            "torch.backends.cudnn.conv.fp32_precision": (precision("cuda", "conv"), "tf32"),
        }
    return {name: str(now) for name, (now, default) in found.items() if now != default}


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

    __slots__ = ("_before", "_set_to")

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()  # which sets it on a thread that is new
        self._set_to = _setter() if self._before != 1 else None
        if self._set_to is not None:
            self._set_to(1)

    def __exit__(self, *_: object) -> None:
        if self._set_to is not None:
            self._set_to(self._before)


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
    enabled = {_ANY_ENABLED: lambda: any(map(torch.is_autocast_enabled, _DEVICES))}
    return replaced(cast(Any, torch)._C, **enabled)


_innermost_transform = optional("torch._C._functorch.peek_interpreter_stack")


def is_within_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs on this thread, or was never left."""
    return _innermost_transform is not None and _innermost_transform() is not None


_GUARDS: tuple[Any, ...] = (
    *(torch.autocast, torch.cuda.amp.autocast, cpu_autocast),
    *(torch.autograd.detect_anomaly, torch.autograd.set_detect_anomaly),
    *(torch.autograd.graph.saved_tensors_hooks, torch.no_grad, torch.enable_grad),
    torch.sparse.check_sparse_tensor_invariants,
    *(TorchFunctionMode, TorchDispatchMode, torch.cuda.device, torch.cuda.StreamContext),
)
"""Contexts of torch whose end brings back what there was at their beginning, that are classes."""
_ALSO_DECORATORS = private("torch.utils._contextlib._DecoratorContextManager")
"""What others of these are made from."""
_SOURCES = os.path.dirname(torch.__file__) + os.sep


class _Entered:
    """What threads of the running trace have entered and not left, and ``ended`` has of others."""

    on_thread: ClassVar[Callable[[], bool]] = staticmethod(lambda: False)
    open: ClassVar[WeakKeyDictionary[Any, int]] = WeakKeyDictionary()
    """How often each was entered: a mode that is called enters itself again."""
    made: ClassVar[WeakSet[Any]] = WeakSet()
    """Autocasts that a trace has made."""
    generators: ClassVar[WeakKeyDictionary[Any, None]] = WeakKeyDictionary()
    """Those of torch's contexts that are functions (``contextlib.contextmanager``)."""
    ended: ClassVar[WeakSet[Any]] = WeakSet()
    patch: ClassVar[Patch | None] = None
    """What follows them: the same for every trace, unless another stands in torch's place."""


@contextmanager
def ends_once(on_thread: Callable[[], bool]) -> Iterator[None]:
    """Let what the body enters and does not leave itself end with it, and not once more.

    A generator that is suspended in ``torch.autocast`` leaves it when it is closed. By then its
    region has been left, and the nesting would be one too small: torch would never forget the
    weights that it has cast (torch/amp/autocast_mode.py, ``__exit__``), and training go on with
    old ones. One in ``torch.device``, whose end takes the thread's innermost mode away, is closed,
    and so are torch's own, such as ``sdpa_kernel``: they bring back what they found then, which may
    be what another had set.
    """
    before = staticmethod(_Entered.on_thread), _Entered.open, _Entered.generators
    modes = function_modes()
    patch = _Entered.patch
    if patch is None or not patch.fits():
        kinds = [kind for kind in _ALSO_DECORATORS.__subclasses__() if hasattr(kind, "__enter__")]
        followed = [_followed(kind, kind.__enter__, kind.__exit__) for kind in (*_GUARDS, *kinds)]
        followed.append(_functions_followed(_GeneratorContextManager.__enter__))
        followed.append(_autocasts_made(torch.autocast.__init__))
        patch = _Entered.patch = Patch(followed)
    _Entered.on_thread = staticmethod(on_thread)
    _Entered.open, _Entered.generators = WeakKeyDictionary(), WeakKeyDictionary()
    patch.put_in_place()
    try:
        yield
    finally:
        if not modes and function_modes():
            for one in gc.get_objects():
                if type(one) is GeneratorType and any(map(_ends_device, gc.get_referents(one))):
                    with suppress(Exception):  # of the program, which ends
                        one.close()
        patch.put_back()
        left, suspended = [*_Entered.open], [*_Entered.generators]
        _Entered.on_thread, _Entered.open, _Entered.generators = before
        for generator in reversed(suspended):
            with suppress(Exception):
                generator.close()
        for one in left:
            _end(one)
        # These have guards of C++, whose end would bring back the state of the thread.
        KEPT_GUARDS.extend(one for one in left if isinstance(one, torch.inference_mode))


@cache
def _followed(kind: Any, begin: Callable[..., Any], end: Callable[..., Any]) -> Any:
    """Return the methods of a class of contexts that follow what is entered. They are made once:
    what else stands in the place of torch's functions stays as long as these.
    """

    def enter(self: Any) -> Any:
        _Entered.ended.discard(self)
        if _Entered.on_thread():
            _Entered.open[self] = _Entered.open.get(self, 0) + 1
        if kind is torch.autocast and not self._enabled and self not in _Entered.made:
            with _as_where_it_is_on(self, sys._getframe(1)):
                return begin(self)
        return begin(self)

    def leave(self: Any, *error: Any) -> Any:
        if self in _Entered.ended:
            return _Entered.ended.discard(self)
        if (times := _Entered.open.pop(self, 0)) > 1:
            _Entered.open[self] = times - 1
        return end(self, *error)

    return kind, {"__enter__": enter, "__exit__": leave}


@cache
def _autocasts_made(make: Callable[..., Any]) -> Any:
    @wraps(make)  # Dynamo asks for its signature
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _Entered.made.add(self)

    return torch.autocast, {"__init__": made}


@contextmanager
def _as_where_it_is_on(autocast: Any, frame: Any) -> Iterator[None]:
    """Let an autocast for cuda be on that was made where torch saw no GPU, and turned it off.

    So it is with those that decorate functions of modules that were imported before the trace, but
    where they are asked to be off (``enabled=``). Of what else was made before nobody knows.
    """
    while frame.f_code.co_name in ("__enter__", "enter"):
        frame = frame.f_back
    is_decorator = frame.f_code is _DECORATED
    if autocast.device != "cuda" or has_gpu() or not torch.cuda.is_available():
        yield  # as the program has asked for
    elif is_decorator and not _says_enabled(frame.f_locals["func"]):
        with having(autocast, _enabled=True):
            yield
    else:
        if not is_decorator:
            warnings.warn(_WAS_OFF, stacklevel=5)
        yield


_DECORATED = torch.autocast("cpu")(lambda: None).__code__
_WAS_OFF = (
    "torchmem: this torch.autocast for cuda is off: it was made before the trace, where torch saw "
    "no GPU, or with enabled=False. What a GPU would cast is not in the figures unless the step "
    "makes it."
)


@cache
def _says_enabled(function: Callable[..., Any]) -> bool:
    """Return whether the source of a decorated function says if its autocast is to be on."""
    try:
        tree: Any = ast.parse(dedent(inspect.getsource(function)))
        calls = [one for one in tree.body[0].decorator_list if isinstance(one, ast.Call)]
    except (OSError, SyntaxError, AttributeError, TypeError):  # no function of a file
        return True
    named = {key.arg for call in calls for key in call.keywords}
    given = [getattr(arg, "value", None) for call in calls for arg in call.args]
    return "enabled" in named or any(type(one) is bool for one in given)


@cache
def _functions_followed(begin: Callable[..., Any]) -> Any:
    def enter(self: Any) -> Any:
        if self.gen.gi_code.co_filename.startswith(_SOURCES) and _Entered.on_thread():
            _Entered.generators[self.gen] = None
        return begin(self)

    return _GeneratorContextManager, {"__enter__": enter}


def _end(one: Any) -> None:
    """Have the next end of a context do nothing, which others may look up by then."""
    context = ref(one)

    def end(*_: Any) -> None:
        _Entered.ended.discard(context())
        vars(context()).pop("__exit__", None)

    _Entered.ended.add(one)
    vars(one)["__exit__"] = end


def _ends_device(one: Any) -> bool:
    """Return whether something is the end of a ``torch.device``, which waits in a frame for it."""
    is_end = type(one) is BuiltinMethodType and one.__name__ == "__exit__"
    return is_end and isinstance(one.__self__, torch.device)
