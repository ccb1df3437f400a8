"""Plans of calls: remembered for the process, or made by rule, by a record, or on ``meta``."""

import os
from collections.abc import Callable
from math import prod
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.plan import (
    Call,
    Plan,
    Same,
    plan_on_meta,
    plan_pointwise,
    remembered_plans,
)
from pytest_torchmem.operators.registry import generation
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace import type_of_number
from pytest_torchmem.operators.workspace_of import library_output
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.modes import overrides, torch_function_enabled
from pytest_torchmem.torch_private.settings import LIBRARY_VARIABLES, host_settings, kernel_settings

_TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})
_AS_THEY_ARE = frozenset({int, type(None)})
"""Types whose values are no others' of another type, as ``True`` is 1."""
_Generator = torch.Generator
_META = torch.device("meta")


_SIMPLE = frozenset({*_AS_THEY_ARE, bool, float, str})
_SIMPLE |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_SHAPE, _STRIDE = attrgetter("shape", "dtype"), methodcaller("stride")
_Several = Callable[[tuple[Any, ...]], tuple[Any, ...]]
_SIGNATURES: dict[tuple[type, ...], tuple[tuple[type, ...], _Several, _Several] | None] = {}
"""By the types of arguments: those that a key has, and what picks the tensors and the others; None
where some are neither tensors nor simple."""


def _signature_of(types: tuple[type, ...]) -> tuple[tuple[type, ...], _Several, _Several] | None:
    if not (_TENSOR_TYPES | _SIMPLE).issuperset(types):
        return None
    places = [at for at, kind in enumerate(types) if kind in _TENSOR_TYPES]
    others = [at for at, kind in enumerate(types) if kind not in _TENSOR_TYPES]
    signature = tuple(Tensor if kind in _TENSOR_TYPES else kind for kind in types)
    return signature, _picker(places), _picker(others)


def _picker(places: list[int]) -> _Several:
    """Return what gives the items in some places as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda items: ()
    return itemgetter(slice(places[0], places[0] + 1))


class Plans:
    """Plans on one target, those that earlier traces of this process have made included."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._environment = tuple(map(os.environ.get, LIBRARY_VARIABLES))
        self._find_settings = host_settings if target.gpu is None else kernel_settings
        self._settings: tuple[Any, ...] | None = None
        self._plans: dict[Any, Plan] = {}

    def remembered(self, key: Any) -> Plan | None:
        """Return the plan of an operator and geometry under the settings that hold now."""
        settings = self._find_settings()
        if settings != self._settings:  # by which dtypes and kernels are chosen
            self._settings, target = settings, self._target
            on = (generation(), *settings, *self._environment)
            self._plans = remembered_plans(
                target.host, target.gpu, target.calibration, on, target.cudnn or target.why_no_cudnn
            )
        return self._plans.get(key)

    def remember(self, key: Any, plan: Plan) -> None:
        """Keep a plan under the settings that held when it was looked up."""
        plan.complete()
        self._plans[key] = plan

    def make(
        self,
        call: Call,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        device: torch.device,
        *,
        captured: bool = False,
    ) -> Plan:
        """Return the outputs of a call that is seen for the first time, asked with what is
        ``given``.

        While a graph is ``captured``, every output is on the device: attention.cu, «Seed and Offset
        Device».
        """
        spec = call.operator
        plan = find_plan(spec, *given, call.tensors, self.own_meta(spec, device.type))
        on_device = spec.on(device.type)
        on_host = () if captured else on_device.host_outputs
        plan.on_host = frozenset(plan.outputs[at].slot for at in on_host)
        sized = library_output(self._target, spec, call.args, call.kwargs)
        if sized is not None:
            plan.resize(*sized)
        return plan

    def own_meta(self, spec: OperatorSpec, device: str) -> Callable[..., Any] | None:
        """Return the function that a record has for the geometry of outputs on a device.

        Raises what torch raises where it has no kernel for the device.
        """
        on_device = spec.on(device)
        if on_device.is_missing:
            backend = device.upper()
            raise NotImplementedError(
                f"Could not run '{spec.name}' with arguments from the '{backend}' backend: torch "
                f"has no kernel of it for {backend}"
            )
        return on_device.meta


class SubclassAsked(Exception):
    """A ``__torch_function__`` would run below the dispatcher, where torch disables none: backward.

    Torch's kernels do not call it there, so the operator is run with it disabled.
    """


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
    if tensors and not kwargs and operator.keeps_geometry and complex not in map(type, args):
        plan = plan_pointwise(tensors)
        if plan is not None:
            return plan
    args, kwargs = operator.placed(args, kwargs, _META)
    if own is None:
        args = operator.with_numbers_as_tensors(args, "meta")
    plan = plan_on_meta(operator.overload, own or operator.overload, args, kwargs)
    if operator.shared.resizes_by_count and isinstance(plan.outputs, Same):
        grown, position = plan.outputs.grown, plan.outputs.position
        if grown is not None and prod(grown.shape) == tensors[position].numel():
            plan.outputs = Same(position)
    return plan


def geometry_of_arguments(args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    """Return the same as ``geometry_of`` of an operator's arguments, most of which are simple."""
    types = (*map(type, args),)
    known = _SIGNATURES.get(types)
    if known is None and types not in _SIGNATURES:
        known = _SIGNATURES[types] = _signature_of(types)
    if known is not None:  # by few steps of Python, since it is asked of every operator
        signature, of_tensors, of_others = known
        found = of_tensors(args)
        tensors += found
        return (signature, *map(_SHAPE, found), *map(_STRIDE, found), of_others(args))
    key: list[Any] = []
    for value in args:
        kind = type(value)
        if kind in _TENSOR_TYPES:
            tensors.append(value)
            key.append((value.shape, value.stride(), value.dtype))
        elif kind in _AS_THEY_ARE:
            key.append(value)
        elif kind is list and _AS_THEY_ARE.issuperset(map(type, value)):  # sizes
            key.append(tuple(value))
        else:
            key.append(geometry_of(value, tensors))
    return tuple(key)


def geometry_of(value: Any, tensors: list[Tensor]) -> Any:
    """Return what of an argument decides the outputs' geometry; tensors are appended in order.

    Raises ``SubclassAsked`` where a subclass of tensors would be asked what it says of that.
    """
    kind = type(value)
    if kind in _TENSOR_TYPES:
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype)
    if kind is tuple or kind is list:
        found: list[Any] = []
        for item in value:  # often hundreds of tensors
            if type(item) in _TENSOR_TYPES:
                tensors.append(item)
                found.append((item.shape, item.stride(), item.dtype))
            else:
                found.append(geometry_of(item, tensors))
        return tuple(found)
    if kind is float or kind is bool:
        return (kind, value)
    if isinstance(value, Tensor):
        if torch_function_enabled() and overrides(kind):
            raise SubclassAsked
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype)
    if issubclass(kind, _Generator):
        return None
    return value


def with_types(args: tuple[Any, ...], numbers: tuple[int, ...]) -> tuple[Any, ...]:
    """Return arguments where tensors without data stand for ``numbers`` wrapped in them."""
    if not numbers:
        return args
    converted = list(args)
    for position in numbers:
        converted[position] = torch.empty((), dtype=type_of_number(args[position]), device="meta")
    return tuple(converted)
