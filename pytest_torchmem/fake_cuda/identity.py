"""Fake cuda in Python: tensors say that they are on ``cuda:0`` while C++ sees the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.fake_cuda.api.cuda import cuda_answers
from pytest_torchmem.fake_cuda.api.data_loading import loaders_pin_here
from pytest_torchmem.fake_cuda.api.factories import SESSION
from pytest_torchmem.fake_cuda.api.legacy_types import legacy_types
from pytest_torchmem.fake_cuda.api.outside_tensors import cuda_outside_tensors
from pytest_torchmem.fake_cuda.api.triton import triton_refused
from pytest_torchmem.fake_cuda.device_copy import as_device, parse_to
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.fake_cuda.methods import pin, tensor_methods
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.modes import DeviceContext, default_device, device_constructors
from pytest_torchmem.torch_private.patches import replaced_all

_CPU = torch.device("cpu")
_Base: Any = torch._C.TensorBase
#: Functions with a ``device`` argument that the default device says nothing about
#: (torch/utils/_device.py). A build with CUDA initialises it before it calls the operator.
_BESIDE_TENSORS = (
    "empty_like",
    "full_like",
    "normal",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
)


@contextmanager
def cuda_identity(trace: TraceContext, memory: DeviceMemory) -> Iterator[None]:
    """Let every common way of placing and asking for a device work for fake cuda."""
    constructors = _constructors(device_constructors())
    functions = {getattr(torch, name) for name in _BESIDE_TENSORS}
    beside = _constructors(functions)
    grouping = functools.partial(_group_tensors, trace, torch._C._group_tensors_by_device_and_dtype)
    with ExitStack() as stack:
        stack.enter_context(cuda_answers(trace, memory))
        stack.enter_context(cuda_outside_tensors(trace))
        stack.enter_context(legacy_types(trace))
        stack.enter_context(loaders_pin_here(trace))
        stack.enter_context(triton_refused(trace))
        stack.enter_context(
            replaced_all(
                [
                    (Tensor, tensor_methods(trace, memory)),
                    (torch, _under_their_names(constructors)),
                    (torch, _under_their_names(beside)),
                    (torch, {"_use_cudnn_rnn_flatten_weight": _flattens(trace)}),
                    (DeviceContext, _context(trace, constructors)),
                    (torch._C, {"_group_tensors_by_device_and_dtype": grouping}),
                    (torch._C._nn, {"_parse_to": parse_to}),
                ]
            )
        )
        yield


def _under_their_names(
    constructors: dict[Callable[..., Any], Callable[..., Any]],
) -> dict[str, Callable[..., Any]]:
    """Return replacements for the functions that stand in ``torch`` itself."""
    return {
        original.__name__: constructor
        for original, constructor in constructors.items()
        if getattr(torch, original.__name__, None) is original
    }


def _constructors(
    originals: Iterable[Callable[..., Any]],
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return for functions of torch with a ``device`` argument ones that know fake cuda."""
    return {original: _constructor(original) for original in originals}


@cache
def _constructor(original: Callable[..., Any]) -> Callable[..., Any]:
    session = SESSION
    keeps_device = original.__name__.endswith("_like") or original.__name__ in (
        "as_tensor",
        "asarray",
    )
    only_if_asked = original.__name__ in _BESIDE_TENSORS

    def constructor(*args: Any, **kwargs: Any) -> Any:
        if session.off() or session.running.is_placing:
            return original(*args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            if only_if_asked or (keeps_device and args and isinstance(args[0], Tensor)):
                return original(*args, **kwargs)
            device = default_device()
        trace = session.running
        target = trace.device(as_device(device))
        if target.type == "meta":
            return original(*args, **kwargs)
        kwargs["device"] = _CPU
        if keeps_device and args and isinstance(args[0], Tensor):
            if original.__name__ in ("as_tensor", "asarray"):
                return args[0].to(target, kwargs.get("dtype") or args[0].dtype)
            if args[0].device.type != "meta":
                kwargs.pop("device")
        with trace.placing_on(target):
            made = original(*args, **kwargs)
        if kwargs.get("pin_memory"):
            pin(trace, made)
        return made

    constructor.__name__ = original.__name__
    constructor.__wrapped__ = original  # type: ignore[attr-defined]
    return constructor


def _context(
    trace: TraceContext, constructors: dict[Callable[..., Any], Callable[..., Any]]
) -> dict[str, Any]:
    """Return ``DeviceContext``'s method: ``with torch.device("cuda")``, ``set_default_device``."""

    def torch_function(
        context: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        constructor = constructors.get(function)
        if constructor is None:
            return function(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = context.device
        return (function if trace.off() else constructor)(*args, **kwargs)

    return {"__torch_function__": torch_function}


def _flattens(trace: TraceContext) -> Callable[[], bool]:
    """Return ``torch._use_cudnn_rnn_flatten_weight``: CUDA builds come with cuDNN."""
    original: Callable[[], bool] = torch._use_cudnn_rnn_flatten_weight
    return lambda: original() if trace.off() else True


def _group_tensors(
    trace: TraceContext, original: Callable[..., Any], lists: Any, with_indices: bool = False
) -> Any:
    """Group lists of tensors by the device and dtype of the first list's.

    As torch/csrc/utils/../ATen/native/ForeachUtils.h ``_group_tensors_by_first_tensors_device_and
    _dtype`` does by the devices C++ sees.
    """
    if trace.off():
        return original(lists, with_indices)
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    for position, tensor in enumerate(lists[0]):
        if tensor is None:
            continue
        members, indices = groups.setdefault(
            (tensor.device, tensor.dtype), ([[] for _ in lists], [])
        )
        for member, tensors in zip(members, lists, strict=True):
            if tensors:
                member.append(tensors[position])
        if with_indices:
            indices.append(position)
    return groups
