"""An operator's kernel for one dispatch key, run where dispatch would choose another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.torch_private.keys import (
    COMPOSITE_EXPLICIT,
    COMPOSITE_IMPLICIT,
    COMPOSITE_NESTED,
    COMPOSITE_NON_FUNCTIONAL,
    COMPRESSED_CPU,
    CPU,
    FAKE,
    NESTED_CPU,
)
from pytest_torchmem.torch_private.names import private, private_attribute
from pytest_torchmem.torch_private.operators import OpOverload, composite_key, has_kernel

#: What runs an overload's kernel for a key: ``kernel_for(operator)(key, *args, **kwargs)``.
kernel_for: Callable[[OpOverload], Callable[..., Any]] = private_attribute(
    "torch._ops.OpOverload._op_dk"
)
_tree_leaves: Callable[[Any], list[Any]] = private("torch.utils._pytree.tree_leaves")
_DISABLED = private("torch._C._disabled_torch_dispatch_impl")
_ExcludeKeys: Callable[[Any], Any] = private("torch._C._ExcludeDispatchKeyGuard")
_all_keys: Callable[[], Any] = private("torch._C._dispatch_keyset_full")
_keys_after: Callable[[Any], Any] = private("torch._C._dispatch_keyset_full_after")
_mode_count: Callable[[], int] = private("torch._C._len_torch_dispatch_stack")
_pop_mode: Callable[[], Any] = private("torch.utils._python_dispatch._pop_mode_temporarily")


def run_composite_explicit(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the body of a composite operator, whose inner operators are dispatched as usual."""
    return kernel_for(operator)(composite_key(operator), *args, **kwargs)


def run_composite_implicit(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the body of an operator that autograd sees through."""
    return kernel_for(operator)(COMPOSITE_IMPLICIT, *args, **kwargs)


def run_torch_dispatch(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run ``__torch_dispatch__`` of the mode that is on, or of the subclasses among the arguments.

    As torch/csrc/autograd/python_variable.cpp and aten/src/ATen/core/PythonFallbackKernel.cpp do,
    but that what it calls is intercepted.
    """
    subclasses = {
        type(tensor): None
        for tensor in _tree_leaves((args, kwargs))
        if isinstance(tensor, Tensor) and type(tensor).__torch_dispatch__ is not _DISABLED
    }
    types = tuple(subclasses)
    above = _all_keys() - _keys_after(FAKE)
    with _ExcludeKeys(above.remove(FAKE)):
        if _mode_count():
            with _pop_mode() as mode:
                return mode.__torch_dispatch__(operator, types, args, kwargs)
        for subclass in types:
            result = subclass.__torch_dispatch__(operator, types, args, kwargs)
            if result is not NotImplemented:
                return result
    raise TypeError(f"no implementation of {operator} for {', '.join(map(str, types))}")


def run_cpu_kernel(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the CPU's kernel of an operator that calls others and touches no memory itself."""
    return kernel_for(operator)(CPU, *args, **kwargs)


def run_nested_kernel(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of an operator for nested tensors, which calls others on their buffers.

    Raises ``NotImplementedError``, as torch does, where it has none.
    """
    return kernel_for(operator)(_nested_key(operator), *args, **kwargs)


@cache
def _nested_key(operator: OpOverload) -> Any:
    """Return the key that an operator's kernel for nested tensors is registered for."""
    name = operator.name()
    possible = (NESTED_CPU, COMPOSITE_NESTED, COMPOSITE_EXPLICIT, COMPOSITE_IMPLICIT)
    # What makes a nested tensor of others has a kernel for those.
    makes_one = name.startswith("aten::_nested_") and has_kernel(name, CPU)
    if makes_one and not has_kernel(name, NESTED_CPU):
        return CPU
    return next((key for key in possible if has_kernel(name, key)), NESTED_CPU)


def run_compressed_kernel(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of an operator that takes or makes compressed sparse tensors.

    Raises ``NotImplementedError``, as torch does, where it has none.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    dense = bool(tensors) and all(tensor.layout is torch.strided for tensor in tensors)
    return kernel_for(operator)(_compressed_key(operator, dense), *args, **kwargs)


@cache
def _compressed_key(operator: OpOverload, dense: bool) -> Any:
    """Return the key of the kernel for compressed tensors, or for what makes one of ``dense``."""
    name = operator.name()
    first = CPU if dense else COMPRESSED_CPU
    possible = (first, COMPOSITE_EXPLICIT, COMPOSITE_NON_FUNCTIONAL, COMPOSITE_IMPLICIT)
    return next((key for key in possible if has_kernel(name, key)), COMPRESSED_CPU)


def below_interception(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``HigherOrderOperator.dispatch`` for which the Fake key is the CPU's.

    Such operators (flex attention) choose a Python kernel by key, and have none for Fake.
    """

    def on_cpu(operator: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        return dispatch(operator, CPU if key == FAKE else key, *args, **kwargs)

    return on_cpu
