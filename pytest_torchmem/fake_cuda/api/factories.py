"""Tensor factories: functions of torch with a ``device`` argument, and the default device.

Also ``torch.cuda.FloatTensor`` and its like, types that say where a tensor is and what it holds.
C++ knows those of cuda in builds with CUDA alone, and asks the real device as soon as one is used.
"""

from collections.abc import Callable
from functools import cache
from inspect import unwrap
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.interception.attribution import code_made_by
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.python_api.data import readable
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private.modes import (
    DeviceContext,
    DisableTorchFunctionSubclass,
    cpp_makes_fake_tensors,
    default_device,
    device_constructors,
    make,
)
from pytest_torchmem.torch_private.names import listed
from pytest_torchmem.torch_private.patches import ABSENT, LookedAt, Replacements

_CPU = torch.device("cpu")
_Factory = Callable[..., Any]
_OF_DATA = "tensor"
"""What copies numbers to the device, whose guard it asks for (csrc/utils/tensor_new.cpp)."""
_OF_VALUES = ("as_tensor", "asarray")
_OF_FFT = ("fftfreq", "rfftfreq")
_SPARSE = "sparse_"
"""How the names of those begin that take indices and values."""

#: Functions with a ``device`` argument that the default device says nothing about
#: (torch/utils/_device.py). A build with CUDA initialises it before it calls the operator.
_BESIDE_DEFAULT_DEVICE = listed("""
    _cudnn_init_dropout_state _efficientzerotensor _empty_affine_quantized
    _empty_per_channel_affine_quantized empty_like full_like normal ones_like rand_like
    randint_like randn_like zeros_like
""")


