"""Functions of torch with a ``device`` argument, the default device, and fake tensors.

Also ``torch.cuda.FloatTensor`` and its like, types that say where a tensor is and what it holds.
C++ knows those of cuda in builds with CUDA alone, and asks the real device as soon as one is used.

Torch's fake tensors are on the CPU in a trace on fake cuda, as C++ has the others. A fake tensor on
cuda has the dispatch keys of cuda, whose device guard autograd asks for: a build without CUDA ends
the process. In Python they say that they are on ``cuda:0``, as the tensors that they stand for do:
a compiler decides by it, so does the program that it follows, and the program's own
``FakeTensorMode`` is compared with what runs (``torch.library.opcheck``).

The same holds for nested tensors of one buffer, and for tensor subclasses that wrap others, which
have no storage of their own: ``torch.Tensor._make_wrapper_subclass`` makes one on the device it is
given.
"""

from collections.abc import Callable, Sequence
from functools import cache
from inspect import unwrap
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.interception.attribution import code_made_by
from pytest_torchmem.interception.context import Functions, TraceContext, instead_of
from pytest_torchmem.interception.python_api.data import readable
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private import modes, patches
from pytest_torchmem.torch_private.names import listed
from pytest_torchmem.torch_private.tensors import LEGACY, has_dispatch, is_wrapper, wrapped_tensors

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


def factories(trace: TraceContext, looked_at: list[patches.LookedAt]) -> patches.Replacements:
    """Let factories make tensors on fake cuda, and ``torch.device`` as a context say where. What
    decides which are replaced is added to ``looked_at``.
    """
    # A mock that is there has no name of its own.
    names = {one: getattr(one, "__name__", "") for one in modes.present_constructors()}
    replaced = {original: _factory(original, name) for original, name in names.items() if name}
    listed_ids = {*map(id, names)}
    of_list = {name for name, one in vars(torch).items() if id(one) in listed_ids}
    for name in of_list.union(filter(None, names.values())):
        looked_at.append((vars(torch), name, vars(torch).get(name, patches.ABSENT)))
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
        asks = isinstance(function, modes.TorchFunction)  # the modes below this one, as torch does
        return (function if asks or trace.off() else factory)(*args, **kwargs)

    return [
        (torch, {**of_torch, **beside}),
        (torch.fft, of_fft),
        (modes.DeviceContext, {"__torch_function__": torch_function}),
    ]


def _names_cuda(device: Any) -> bool:
    """Return whether a program asks for a GPU; one may do so amidst a move to it, of its own."""
    return device is not None and as_device(device).type == "cuda"


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
    with modes.DisableTorchFunctionSubclass():
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
            values = of_values or of_data or modes.fake_tensor_mode() is None
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
            device = _CPU if name in _BESIDE_DEFAULT_DEVICE else modes.default_device()
        target = trace.device(as_device(device))
        if target.type == "meta":
            return original(*args, **kwargs)
        if of_parts and kwargs.get("device") is not None:
            # Each is copied to where it is asked for (csrc/utils/tensor_new.cpp,
            # ``internal_new_from_data``).
            args = tuple(part.to(target) if isinstance(part, Tensor) else part for part in args)
            kwargs |= {
                name: part.to(target) for name, part in kwargs.items() if isinstance(part, Tensor)
            }
        kwargs["device"] = _CPU
        if of_tensor and of_values:
            return _of_tensor(target, *args, **kwargs)
        if of_tensor and args[0].device.type != "meta":
            kwargs.pop("device")
        if not of_values:
            with trace.placing_on(target):
                return original(*args, **kwargs)
        # On the host it shares the memory of what it is made of, and is copied from there.
        is_trained = kwargs.pop("requires_grad", False)
        if kwargs.get("copy"):  # which that is
            del kwargs["copy"]
        with trace.placing_on(_CPU):
            made = original(*args, **kwargs)
        return made.to(target).requires_grad_(is_trained)

    factory.__name__ = name
    factory.__wrapped__ = original  # type: ignore[attr-defined]
    return factory


