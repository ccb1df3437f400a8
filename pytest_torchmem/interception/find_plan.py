"""The plan of a call: by rule, from a function of its own, or on ``meta``; and what it goes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.plan import Plan, plan_on_meta, plan_pointwise
from pytest_torchmem.interception.wrapped_numbers import type_of
from pytest_torchmem.operators.spec import OperatorSpec

_TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})
_Generator = torch.Generator


def find_plan(
    operator: OperatorSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    own: Callable[..., Any] | None,
) -> Plan:
    """Return which storages a call makes and how its outputs lie on them.

    ``tensors`` are those among the arguments, ``own`` is the function that gives the geometry of
    this operator's outputs, where ``meta`` does not.
    """
    __tracebackhide__ = True
    if tensors and not kwargs:  # a clone may be laid out in another way
        plan = plan_pointwise(
            operator.overload, tensors, bool(operator.mutated or operator.mutated_names)
        )
        if plan is not None:
            return plan
    if operator.takes_device:
        kwargs = {**kwargs, "device": "meta"}
        kwargs.pop("pin_memory", None)
    if own is None:
        args = operator.with_numbers_as_tensors(args, "meta")
    return plan_on_meta(operator.overload, own or operator.overload, args, kwargs)


def geometry_of(value: Any, tensors: list[Tensor]) -> Any:
    """Return what of an argument decides the outputs' geometry; tensors are appended in order."""
    kind = type(value)
    if kind in _TENSOR_TYPES or isinstance(value, Tensor):
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype)
    if kind is tuple or kind is list:
        return tuple([geometry_of(item, tensors) for item in value])
    if kind is float or kind is bool:
        return (kind, value)
    if issubclass(kind, _Generator):
        return None
    return value


def with_types(args: tuple[Any, ...], numbers: tuple[int, ...]) -> tuple[Any, ...]:
    """Return arguments where tensors without data stand for ``numbers`` wrapped in them."""
    if not numbers:
        return args
    converted = list(args)
    for position in numbers:
        converted[position] = torch.empty((), dtype=type_of(args[position]), device="meta")
    return tuple(converted)