def factories(trace: TraceContext, looked_at: list[LookedAt]) -> Replacements:
    """Let factories make tensors on fake cuda, and ``torch.device`` as a context say where.

    What decides which are replaced is added to ``looked_at``.
    """
    # A mock that was there when torch made its list has no name.
    names = {one: getattr(one, "__name__", "") for one in device_constructors()}
    replaced = {original: _factory(original, name) for original, name in names.items() if name}
    for name in filter(None, names.values()):
        looked_at.append((vars(torch), name, vars(torch).get(name, ABSENT)))
    of_torch = {
        names[original]: factory
        for original, factory in replaced.items()
        if getattr(torch, names[original], None) is original
    }
    of_fft = {name: _factory(getattr(torch.fft, name), name) for name in _OF_FFT}
    beside = {name: _factory(getattr(torch, name), name) for name in _BESIDE_DEFAULT_DEVICE}

    def torch_function(
        context: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        factory = replaced.get(function)
        if factory is None:
            return function(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = context.device
        return (function if trace.off() else factory)(*args, **kwargs)

    return [
        (torch, {**of_torch, **beside}),
        (torch.fft, of_fft),
        (DeviceContext, {"__torch_function__": torch_function}),
    ]


def _names_cuda(device: Any) -> bool:
    """Return whether a program asks for a GPU; one may do so amidst a move to it, of its own."""
    return device is not None and as_device(device).type == "cuda"


def _parts_on(
    target: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a sparse tensor's constructor with indices and values on a device.

    Each is copied to where it is asked for (csrc/utils/tensor_new.cpp, ``internal_new_from_data``).
    """

    def moved(part: Any) -> Any:
        return part.to(target) if isinstance(part, Tensor) else part

    return tuple(map(moved, args)), {name: moved(part) for name, part in kwargs.items()}


def _of_tensor(
    target: torch.device,
    tensor: Tensor,
    dtype: torch.dtype | None = None,
    *,
    copy: bool | None = None,
    requires_grad: bool | None = None,
    **_: Any,
) -> Tensor:
    """Return a tensor as one on a device, as C++ does: no subclass is asked.

    torch/csrc/utils/tensor_new.cpp, ``internal_new_from_data`` and ``asarray``, which lets go of
    the graph where no gradient is wanted.
    """
    with DisableTorchFunctionSubclass():
        made = tensor.to(target, dtype or tensor.dtype, copy=bool(copy))
        if requires_grad is not None and made.requires_grad != requires_grad:
            made = made.detach().requires_grad_(requires_grad)
        return made


@cache
def _factory(original: _Factory, name: str) -> _Factory:
    """Return the function that makes on fake cuda what ``original`` makes on a device."""
    of_values, of_data, of_parts = name in _OF_VALUES, name == _OF_DATA, name.startswith(_SPARSE)
    keeps_device = name.endswith("_like") or of_values

    def factory(*args: Any, **kwargs: Any) -> Any:
        if SESSION.off():
            return original(*args, **kwargs)
        trace = SESSION.running
        if trace.is_placing and not _names_cuda(kwargs.get("device")):
            return original(*args, **kwargs)
        if trace.in_fake_tensor_mode():
            values = of_values or of_data or not cpp_makes_fake_tensors()
            if not values or not _names_cuda(kwargs.get("device")):
                return original(*args, **kwargs)
            made = original(*args, **{**kwargs, "device": _CPU})
            return made.to(kwargs["device"])
        of_tensor = keeps_device and bool(args) and isinstance(args[0], Tensor)
        if kwargs.get("pin_memory") and not _names_cuda(kwargs.get("device")):
            made = factory(*args, **{**kwargs, "pin_memory": False})
            trace.pin(made)
            return made
        device = kwargs.get("device")
        if device is None:
            if of_tensor or any(isinstance(one, Tensor) for one in (*args, *kwargs.values())):
                return original(*args, **kwargs)
            device = _CPU if name in _BESIDE_DEFAULT_DEVICE else default_device()
        target = trace.device(as_device(device))
        if target.type == "meta":
            return original(*args, **kwargs)
        if of_parts and kwargs.get("device") is not None:
            args, kwargs = _parts_on(target, args, kwargs)
        kwargs["device"] = _CPU
        if of_tensor and of_values:
            return _of_tensor(target, *args, **kwargs)
        if of_tensor and args[0].device.type != "meta":
            kwargs.pop("device")
        with trace.placing_on(target):
            made = original(*args, **kwargs)
        if of_values and made.device != target:  # it shares the memory of what it is made of
            return made.to(target)
        return made

    factory.__name__ = name
    factory.__wrapped__ = original  # type: ignore[attr-defined]
    return factory


FACTORY = code_made_by(unwrap(_factory), "factory")
"""The code that is called in the place of each factory."""


_DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


class LegacyType(type):
    """The type of these types."""

    original: Any
    on_host: Any
    """The same type of the host, which makes the tensors of both."""
    device: torch.device
    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a tensor of that type, as ``torch.Tensor(...)`` does."""
        if SESSION.off():
            return cls.original(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            return args[0].to(cls.device, cls.dtype)
        if args:
            args = (readable(SESSION.running, args[0], cls.__name__), *args[1:])
        with SESSION.running.placing_on(cls.device):
            return cls.on_host(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether a tensor is on the device, and of the dtype."""
        if SESSION.off() or not isinstance(instance, Tensor):
            return isinstance(instance, cls.original)
        return instance.dtype is cls.dtype and instance.device == cls.device


class LegacySparseType(LegacyType):
    """``torch.cuda.sparse.FloatTensor`` and its like."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a sparse tensor of indices, values and a size, or an empty one of a size."""
        if SESSION.off():
            return cls.original(*args, **kwargs)
        options: dict[str, Any] = {"dtype": cls.dtype, "device": cls.device}
        if args and isinstance(args[0], Tensor):
            return torch.sparse_coo_tensor(*args, **options)
        size = args[0] if args and not isinstance(args[0], Integral) else args or (0,)
        return torch.sparse_coo_tensor(size=tuple(size), **options)

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether a tensor is sparse, on the device, and of the dtype."""
        sparse = isinstance(instance, Tensor) and instance.layout is torch.sparse_coo
        return sparse and super().__instancecheck__(instance)


class DefaultType:
    """Makes what ``torch.Tensor(...)`` returns: on the host, unless a program sets a GPU's type."""

    def __init__(self) -> None:
        self._kind: LegacyType | None = None

    def set(self, kind: LegacyType) -> None:
        """Let ``torch.Tensor(...)`` make tensors of this type.

        As torch/csrc/utils/tensor_new.cpp, ``base_tensor_ctor``, which goes by the default type.
        """
        self._kind = None if kind.device.type == "cpu" else kind

    def reset(self) -> None:
        """Let ``torch.Tensor(...)`` make tensors on the host again."""
        self._kind = None

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``torch.Tensor(...)`` does."""
        if SESSION.off() or kwargs or (args and isinstance(args[0], Tensor)):
            return make(Tensor, *args, **kwargs)
        if self._kind is not None:
            return self._kind(*args)
        # C++ asks for the host as it does beside any tensor that it takes to be there.
        with SESSION.running.placing_on(_CPU):
            return make(Tensor, *args)


def legacy_types(trace: TraceContext, default: DefaultType) -> Replacements:
    """Have types of the host and of the GPU that make fake tensors."""
    gpu = torch.device("cuda", 0)
    set_type = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        """Set the default dtype and the device, which C++ has in one."""
        found = None if trace.off() else find_legacy_type(kind)
        if found is None:
            set_type(kind)
            return
        torch.set_default_dtype(found.dtype)
        torch.set_default_device(None if found.device == _CPU else found.device)
        default.set(found)

    modules = (torch, _CPU), (torch.cuda, gpu), (torch.cuda.sparse, gpu)
    types = [
        (one, {name: _legacy_type(one, name, device) for name in _DTYPES if hasattr(one, name)})
        for one, device in modules
    ]
    return [*types, (torch, {"set_default_tensor_type": set_default_tensor_type})]


def find_legacy_type(kind: Any) -> LegacyType | None:
    """Return the fake type for a type or the name of one (``"torch.cuda.FloatTensor"``)."""
    if isinstance(kind, LegacyType):
        return kind
    path, _, name = kind.rpartition(".") if isinstance(kind, str) else ("", "", "")
    module = {"torch": torch, "torch.cuda": torch.cuda}.get(path)
    found = getattr(module, name, None) if module is not None and name in _DTYPES else None
    return found if isinstance(found, LegacyType) else None


@cache
def _legacy_type(module: Any, name: str, device: torch.device) -> LegacyType:
    original, kind = getattr(module, name), LegacyType
    if module is torch.cuda.sparse:
        kind = LegacySparseType
    made = kind(name, (), {"__module__": module.__name__, "__doc__": original.__doc__})
    made.original, made.on_host = original, getattr(torch, name)
    made.device, made.dtype = device, _DTYPES[name]
    return made
