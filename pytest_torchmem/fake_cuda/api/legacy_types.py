"""``torch.cuda.FloatTensor`` and its like: types that say where a tensor is and what it holds.

C++ knows those of cuda in builds with CUDA alone, and asks the real device as soon as one is used.
"""

from __future__ import annotations

from functools import cache
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.fake_cuda.api.session import SESSION
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.python_api.data import readable
from pytest_torchmem.torch_private.dispatch.overrides import make
from pytest_torchmem.torch_private.patching.patches import Replacements

_HOST = torch.device("cpu")
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
        with SESSION.running.placing_on(_HOST):
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
        torch.set_default_device(None if found.device == _HOST else found.device)
        default.set(found)

    return [
        *[
            (module, {name: _legacy_type(module, name, device) for name in _DTYPES})
            for module, device in ((torch, _HOST), (torch.cuda, gpu))
        ],
        (torch.cuda.sparse, {name: _sparse_type(name, gpu) for name in _sparse_names()}),
        (torch, {"set_default_tensor_type": set_default_tensor_type}),
    ]


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
    original = getattr(module, name)
    made = LegacyType(name, (), {"__module__": module.__name__, "__doc__": original.__doc__})
    made.original, made.on_host = original, getattr(torch, name)
    made.device, made.dtype = device, _DTYPES[name]
    return made


def _sparse_names() -> list[str]:
    return [name for name in _DTYPES if hasattr(torch.cuda.sparse, name)]


@cache
def _sparse_type(name: str, device: torch.device) -> LegacySparseType:
    made = LegacySparseType(name, (), {"__module__": "torch.cuda.sparse"})
    made.original, made.device = getattr(torch.cuda.sparse, name), device
    made.dtype = _DTYPES[name]
    return made