FACTORY = code_made_by(unwrap(_factory), "factory")
"""The code that is called in the place of each factory."""


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
        """Let ``torch.Tensor(...)`` make tensors of this type. As torch/csrc/utils/tensor_new.cpp,
        ``base_tensor_ctor``, which goes by the default type.
        """
        self._kind = None if kind.device.type == "cpu" else kind

    def reset(self) -> None:
        """Let ``torch.Tensor(...)`` make tensors on the host again."""
        self._kind = None

    def make(self, *args: Any, **kwargs: Any) -> Any:
        if SESSION.off() or kwargs or (args and isinstance(args[0], Tensor)):
            return modes.make(Tensor, *args, **kwargs)
        if self._kind is not None:
            return self._kind(*args)
        # C++ asks for the host as it does beside any tensor that it takes to be there.
        with SESSION.running.placing_on(_CPU):
            return modes.make(Tensor, *args)


def legacy_types(trace: TraceContext, default: DefaultType) -> patches.Replacements:
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
        (one, {name: _legacy_type(one, name, device) for name in LEGACY if hasattr(one, name)})
        for one, device in modules
    ]
    return [*types, (torch, {"set_default_tensor_type": set_default_tensor_type})]


def find_legacy_type(kind: Any) -> LegacyType | None:
    """Return the fake type for a type or the name of one (``"torch.cuda.FloatTensor"``)."""
    if isinstance(kind, LegacyType):
        return kind
    path, _, name = kind.rpartition(".") if isinstance(kind, str) else ("", "", "")
    module = {"torch": torch, "torch.cuda": torch.cuda}.get(path)
    found = getattr(module, name, None)
    return found if isinstance(found, LegacyType) else None


@cache
def _legacy_type(module: Any, name: str, device: torch.device) -> LegacyType:
    original, kind = getattr(module, name), LegacyType
    if module is torch.cuda.sparse:
        kind = LegacySparseType
    made = kind(name, (), {"__module__": module.__name__, "__doc__": original.__doc__})
    made.original, made.on_host = original, getattr(torch, name)
    made.device, made.dtype = device, original.dtype
    return made


_DEVICE = 2
"""The place of ``device`` among arguments after the class; torch/_subclasses/fake_tensor.py."""
_SAID = "_torchmem_device"
"""The attribute of a fake tensor that has the device on which Python sees it."""
STANDS_FOR_GPU = "_torchmem_stands_for_gpu"
"""The attribute of a mode that has made a fake tensor which says that it is on the GPU."""
_NAMES = ("device", "fake_device", "_fake_device")
_KEPT = property(
    lambda tensor: vars(tensor)["fake_device"],
    lambda tensor, device: vars(tensor).update(fake_device=device),
)
"""Where torch 2.11 has the device of a fake tensor: in an attribute of the instance."""


def device_said(tensor: Tensor) -> torch.device:
    """Return where a tensor is, or stands for one that is: also of a trace that is over."""
    found: torch.device = getattr(tensor, _SAID, None) or tensor.device
    return found


def fake_tensors(trace: TraceContext) -> patches.Replacements:
    """Make the program's fake tensors on the CPU."""
    original: Any = modes.FakeTensor.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        said = None
        if trace.on_thread():
            named, args, kwargs = _as_cpp_has_them(args, kwargs, _DEVICE)
            said = next(filter(_is_gpu, named), None)
        made = original(cls, *args, **kwargs)
        if said is not None:
            setattr(made.fake_mode, STANDS_FOR_GPU, True)
            setattr(made, _SAID, _numbered(trace, torch.device(said)))
        return made

    def place(tensor: Any, device: Any) -> None:
        # What converts a tensor moves the fake one (torch/_subclasses/meta_utils.py).
        if trace.on_thread() and _is_gpu(device):
            setattr(tensor, _SAID, _numbered(trace, torch.device(device)))
            device = _CPU
        kept.fset(tensor, device)

    def torch_dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is modes.ASKS_FOR_DEVICE and hasattr(args[0], _SAID) and trace.on_thread():
            found = args[0].device
            return _CPU if _is_gpu(found) else found
        return dispatch(func, types, args, kwargs or {})

    kept: Any = getattr(modes.FakeTensor, "fake_device", _KEPT)
    dispatch = modes.FakeTensor.__torch_dispatch__
    said = property(lambda tensor: getattr(tensor, _SAID, None) or kept.fget(tensor), place)
    replacements = {
        "__new__": staticmethod(new),
        "__torch_dispatch__": staticmethod(torch_dispatch),
        "fake_device": said,
    }
    handlers = patches.metadata_handlers.original

    def handler(args: Any) -> Any:
        found = handlers[modes.ASKS_FOR_DEVICE](args)
        return _CPU if _is_gpu(found) and trace.on_thread() else found

    return [
        (modes.FakeTensor, replacements),
        patches.metadata_handlers.by({**handlers, modes.ASKS_FOR_DEVICE: handler}),
    ]


