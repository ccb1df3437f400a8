"""What users teach the profiler of operators: geometry, and the bytes that a kernel takes besides.

It comes before what the profiler knows by itself, so a project can also correct a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.operators.registry import (
    DEVICES,
    CustomRecord,
    add_custom,
    custom_record,
    remove_custom,
)
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.torch_private.operators import (
    OpOverload,
    OpOverloadPacket,
    custom_operator,
    is_composite_implicit,
    schema,
)


@dataclass(frozen=True, slots=True)
class OperatorModel:
    """What a trace is to know of one operator, whose kernel it never runs.

    ``operator`` is ``"mylib::attention"`` (all overloads), ``torch.ops.mylib.attention``, an
    overload of it, or what ``torch.library.custom_op`` returned.
    """

    operator: Any
    meta: Callable[..., Any] | None = None
    """From the operator's arguments, whose tensors are on ``meta``, to its outputs on ``meta``;
    None: as registered with ``register_fake`` or for ``"Meta"``."""
    workspace: Callable[..., int | tuple[int, ...]] | None = None
    """``workspace(machine, outputs, *args, **kwargs)``: the bytes at the kernel's peak beyond its
    outputs, as one number or as the requests that are alive together. ``machine`` is the ``Gpu``
    (``capability``, ``multiprocessors``) or the ``Host`` that the trace stands for; tensors have
    their geometry and no data."""
    devices: tuple[str, ...] = DEVICES
    """Where it holds: ``("cuda",)`` for a kernel that only the GPU has."""

    def record(self) -> CustomRecord:
        """Return the record that comes before the profiler's own."""
        given = {"meta": self.meta, "workspace": self.workspace}
        functions = {name: function for name, function in given.items() if function is not None}
        return CustomRecord(functions, {})


def register_operator(model: OperatorModel) -> Callable[[], None]:
    """Add what is to be known of an operator, and return the function that takes it back.

    Raises ``UsageError`` for an operator that does not exist, that is made of other operators, or
    that has been taught already, and for a model that says nothing.
    """
    overloads = _overloads(model.operator)
    for name, function in (("meta", model.meta), ("workspace", model.workspace)):
        if function is not None and not callable(function):
            raise UsageError(f"{model.operator!r}: {name}={function!r} is not a function")
    if model.meta is None and model.workspace is None:
        raise UsageError(f"{model.operator!r}: give meta=, workspace= or both")
    devices = model.devices
    if not isinstance(devices, tuple) or not devices or not set(devices) <= set(DEVICES):
        raise UsageError(
            f"{model.operator!r}: devices={devices!r}: write ('cpu',), ('cuda',) or both"
        )
    # An overload may call another one, as those with names of dimensions do; and an operator made
    # of others may have a kernel for an output that is given.
    kernels = [overload for overload in overloads if not is_composite_implicit(overload)]
    if all(_is_given_outputs(overload) for overload in kernels):
        raise UsageError(
            f"{model.operator!r} is made of other operators, which a trace follows: describe those"
        )
    keys = [(overload, device) for overload in kernels for device in devices]
    for overload, device in keys:
        if custom_record(overload, device) is not None:
            raise UsageError(f"{model.operator!r} is described twice for {device}")
    add_custom(dict.fromkeys(keys, model.record()))
    spec_of.cache_clear()

    def remove() -> None:
        remove_custom(keys)
        spec_of.cache_clear()

    return remove


@contextmanager
def registered_operators(*models: OperatorModel) -> Iterator[None]:
    """Have operators described for a while."""
    with ExitStack() as stack:
        for model in models:
            stack.callback(register_operator(model))
        yield


def _is_given_outputs(overload: OpOverload) -> bool:
    return any(argument.is_out for argument in schema(overload).arguments)


def _overloads(operator: Any) -> list[OpOverload]:
    """Return the overloads that a user's name or object means."""
    if isinstance(operator, OpOverload):
        return [operator]
    packet: Any = operator
    if isinstance(operator, str):
        namespace, separator, name = operator.partition("::")
        base, _, overload = name.partition(".")
        if not (namespace and separator and base):
            raise UsageError(f"{operator!r} is not an operator's name, such as 'mylib::attention'")
        try:
            packet = getattr(getattr(torch.ops, namespace), base)
            if overload:
                return [getattr(packet, overload)]
        except (AttributeError, RuntimeError):
            raise UsageError(
                f"there is no operator {operator!r}: import the module that registers it first"
            ) from None
    elif not isinstance(operator, OpOverloadPacket):
        overload_of = custom_operator(operator)
        if overload_of is None:
            raise UsageError(
                f"{operator!r} is not an operator: write 'mylib::attention', "
                "torch.ops.mylib.attention or what torch.library.custom_op returned"
            )
        return [overload_of]
    return [getattr(packet, overload) for overload in packet.overloads()]
