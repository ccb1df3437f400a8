"""Fake tensors of torch in a trace on fake cuda: they are on the CPU, as C++ has the others.

A fake tensor on cuda has the dispatch keys of cuda, whose device guard autograd asks for: a build
without CUDA ends the process. In Python they say that they are on ``cuda:0``, as the tensors that
they stand for do: a compiler decides by it, so does the program that it follows, and the program's
own ``FakeTensorMode`` is compared with what runs (``torch.library.opcheck``).

The same holds for nested tensors of one buffer, and for tensor subclasses that wrap others, which
have no storage of their own: ``torch.Tensor._make_wrapper_subclass`` makes one on the device it is
given.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private import patches
from pytest_torchmem.torch_private.modes import ASKS_FOR_DEVICE, FakeTensor
from pytest_torchmem.torch_private.patches import Replacements, make_wrapper, metadata_handlers
from pytest_torchmem.torch_private.tensors import has_dispatch, is_wrapper, wrapped_tensors

_CPU = torch.device("cpu")
_DEVICE = 2
"""The position of ``device`` among the arguments after the class; torch/_subclasses/fake_tensor.py.
"""
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


def fake_tensors(trace: TraceContext) -> Replacements:
    """Make the program's fake tensors on the CPU."""
    original: Any = FakeTensor.__new__

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
        if func is ASKS_FOR_DEVICE and hasattr(args[0], _SAID) and trace.on_thread():
            found = args[0].device
            return _CPU if _is_gpu(found) else found
        return dispatch(func, types, args, kwargs or {})

    kept: Any = getattr(FakeTensor, "fake_device", _KEPT)
    dispatch = FakeTensor.__torch_dispatch__
    said = property(lambda tensor: getattr(tensor, _SAID, None) or kept.fget(tensor), place)
    replacements = {
        "__new__": staticmethod(new),
        "__torch_dispatch__": staticmethod(torch_dispatch),
        "fake_device": said,
    }
    handlers = metadata_handlers.original

    def handler(args: Any) -> Any:
        found = handlers[ASKS_FOR_DEVICE](args)
        return _CPU if _is_gpu(found) and trace.on_thread() else found

    return [
        (FakeTensor, replacements),
        metadata_handlers.by({**handlers, ASKS_FOR_DEVICE: handler}),
    ]


def _numbered(trace: TraceContext, device: torch.device) -> torch.device:
    """Return a GPU by its number; one that is not there is none of a fake tensor's business."""
    return trace.device(device) if device.index is None else device


def _is_gpu(device: Any) -> bool:
    return (
        device is not None and not isinstance(device, int) and torch.device(device).type == "cuda"
    )


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


def nested_tensors(trace: TraceContext) -> Replacements:
    """Let ``torch.nested`` make tensors of the strided layout on the GPU that is named.

    Its functions in C++ are given the device, and their kernels hand it on.
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


class WrapperSubclasses:
    """The devices that wrapper subclasses say they are on."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self.begin()

    def begin(self) -> None:
        """Forget the wrappers of the trace before."""
        self._devices: Any = WeakIdKeyDictionary()

    @contextmanager
    def noted_in(self, trace: TraceContext) -> Iterator[None]:
        """Let what is noted of wrappers go with their contents."""
        trace.noted_contents.append(self._devices)
        yield

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device of a wrapper, None for other tensors.

        It is the one that it was made for, or that of what it wraps: C++ makes ``DTensor``
        (torch/csrc/autograd/python_variable.cpp, ``DTensor_new``).
        """
        found: torch.device | None = self._devices.get(tensor)
        if found is None and has_dispatch(tensor) and is_wrapper(tensor):
            inner = next(iter(wrapped_tensors(tensor)), None)
            found = None if inner is None else inner.device
        return found

    def making(self) -> Callable[..., Any]:
        """Return the function that replaces ``torch.Tensor._make_wrapper_subclass``."""
        original: Callable[..., Any] = make_wrapper.original

        def make_wrapper_subclass(*args: Any, **kwargs: Any) -> Any:
            if self._trace.off():
                return original(*args, **kwargs)
            named, args, kwargs = _as_cpp_has_them(args, kwargs, _DEVICE_OF_WRAPPER)
            made = original(*args, **kwargs)
            for device in map(torch.device, named):
                if device.type == "cuda":
                    self._devices[made] = device
            return made

        return make_wrapper_subclass
