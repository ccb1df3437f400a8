"""Function modes of torch, and replacements of its functions and types that they do not notice.

The default device is a function mode, and a trace has one that watches calls. A subclass decides
what ``tensor.to(device)`` does and returns, a mode what ``torch.zeros`` does
(torch/csrc/autograd/utils/wrap_outputs.h and python_arg_parser.cpp, ``handle_torch_function``).

Programs hold ``torch.device`` and ``safetensors.safe_open`` by themselves (``from torch import
device``, ``type(x) is torch.device``), so that no other class can take their place, and their
``__new__`` cannot be replaced and put back. Calling a type is up to the type's own type, which is
exchanged here and put back.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, update_wrapper
from types import BuiltinFunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function

from pytest_torchmem.torch_private.keys import TRACER, excluded
from pytest_torchmem.torch_private.names import private, unsupported

_CPU = torch.device("cpu")

#: Whether the program's function modes (``torch.set_default_device`` leaves one) see calls now, and
#: a context in which they do not.
function_modes: Callable[[], bool] = private("torch._C._is_torch_function_mode_enabled")
NoFunctionModes: Callable[[], Any] = private("torch._C.DisableTorchFunction")
#: How many dispatch modes are on the thread's stack.
dispatch_modes: Callable[[], int] = private("torch._C._len_torch_dispatch_stack")
NoDispatchModes: Callable[[], Any] = private("torch._C._DisableTorchDispatch")
_mode_stack: Callable[[], list[Any]] = private("torch.overrides._get_current_function_mode_stack")

#: Torch's functions that take a ``device`` and make a tensor, as they are when it is first asked.
device_constructors: Any = private("torch.utils._device._device_constructors")
#: The function mode behind ``with torch.device(...)`` and ``set_default_device``.
DeviceContext: type = private("torch.utils._device.DeviceContext")
_global_context: Any = private("torch._GLOBAL_DEVICE_CONTEXT")


def present_constructors() -> Any:
    """Return the ``device_constructors`` that there are now: torch remembers what was there first,
    as the stand-in of transformers for ``linspace`` (initialization.py).
    """
    return device_constructors.__wrapped__()


@contextmanager
def constructors_asked() -> Iterator[None]:
    """A context before which torch is asked for its ``device_constructors``, and after which it is
    asked anew if it had not been: it remembers neither what a trace replaces nor a mock.
    """
    was_asked = device_constructors.cache_info().currsize
    device_constructors()
    try:
        yield
    finally:
        if not was_asked:
            device_constructors.cache_clear()


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


def fake_tensor_mode() -> Any:
    """Return the ``FakeTensorMode`` that is in force for C++, which then makes no GPU ready
    (csrc/utils/device_lazy_init.cpp, device_lazy_init), or None.
    """
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
    """Has a function called in the place of every function of torch that a program calls, with that
    and its arguments; what it returns is what the program gets.
    """

    def __init__(self, called: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._called(func, args, dict(kwargs or {}))


DisableTorchFunctionSubclass: Any = private("torch._C.DisableTorchFunctionSubclass")
torch_function_enabled: Callable[[], bool] = private("torch._C._is_torch_function_enabled")
_DISABLED: Any = private("torch._C._disabled_torch_function_impl")
_PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
_OF_TORCH = (torch, torch.fft)
_ASKING = "_VariableFunctionsClass."
"""How the paths begin of functions of ``torch`` whose arguments torch's parser reads."""
_NOT_ASKING = ("frombuffer",)
"""Of these, those that ask nobody (csrc/autograd/python_torch_functions_manual.cpp)."""


def overrides(kind: type) -> bool:
    """Return whether torch asks a class of tensors before it runs a function."""
    return kind not in _PLAIN and kind.__torch_function__ is not _DISABLED  # type: ignore[attr-defined]


def of_tensors(replacement: Any, original: Any) -> Any:
    """Return what takes the place of an attribute of ``torch.Tensor``."""
    if isinstance(replacement, property):
        return _overridable(replacement)
    if isinstance(replacement, (staticmethod, classmethod)):  # which no subclass is asked about
        return replacement
    return TensorMethod(original, replacement)


def of_functions(owner: ModuleType, replacement: Any, original: Any) -> Any:
    """Return what takes the place of an attribute of a module."""
    if owner not in _OF_TORCH or isinstance(replacement, type):
        return replacement
    if type(original) not in (BuiltinFunctionType, TorchFunction):
        return replacement
    of_torch = original.__module__ == "torch"
    asking = original.__qualname__.startswith(_ASKING) if of_torch else True
    if not asking or original.__name__ in _NOT_ASKING:
        return replacement
    return TorchFunction(original, replacement)


