"""The private parts of torch that the profiler stands on, gathered in one place.

What is registered with the dispatcher stands in ``registrations.py``, what C++ says of geometry in
``meta_kernels.py``; ``self_test.py`` tries them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _pop_mode_temporarily
from torch.utils._pytree import tree_leaves

_C: Any = torch._C

#: ``DispatchKey::Fake`` sits below autograd and above every backend (c10/core/DispatchKey.h), and
#: no kernel of torch 2.11 to 2.15 is registered for it.
FAKE = _C._parse_dispatch_key("Fake")
_COMPOSITE_IMPLICIT = _C.DispatchKey.CompositeImplicitAutograd
_COMPOSITE_EXPLICIT = _C.DispatchKey.CompositeExplicitAutograd
_COMPOSITE_NON_FUNCTIONAL = _C.DispatchKey.CompositeExplicitAutogradNonFunctional

_CPU = torch.device("cpu")

#: Major and minor version, where what torch does differs between the versions.
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
TORCH_SERIES = ".".join(map(str, TORCH_VERSION))

set_included: Callable[[Any, bool], None] = _C._dispatch_tls_set_dispatch_key_included
set_excluded: Callable[[Any, bool], None] = _C._dispatch_tls_set_dispatch_key_excluded

#: The address of a tensor's ``StorageImpl``: its identity for as long as the storage lives.
storage_address: Callable[[Tensor], int] = _C._storage_address

#: Whether the program's function modes (``torch.set_default_device`` leaves one) see calls now, and
#: a context in which they do not.
function_modes: Callable[[], bool] = _C._is_torch_function_mode_enabled
NoFunctionModes: Callable[[], Any] = _C.DisableTorchFunction

#: -1 outside of a backward, else the number of the running graph task of this thread.
current_graph_task: Callable[[], int] = _C._current_graph_task_id
current_node: Callable[[], Any] = _C._current_autograd_node
_engine_has_threads: Callable[[], bool] = _C._is_multithreading_enabled
_default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
_uses_cudnn: Callable[[], bool] = _C._get_cudnn_enabled
_is_deterministic: Callable[[], bool] = _C._get_deterministic_algorithms
_only_warns: Callable[[], bool] = _C._get_deterministic_algorithms_warn_only
_tries_all: Callable[[], bool] = _C._get_cudnn_benchmark
_is_cudnn_deterministic: Callable[[], bool] = _C._get_cudnn_deterministic
_precision: Callable[[str, str], str] = _C._get_fp32_precision_getter
#: Whether the running backward leaves its nodes what they have saved (``retain_graph``).
keeps_graph: Callable[[], bool] = _C._autograd._get_current_graph_task_keep_graph
#: One more than the sequence number of the autograd node this thread made last.
sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr

storage_use_count: Callable[[int], int] = _C._storage_Use_Count
_construct_storage = _C._construct_storage_from_data_pointer


def host_settings() -> tuple[Any, ...]:
    """Return the settings on which operators of the CPU depend: default dtype, deterministic."""
    return _default_dtype(), _is_deterministic()


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
        lambda both: _C._set_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    (_uses_cudnn, _C._set_cudnn_enabled),
    (_tries_all, _C._set_cudnn_benchmark),
    (_is_cudnn_deterministic, _C._set_cudnn_deterministic),
    (
        lambda: _precision("cuda", "conv"),
        lambda precision: _C._set_fp32_precision_setter("cuda", "conv", precision),
    ),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
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


def in_engine_thread() -> bool:
    """Return whether a GPU's kernels would be launched by the autograd engine's own thread now."""
    return current_graph_task() != -1 and _engine_has_threads()


def hollow_storage(nbytes: int, memory: Tensor | None = None) -> torch.UntypedStorage:
    """Return a CPU storage that says it holds ``nbytes`` and holds no memory.

    With ``memory`` it shows that tensor's bytes without owning them.
    """
    address = 0 if memory is None else memory.data_ptr()
    return cast(torch.UntypedStorage, _construct_storage(address, _CPU, nbytes))


def tensor_use_count(tensor: Tensor) -> int:
    """Return how many references hold the ``TensorImpl``, the Python object's own included."""
    return cast(int, cast(Any, tensor)._use_count())