def _numbered(trace: TraceContext, device: torch.device) -> torch.device:
    """Return a GPU by its number; one that is not there is none of a fake tensor's business."""
    return trace.device(device) if device.index is None else device


def _is_gpu(device: Any) -> bool:
    return not isinstance(device, int | None) and torch.device(device).type == "cuda"


def as_cpp_has_it(device: Any) -> Any:
    """Return the device on which C++ has what Python says is on ``device``."""
    if device is None:
        return None
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return _CPU
    return device


def _as_cpp_has_them(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int
) -> tuple[list[Any], tuple[Any, ...], dict[str, Any]]:
    """Return the devices that a constructor is given, and its arguments with those of C++."""
    given = (*args[place : place + 1], *map(kwargs.get, _NAMES))
    named = [one for one in given if one is not None]
    placed = (*args[:place], *map(as_cpp_has_it, args[place : place + 1]), *args[place + 1 :])
    options = {name: as_cpp_has_it(kwargs[name]) for name in _NAMES if name in kwargs}
    return named, placed, {**kwargs, **options}


def nested_tensors(trace: TraceContext) -> patches.Replacements:
    """Let ``torch.nested`` make tensors of the strided layout on the GPU that is named. Its
    functions in C++ are given the device, and their kernels hand it on.
    """
    of_list: Any = patches.nested_from_list.original
    constructor: Any = patches.nested_constructor.original

    def from_list(
        tensors: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Any = None,
        pin_memory: bool | None = None,
    ) -> Any:
        if device is None or trace.off() or trace.in_fake_tensor_mode():
            return of_list(tensors, dtype, layout, device, pin_memory)
        # The buffer is copied as a whole: native/nested/NestedTensorUtils.h, wrap_tensor_node.
        made: Tensor = of_list(tensors, dtype, layout, None, pin_memory)
        return made.to(trace.device(as_device(device)))

    def construct(
        data: Sequence[Any],
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        options: dict[str, Any] = {"requires_grad": requires_grad, "pin_memory": pin_memory}
        if device is None or trace.off() or trace.in_fake_tensor_mode():
            return constructor(data, dtype=dtype, device=device, **options)
        # Each part is copied to the device: csrc/utils/nested.cpp, nested_tensor_ctor.
        target = trace.device(as_device(device))
        parts = [
            part.detach().to(target, dtype or part.dtype, copy=True)
            if isinstance(part, Tensor)
            else torch.tensor(part, dtype=dtype, device=target)
            for part in data
        ]
        return of_list(parts, None, None, None, None).requires_grad_(requires_grad)

    return [patches.nested_from_list.by(from_list), patches.nested_constructor.by(construct)]


_DEVICE_OF_WRAPPER = 7
"""The position of ``device`` among the arguments; torch/csrc/autograd/python_variable.cpp,
THPVariable_make_wrapper_subclass.
"""


class WrapperSubclasses(Functions):
    """The devices that wrapper subclasses say they are on."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self.devices: Any = WeakIdKeyDictionary()
        """Those that they were made for: they go with the wrappers' contents."""

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device of a wrapper, None for other tensors.

        It is the one that it was made for, or that of what it wraps: C++ makes ``DTensor``
        (torch/csrc/autograd/python_variable.cpp, ``DTensor_new``).
        """
        found: torch.device | None = self.devices.get(tensor)
        if found is None and has_dispatch(tensor) and is_wrapper(tensor):
            inner = next(iter(wrapped_tensors(tensor)), None)
            found = None if inner is None else inner.device
        return found

    @instead_of(*patches.wrap_for_transform)
    def wrap(self, original: Any, tensor: Tensor, *args: Any) -> Any:
        """Wrap a tensor for a transform: C++ may first make one beside it (native/Dropout.cpp)."""
        if not self._trace.off():
            self._trace.begin_beside(tensor)
        return original(tensor, *args)

    @instead_of(patches.make_wrapper)
    def make(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a wrapper (``torch.Tensor._make_wrapper_subclass``)."""
        if self._trace.off():
            return original(*args, **kwargs)
        named, args, kwargs = _as_cpp_has_them(args, kwargs, _DEVICE_OF_WRAPPER)
        made = original(*args, **kwargs)
        for device in map(torch.device, named):
            if device.type == "cuda":
                self.devices[made] = device
        return made