class _Equal:
    """A callable in the place of ``original``, and equal to it: a table finds one by the other."""

    __call__: Callable[..., Any]

    def __init__(self, original: Callable[..., Any], function: Callable[..., Any]) -> None:
        update_wrapper(self, original)  # first: another one below has these attributes too
        self._original = original
        self._function = function

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Equal):
            return bool(self._original == other._original)
        return bool(self._original == other)

    def __hash__(self) -> int:
        return hash(self._original)


class TorchFunction(_Equal):
    """A function of ``torch`` in the place of ``original``, by which modes and classes know it.

    A library that is imported in a trace registers what it does for ``torch.zeros_like`` under what
    stands there; torch's function would ask for itself.
    """

    def __init__(self, original: Callable[..., Any], function: Callable[..., Any]) -> None:
        super().__init__(original, function)
        self._of_tensor = original.__name__.endswith("_like")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked: tuple[Any, ...] = ()
        if self._of_tensor and args and type(args[0]) not in _PLAIN:
            asks = getattr(type(args[0]), "__torch_function__", _DISABLED) is not _DISABLED
            asked = args[:1] if asks else ()
        if (asked or function_modes()) and torch_function_enabled():
            return handle_torch_function(self, asked, *args, **kwargs)
        return self._function(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(self.__name__)  # type: ignore[attr-defined]


class TensorMethod(_Equal):
    """A method in the place of ``original``."""

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        return self if tensor is None else MethodType(self, tensor)

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        asked = [one for one in (tensor, *args) if isinstance(one, Tensor) and overrides(type(one))]
        if (asked or function_modes()) and torch_function_enabled():
            if not kwargs and isinstance(self._original, MethodDescriptorType):
                found = _ask_as_cpp(self, asked, (tensor, *args))
                if found is not NotImplemented:
                    return found
            return handle_torch_function(self, asked, tensor, *args, **kwargs)
        return self._function(tensor, *args, **kwargs)


def _overridable(own: property) -> property:
    get: Any = own.fget

    def getter(tensor: Tensor) -> Any:
        if (overrides(type(tensor)) or function_modes()) and torch_function_enabled():
            asked: Any = made.__get__
            found = _ask_as_cpp(asked, [tensor], (tensor,))
            if found is not NotImplemented:
                return found
            return handle_torch_function(asked, (tensor,), tensor)
        return get(tensor)

    made = property(getter, own.fset, own.fdel, own.__doc__)
    return made


def _ask_as_cpp(function: Any, asked: list[Tensor], args: tuple[Any, ...]) -> Any:
    """Ask one subclass as C++ does, which passes no keyword arguments where there are none.
    ``NotImplemented`` where there are several, or a mode that comes first.
    """
    kinds = {type(one) for one in asked}
    if len(kinds) > 1 or function_modes():
        return NotImplemented
    (kind,) = kinds
    return kind.__torch_function__(function, (kind,), args)


_TYPE_OF = object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p)
"""Where an object says what its type is: the last field of CPython's ``PyObject``."""

_making: dict[type, Callable[..., Any]] = {}


def make(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Return what ``kind`` itself makes of its arguments."""
    return type.__call__(kind, *args, **kwargs)


@contextmanager
def made_by(kind: type, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``kind(...)`` return what ``function`` does, in the whole process."""
    place, original = ctypes.c_void_p.from_address(id(kind) + _TYPE_OF), type(kind)
    if place.value != id(original):
        raise unsupported(f"{kind.__name__} does not say what its type is where others do")
    _making[kind] = function
    place.value = id(_type_of(kind))
    try:
        yield
    finally:
        place.value = id(original)
        del _making[kind]


@cache
def _type_of(kind: type) -> type:
    module, original = kind.__module__, type(kind)
    place = ctypes.c_void_p.from_address(id(kind) + _TYPE_OF)

    class Made(original):  # type: ignore[misc,valid-type]
        """The type of ``kind`` while something else makes its objects."""

        __slots__ = ()
        #: Pickling asks for that of ``torch.device``, which has none of its own.
        __module__ = property(lambda cls: module)

        def __new__(mcs, *args: Any, **kwargs: Any) -> Any:
            # A class that derives from ``kind`` meanwhile is of the type that it always is of.
            place.value = id(original)
            try:
                return original(*args, **kwargs)
            finally:
                place.value = id(mcs)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            # Another thread may be in here when the type is put back, so nothing is asked of it.
            function = _making.get(cls)
            return make(cls, *args, **kwargs) if function is None else function(*args, **kwargs)

    return Made