def tensor_on(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> Tensor:
    """Return a tensor of that geometry on ``storage``; the Fake key must be excluded."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def has_kernels(operator: OpOverload) -> bool:
    """Return whether ``operator`` is dispatched at all, and not TorchScript's alone."""
    return bool(_C._dispatch_has_kernel(operator.name()))


def is_composite_implicit(operator: OpOverload) -> bool:
    """Return whether ``operator`` is made of other operators that carry its gradient.

    Some (``silu_backward``) have a kernel for the CPU as well, which is what the CPU runs.
    """
    has = _C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()
    return bool(has(name, _COMPOSITE_IMPLICIT)) and not has(name, "CPU")


def is_composite_explicit(operator: OpOverload) -> bool:
    """Return whether the CPU runs ``operator`` as a sequence of other operators."""
    return _composite_key(operator) is not None


@cache
def _composite_key(operator: OpOverload) -> Any:
    """Return the key that such an operator's body is registered for, or None."""
    name = operator.name()
    has = _C._dispatch_has_kernel_for_dispatch_key
    if has(name, "CPU"):
        return None
    keys = (_COMPOSITE_EXPLICIT, _COMPOSITE_NON_FUNCTIONAL)
    return next((key for key in keys if has(name, key)), None)


def has_kernel_on(operator: OpOverload, device: str) -> bool:
    """Return whether ``operator`` has a kernel of its own for ``"cpu"`` or ``"cuda"``."""
    key = {"cpu": "CPU", "cuda": "CUDA"}[device]
    return bool(_C._dispatch_has_kernel_for_dispatch_key(operator.name(), key))


def custom_operator(definition: Any) -> OpOverload | None:
    """Return the operator that ``torch.library.custom_op`` made, or None for anything else."""
    from torch._library.custom_ops import CustomOpDef

    return definition._opoverload if isinstance(definition, CustomOpDef) else None


def is_opaque(operator: OpOverload) -> bool:
    """Return whether somebody registered how to find an operator's outputs without running it.

    Every ``custom_op`` has: the body of one is no place to look into, since it may hand addresses
    to a kernel. Those of ``torch.nn.functional`` itself are made of operators.
    """
    if operator.namespace == "torch_nn":
        return False
    from torch._library.simple_registry import singleton

    entry = singleton.find(operator.name())  # ``get`` came with torch 2.13
    return entry.fake_impl.kernel is not None


def lacks_geometry(operator: OpOverload) -> bool:
    """Return whether ``operator`` is a ``custom_op`` whose outputs nobody has described."""
    from torch._library.custom_ops import _maybe_get_opdef
    from torch._library.utils import can_generate_trivial_fake_impl

    if operator.namespace == "aten":
        return False
    definition = _maybe_get_opdef(operator.name())
    return (
        definition is not None
        and definition._abstract_fn is None
        and not can_generate_trivial_fake_impl(operator)
    )


def run_composite_explicit(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the body of a composite operator, whose inner operators are dispatched as usual."""
    return operator._op_dk(_composite_key(operator), *args, **kwargs)


def run_composite_implicit(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the body of an operator that autograd sees through."""
    return operator._op_dk(_COMPOSITE_IMPLICIT, *args, **kwargs)


def run_torch_dispatch(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``__torch_dispatch__`` of the mode that is on, or of the subclasses among the arguments.

    As torch/csrc/autograd/python_variable.cpp and aten/src/ATen/core/PythonFallbackKernel.cpp do,
    but that what it calls is intercepted.
    """
    subclasses = {
        type(tensor): None
        for tensor in tree_leaves((args, kwargs))
        if isinstance(tensor, Tensor)
        and type(tensor).__torch_dispatch__ is not _C._disabled_torch_dispatch_impl
    }
    types = tuple(subclasses)
    above = _C._dispatch_keyset_full() - _C._dispatch_keyset_full_after(FAKE)
    with _C._ExcludeDispatchKeyGuard(above.remove(FAKE)):
        if _C._len_torch_dispatch_stack():
            with _pop_mode_temporarily() as mode:
                return mode.__torch_dispatch__(operator, types, args, kwargs)
        for subclass in types:
            result = subclass.__torch_dispatch__(operator, types, args, kwargs)
            if result is not NotImplemented:
                return result
    raise TypeError(f"no implementation of {operator} for {', '.join(map(str, types))}")


def run_cpu_kernel(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU's kernel of an operator that calls others and touches no memory itself."""
    return operator._op_dk(_C.DispatchKey.CPU, *args, **kwargs)


def run_nested_kernel(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of an operator for nested tensors, which calls others on their buffers.

    Raises ``NotImplementedError``, as torch does, where it has none.
    """
    return operator._op_dk(_nested_key(operator), *args, **kwargs)


@cache
def _nested_key(operator: OpOverload) -> Any:
    """Return the key that an operator's kernel for nested tensors is registered for."""
    keys = _C.DispatchKey
    has = _C._dispatch_has_kernel_for_dispatch_key
    possible = (
        keys.NestedTensorCPU,
        keys.CompositeImplicitAutogradNestedTensor,
        _COMPOSITE_EXPLICIT,
        _COMPOSITE_IMPLICIT,
    )
    # What makes a nested tensor of others has a kernel for those.
    makes_one = operator.name().startswith("aten::_nested_") and has(operator.name(), keys.CPU)
    if makes_one and not has(operator.name(), keys.NestedTensorCPU):
        return keys.CPU
    return next((key for key in possible if has(operator.name(), key)), keys.NestedTensorCPU)


def run_compressed_kernel(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of an operator that takes or makes compressed sparse tensors.

    Raises ``NotImplementedError``, as torch does, where it has none.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    dense = bool(tensors) and all(tensor.layout is torch.strided for tensor in tensors)
    return operator._op_dk(_compressed_key(operator, dense), *args, **kwargs)


@cache
def has_compressed_kernel(operator: OpOverload) -> bool:
    """Return whether ``operator`` has a kernel of its own for compressed sparse tensors."""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(operator.name(), "SparseCsrCPU"))


@cache
def _compressed_key(operator: OpOverload, dense: bool) -> Any:
    """Return the key of the kernel for compressed tensors, or for what makes one of ``dense``."""
    keys = _C.DispatchKey
    has = _C._dispatch_has_kernel_for_dispatch_key
    first = keys.CPU if dense else keys.SparseCsrCPU
    possible = (first, _COMPOSITE_EXPLICIT, _COMPOSITE_NON_FUNCTIONAL, _COMPOSITE_IMPLICIT)
    return next((key for key in possible if has(operator.name(), key)), keys.SparseCsrCPU)


@contextmanager
def outside_interception() -> Iterator[None]:
    """Let operators reach their kernels while those around them are intercepted."""
    set_excluded(FAKE, True)
    try:
        yield
    finally:
        set_excluded(FAKE, False)


@cache
def is_view(operator: OpOverload) -> bool:
    """Return whether ``operator`` is of ATen and makes neither a storage nor data.

    ``lift_fresh`` does not count: by it a tensor that C++ made of Python numbers enters a trace.
    """
    base = operator._schema.name.removeprefix("aten::")
    if operator.namespace != "aten" or base == "lift_fresh":
        return False
    if base == "set_":
        return True
    return (operator.is_view or base in ("detach", "alias")) and any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in operator._schema.arguments
    )


@cache
def find_operator(name: str) -> OpOverload | None:
    """Return ``torch.ops.aten.<name>`` (``"add.Tensor"``, ``"relu"``), or ``None``."""
    base, _, overload = name.partition(".")
    try:
        return cast(OpOverload, getattr(getattr(torch.ops.aten, base), overload or "default"))
    except (AttributeError, RuntimeError):
        return None


#: The frame that the autograd engine is called from; an operator whose caller it is was issued by
#: C++ inside of the engine and not by a hook or a custom function.
ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__


def device_constructors() -> set[Callable[..., Any]]:
    """Return torch's functions that take a ``device`` and make a tensor."""
    from torch.utils._device import _device_constructors

    return cast("set[Callable[..., Any]]", _device_constructors())


def device_context() -> type:
    """Return the function mode behind ``with torch.device(...)`` and ``set_default_device``."""
    from torch.utils._device import DeviceContext

    return DeviceContext


def default_device() -> torch.device:
    """Return the device that ``with torch.device(...)`` or ``set_default_device`` asks for."""
    context = device_context()
    for mode in reversed(torch.overrides._get_current_function_mode_stack()):
        if isinstance(mode, context):
            return cast(torch.device, cast(Any, mode).device)
    return _CPU


#: No build of torch has kernels or tensors for it; autocast on fake cuda stands on it.
_AUTOCAST = _C._parse_dispatch_key("AutocastIPU")


def own_autocast_kernels() -> dict[str, Callable[..., Any]]:
    """Return the casting kernels that users registered for their operators on cuda, by operator.

    As ``torch.library.register_autocast`` does; those of C++ look at the device that C++ sees.
    """
    key = _C.DispatchKey.AutocastCUDA

    def calling(overload: OpOverload) -> Callable[..., Any]:
        return lambda *args, **kwargs: overload._op_dk(key, *args, **kwargs)

    found = {}
    for name in _C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        namespace, _, bare = name.partition("::")
        if namespace == "aten":
            continue
        base, _, overload = bare.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base)
        found[name] = calling(getattr(packet, overload or "default"))
    return found


def autocast_key_included(included: bool) -> None:
    """Let the operators of this thread pass the casting kernels, or no longer.

    Autocast keys are excluded by default (c10/core/impl/LocalDispatchKeySet.h).
    """
    set_included(_AUTOCAST, included)
    set_excluded(_AUTOCAST, not included)


class outside_autocast:
    """Let operators pass by the casting kernels (``ExcludeDispatchKeyGuard no_autocast``)."""

    __slots__ = ()

    def __enter__(self) -> None:
        set_excluded(_AUTOCAST, True)

    def __exit__(self, *exception: object) -> None:
        set_excluded(_AUTOCAST, False)


def global_device_context() -> Any:
    """Return the function mode that ``torch.set_default_device`` left in force, or None."""
    return getattr(cast(Any, torch)._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def attention_priority() -> tuple[int, ...]:
    """Return the order in which implementations of attention are tried, by their numbers."""
    return tuple(int(backend) for backend in _C._get_sdp_priority_order())


#: A context in which operators pass autograd by.
below_autograd: Callable[[], Any] = _C._AutoDispatchBelowAutograd


def below_interception(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``HigherOrderOperator.dispatch`` for which the Fake key is the CPU's.

    Such operators (flex attention) choose a Python kernel by key, and have none for Fake.
    """
    cpu = _C.DispatchKey.CPU

    def on_cpu(operator: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(operator, cpu if key == FAKE else key, *args, **kwargs)

    return on_cpu


def unwrapped(tensor: Tensor) -> Tensor | None:
    """Return the tensor inside of a wrapper that ``vmap`` or ``grad`` made, or None."""
    functorch = _C._functorch
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return None
    return cast(Tensor, functorch.get_unwrapped(tensor))
