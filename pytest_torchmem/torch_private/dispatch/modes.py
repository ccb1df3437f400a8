"""Function modes of torch: the default device is one, and a trace has one that watches calls."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from pytest_torchmem.torch_private.dispatch.keys import TRACER, excluded
from pytest_torchmem.torch_private.names import private

_CPU = torch.device("cpu")

#: Whether the program's function modes (``torch.set_default_device`` leaves one) see calls now, and
#: a context in which they do not.
function_modes: Callable[[], bool] = private("torch._C._is_torch_function_mode_enabled")
NoFunctionModes: Callable[[], Any] = private("torch._C.DisableTorchFunction")
#: How many dispatch modes are on the thread's stack.
dispatch_modes: Callable[[], int] = private("torch._C._len_torch_dispatch_stack")
NoDispatchModes: Callable[[], Any] = private("torch._C._DisableTorchDispatch")
_mode_stack: Callable[[], list[Any]] = private("torch.overrides._get_current_function_mode_stack")

#: Torch's functions that take a ``device`` and make a tensor.
device_constructors: Callable[[], set[Callable[..., Any]]] = private(
    "torch.utils._device._device_constructors"
)
#: The function mode behind ``with torch.device(...)`` and ``set_default_device``.
DeviceContext: type = private("torch.utils._device.DeviceContext")
_global_context: Any = private("torch._GLOBAL_DEVICE_CONTEXT")


FakeTensor: Any = private("torch._subclasses.fake_tensor.FakeTensor")
FakeTensorMode: Any = private("torch._subclasses.fake_tensor.FakeTensorMode")
TorchDispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")
FunctionalTensorMode: Any = private("torch._subclasses.functional_tensor.FunctionalTensorMode")
#: The operator by which C++ asks a fake tensor for its device.
ASKS_FOR_DEVICE: Any = torch.ops.prim.device.default
#: The kind of mode that makes fake tensors; there is at most one of a kind.
_mode_of_kind: Callable[[Any], Any] = private("torch._C._get_dispatch_mode")
_FAKE_TENSORS: Any = private("torch._C._TorchDispatchModeKey.FAKE")


#: The context in which kernels take fake tensors for those on ``meta`` that they hold.
_on_meta: Callable[[Any], Any] = private(
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager"
)
_unflatten: Callable[[Any, Any], Any] = private("torch.utils._pytree.tree_unflatten")
private("torch._subclasses.fake_tensor.FakeTensorMode.wrap_meta_outputs_with_default_device_logic")


def cpp_makes_fake_tensors() -> bool:
    """Return whether a ``FakeTensorMode`` is in force for C++, which then makes no GPU ready
    (csrc/utils/device_lazy_init.cpp, device_lazy_init).
    """
    return fake_tensor_mode() is not None


def fake_tensor_mode() -> Any:
    """Return the ``FakeTensorMode`` that is in force for C++, or None."""
    return _mode_of_kind(_FAKE_TENSORS)


def fakes_of_meta(
    mode: Any, operator: Any, function: Callable[..., Any], flat_args: Any, structure: Any
) -> Any:
    """Return the fake tensors of what a function returns for ``meta``, which an operator lacks."""
    args, kwargs = _unflatten(flat_args, structure)
    with _on_meta(mode):
        made = function(*args, **kwargs)
    wrapped = mode.wrap_meta_outputs_with_default_device_logic
    return wrapped(made, operator, flat_args, device=kwargs.get("device"))


def makes_fake_tensors(mode: object) -> bool:
    """Return whether a dispatch mode is torch's own ``FakeTensorMode``."""
    return bool(getattr(mode, "_mode_key", None) == _FAKE_TENSORS)


def default_device() -> torch.device:
    """Return the device that ``with torch.device(...)`` or ``set_default_device`` asks for."""
    for mode in reversed(_mode_stack()):
        if isinstance(mode, DeviceContext):
            return cast(torch.device, cast(Any, mode).device)
    return _CPU


def global_device_context() -> Any:
    """Return the function mode that ``torch.set_default_device`` left in force, or None."""
    return getattr(_global_context, "device_context", None)


#: The state of ``torch.jit.trace`` on this thread, None where nothing is traced so.
jit_tracing: Callable[[], Any] = private("torch._C._get_tracing_state")
_set_jit_tracing: Callable[[Any], None] = private("torch._C._set_tracing_state")


@contextmanager
def not_jit_tracing() -> Iterator[None]:
    """Let sizes of tensors be integers, and nothing be recorded, while ``torch.jit.trace`` runs."""
    state = jit_tracing()
    # ``torch.tensor`` excludes the tracer's key (internal_new_from_data in
    # torch/csrc/utils/tensor_new.cpp), and the state cannot be set where it is excluded
    # (set_dispatch_enabled in ATen/TracerMode.h).
    with excluded(TRACER, False):
        _set_jit_tracing(None)
    try:
        yield
    finally:
        with excluded(TRACER, False):
            _set_jit_tracing(state)


#: Not written down by ``torch.jit.trace``, which waits for ``_convolution``, called by its kernel
#: (torchgen/packaged/autograd/gen_trace_type.py, ``DONT_RECORD_TRACE``).
CONVOLUTION: Any = torch.ops.aten.convolution.default


def convolution_for_jit(args: tuple[Any, ...]) -> Any:
    """Run a convolution as its kernel does (native/Convolution.cpp, ``convolution``)."""
    flags = torch.backends.cudnn
    run: Any = torch.ops.aten._convolution.default
    return run(*args, flags.benchmark, flags.deterministic, flags.enabled, flags.allow_tf32)


class FunctionMode(TorchFunctionMode):
    """Calls ``called`` in the place of every function of torch that a program calls."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.called(func, args, dict(kwargs or {}))

    @abstractmethod
    def called(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the program gets of a call."""
