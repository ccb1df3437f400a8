"""Descriptions of operators by users: every aspect that the package's own records have.

A user's description takes precedence, so a project can also correct a figure.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch

from pytest_torchmem.errors import UsageError
from pytest_torchmem.operators.registry import DEVICES, LEADS, Taught, forget, taught_of, teach
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.torch_private import keys


@dataclass(frozen=True, slots=True)
class OperatorModel:
    """A description of one operator; a trace never runs the operator's kernel.

    Leave out every aspect that PyTorch or this package already knows. ``operator`` is
    ``"mylib::attention"`` (all overloads), ``torch.ops.mylib.attention``, an overload of it, or
    what ``torch.library.custom_op`` returned.
    """

    operator: Any
    meta: Callable[..., Any] | None = None
    """``meta(*args, **kwargs)``: takes the operator's arguments, with tensors on ``meta``, and
    returns its outputs on ``meta``. Default: what ``register_fake`` or the ``"Meta"`` kernel
    returns."""
    workspace: Callable[..., int | tuple[int, ...]] | None = None
    """``workspace(machine, outputs, *args, **kwargs)``: the bytes that the kernel holds at its peak
    beyond its outputs, as one number or as a tuple of requests that are alive together.
    ``machine`` is the ``Gpu`` (``capability``, ``multiprocessors``) or the ``Host`` that the trace
    models; tensors have a geometry and no data."""
    devices: tuple[str, ...] = DEVICES
    """The devices that the description applies to, such as ``("cuda",)``."""
    decomposition: Callable[..., Any] | None = None
    """``decomposition(machine, *args, **kwargs)``: runs what the kernel calls, for its outputs."""
    path: Callable[..., Any] | None = None
    """``path(call, *args, **kwargs)``: for a composite operator, runs the operators that it
    consists of on cuda. ``call()`` runs those of the CPU."""
    nested: Callable[..., Any] | None = None
    """``nested(nested, *args, **kwargs)``: replaces the kernel for strided nested tensors."""
    sparse: Callable[..., Any] | None = None
    """``sparse(*args, **kwargs)``: replaces the kernel for COO tensors, by their parts."""
    compressed: Callable[..., Any] | None = None
    """``compressed(machine, *args, **kwargs)``: the same for CSR, CSC, BSR and BSC tensors."""
    storages: Callable[..., Any] | None = None
    """``storages(outputs, *args, **kwargs)``: returns the outputs on storages as large as the
    kernel leaves them, for an operator whose output shape depends on data."""
    at_most: Callable[..., Any] | None = None
    """``at_most(*args, **kwargs)``: takes tensors on ``meta`` and returns the largest outputs, on
    ``meta``, for an operator whose output shape depends on data that a trace may not know."""
    values: Callable[..., Any] | None = None
    """``values(*args, **kwargs)``: computes the outputs on the CPU where it has no kernel for
    the operator; ``None`` for an output that nobody reads."""
    flops: Callable[..., int] | None = None
    """``flops(outputs, *args, **kwargs)``: the floating-point operations of one call, for the node
    table and the advice that is made of it."""
    order: tuple[int, ...] = ()
    """Positions of the outputs, in the order in which the kernel allocates them."""
    host_outputs: tuple[int, ...] = ()
    """Positions of the outputs that the kernel allocates on the host."""
    takes_nothing: bool = False
    """Whether the kernel allocates nothing but its outputs."""
    across_devices: bool = False
    """Whether its tensors may be on different devices."""
    masks: bool = False
    """Whether its indices may be boolean masks."""
    data_dependent: bool = False
    """Whether its output shape depends on data."""
    decided_by: tuple[int, ...] | None = None
    """Positions of the tensors whose values decide the output shape; default: all tensors."""
    library_output: int | None = None
    """Position of the output whose size a library decides, such as cuDNN's reserve."""
    library_state: bool = False
    """Whether its one output is a state that a library keeps and whose size the library decides."""
    not_in_key: tuple[str, ...] = ()
    """Names of the arguments that a calibration key leaves out."""
    also_writes: tuple[str, ...] = ()
    """Names of the arguments that it writes to although its schema does not say so."""
    keeps_values: tuple[str, ...] = ()
    """Names of the arguments that it writes to without changing known values."""

    def taught(self) -> Taught:
        given = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in ("operator", "devices") and getattr(self, one.name) != one.default
        }
        if given.pop("takes_nothing", False):
            given["workspace"] = lambda *_, **__: 0
        return Taught(given)


def register_operator(model: OperatorModel) -> Callable[[], None]:
    """Add a description, and return the function that removes it.

    Raises ``UsageError`` if the operator does not exist or has a description already, if it is a
    composite of other operators and the model gives no ``path``, or if the model is empty.
    """
    overloads = _overloads(model.operator)
    taught = _checked(model)
    # An overload may call another one, as those with names of dimensions do; and an operator made
    # of others may have a kernel for an output that is given.
    kernels = [
        one for one in overloads if taught.speaks_of(composite=keys.is_composite_implicit(one))
    ]
    if all(any(one.is_out for one in keys.schema(overload).arguments) for overload in kernels):
        if "path" not in taught.aspects:
            why = "is a composite of other operators, which a trace follows: describe those instead"
        else:
            why = "has a kernel of its own: path= applies only to composite operators"
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


def _overloads(operator: Any) -> list[keys.OpOverload]:
    """Return the overloads that a user's name or object means."""
    if isinstance(operator, keys.OpOverload):
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
    elif not isinstance(operator, keys.OpOverloadPacket):
        overload_of = keys.custom_operator(operator)
        if overload_of is None:
            raise UsageError(
                f"{operator!r} is not an operator: write 'mylib::attention', "
                "torch.ops.mylib.attention or what torch.library.custom_op returned"
            )
        return [overload_of]
    return [getattr(packet, overload) for overload in packet.overloads()]
