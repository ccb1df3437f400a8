"""What users teach of operators: every aspect that the profiler's own records have.

It comes before those, so a project can also correct a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.operators.overlay import LEADS, Taught, forget, taught_of, teach
from pytest_torchmem.operators.registry import DEVICES
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
    decomposition: Callable[..., Any] | None = None
    """``decomposition(machine, *args, **kwargs)``: the kernel as a sequence of operators, for one
    that calls others; it returns the operator's outputs."""
    path: Callable[..., Any] | None = None
    """``path(call, *args, **kwargs)``: for an operator that is made of others, those it is made of
    on cuda. ``call()`` runs it as on the CPU."""
    nested: Callable[..., Any] | None = None
    """``nested(nested, *args, **kwargs)``: the kernel for nested tensors of the strided layout."""
    storages: Callable[..., Any] | None = None
    """``storages(outputs, *args, **kwargs)``: real outputs on storages as large as those that the
    kernel leaves them on, for an operator whose outputs' shape depends on data."""
    order: tuple[int, ...] = ()
    """Positions of the outputs in the order in which the kernel makes them."""
    host_outputs: tuple[int, ...] = ()
    """Positions of outputs that the kernel makes on the host."""
    takes_nothing: bool = False
    """The kernel takes nothing beyond its outputs."""
    across_devices: bool = False
    """Its tensors may be on several devices."""
    masks: bool = False
    """Its indices may be boolean masks."""
    data_dependent: bool = False
    """The shape of its outputs depends on data."""
    decided_by: tuple[int, ...] | None = None
    """Positions of the tensors whose values decide the outputs' shape; None: all of them."""
    library_output: int | None = None
    """Position of the output whose size a library alone decides."""
    library_state: bool = False
    """Its one output is a state that a library keeps, of a size that it alone decides."""
    not_in_key: tuple[str, ...] = ()
    """Arguments that a calibration key leaves out."""
    keeps_values: tuple[str, ...] = ()
    """Arguments that it writes to and whose known values stay."""

    def taught(self) -> Taught:
        """Return the aspects that are given."""
        given = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("operator", "devices") and getattr(self, one.name) != one.default
        }
        if given.pop("takes_nothing", False):
            given["workspace"] = lambda *_, **__: 0
        return Taught(given)


def register_operator(model: OperatorModel) -> Callable[[], None]:
    """Add what is to be known of an operator, and return the function that takes it back.

    Raises ``UsageError`` for an operator that does not exist, that has been taught already, or that
    is made of other operators unless a ``path`` is given, and for a model that says nothing.
    """
    overloads = _overloads(model.operator)
    taught = _checked(model)
    # An overload may call another one, as those with names of dimensions do; and an operator made
    # of others may have a kernel for an output that is given.
    kernels = [one for one in overloads if is_composite_implicit(one) != taught.describes_kernel]
    if all(_is_given_outputs(overload) for overload in kernels):
        if taught.describes_kernel:
            why = "is made of other operators, which a trace follows: describe those"
        else:
            why = "has a kernel of its own: path= is for operators that are made of others"
        raise UsageError(f"{model.operator!r} {why}")
    for overload in kernels:
        for device in model.devices:
            if taught_of(overload, device) is not None:
                raise UsageError(f"{model.operator!r} is described twice for {device}")
    teach(kernels, model.devices, taught)
    spec_of.cache_clear()

    def remove() -> None:
        forget(kernels, model.devices)
        spec_of.cache_clear()

    return remove


def _checked(model: OperatorModel) -> Taught:
    """Return what a model says; raise ``UsageError`` for one that cannot be understood."""
    for name in LEADS:
        function = getattr(model, name)
        if function is not None and not callable(function):
            raise UsageError(f"{model.operator!r}: {name}={function!r} is not a function")
    taught, devices = model.taught(), model.devices
    if not taught.aspects:
        raise UsageError(f"{model.operator!r}: give meta=, workspace= or another aspect")
    if model.takes_nothing and model.workspace is not None:
        raise UsageError(f"{model.operator!r}: give workspace= or takes_nothing=True, not both")
    if not isinstance(devices, tuple) or not devices or not set(devices) <= set(DEVICES):
        raise UsageError(
            f"{model.operator!r}: devices={devices!r}: write ('cpu',), ('cuda',) or both"
        )
    if model.path is not None and devices != ("cuda",):
        raise UsageError(f"{model.operator!r}: path= is for cuda: add devices=('cuda',)")
    return taught


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
