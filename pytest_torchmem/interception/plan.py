"""Calls of operators, and the geometry of their outputs: by rule, by a record, or on ``meta``.

A plan says what storages an operator makes and how its outputs lie on them; it depends on nothing
but the operator and the geometry of its arguments, so a repeated layer costs a look-up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import attrgetter, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.ledger import DeviceLedger, StorageRecord
from pytest_torchmem.operators.registry import generation
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace import ALL, Buffer, First, Made, Workspace, on_meta
from pytest_torchmem.operators.workspace_of import CallWork, library_output
from pytest_torchmem.profile.timeline import Confidence
from pytest_torchmem.step.trees import (
    Args,
    Kwargs,
    argument_leaves,
    argument_tensors,
    replace_leaves,
    replace_tensors,
)
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.targets.host import Host
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private import kernels, modes
from pytest_torchmem.torch_private.keys import OpOverload, lacks_geometry
from pytest_torchmem.torch_private.settings import LIBRARY_VARIABLES, host_settings, kernel_settings
from pytest_torchmem.torch_private.tensors import storage_address, tensor_on

if TYPE_CHECKING:
    from pytest_torchmem.cudnn.library import Library
    from pytest_torchmem.targets.gpus import Calibration


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """An operator and what it is called with."""

    operator: OperatorSpec
    args: Args
    kwargs: Kwargs
    tensors: list[Tensor]
    """The tensors among the arguments, in order."""
    records: list[StorageRecord]
    """What the ledger knows of their storages."""
    device: DeviceLedger | None = None
    """Where it runs."""
    node: int | None = None
    """The sequence number of the autograd node that called it in a backward, -1 for none there;
    None where that was not asked."""
    stands_in: bool = False
    """Whether the tensors only lie as those that are meant, whose storages ``records`` has."""

    @property
    def values(self) -> Callable[..., Any] | None:
        """What computes the outputs, where it is not the operator's kernel on the CPU."""
        return self.operator.values_on("cuda" if self.device is None else self.device.device.type)

    @property
    def named(self) -> dict[str, Any]:
        """What it is given, by the names of the arguments."""
        return {**dict(zip(self.operator.argument_names, self.args, strict=False)), **self.kwargs}

    def pairs(self) -> Iterable[tuple[Tensor, StorageRecord]]:
        """Return the tensors, each with what the ledger knows of its storage."""
        return zip(self.tensors, self.records, strict=True)

    def written(self) -> set[int]:
        """Return the ids of the tensors that its schema says it writes to."""
        return {id(one) for one in argument_tensors(self.operator.written(self.args, self.kwargs))}

    def all_written(self) -> set[int]:
        written = self.operator.all_written(self.args, self.kwargs)
        return {id(one) for one in argument_tensors(written)}

    def reads(self, tensor: Tensor) -> bool:
        """Return whether the values of an argument decide anything."""
        unread = self.operator.cpu.unread
        return unread is None or all(one is not tensor for one in unread(self.args, self.kwargs))

    def may_overlap(self) -> bool:
        """Return whether what is written to may lie on the storage of another argument. A tensor
        that is given twice counts as another.
        """
        records = self.records
        if len(records) < 2:
            return False
        if self.operator.mutated == (0,):
            return id(records[0]) in map(id, records[1:])
        return len({*map(id, records)}) < len(records)


@dataclass(slots=True, repr=False)
class Output:
    """A tensor among an operator's outputs: its geometry on one of the plan's storages. On the
    storage of an argument the offset counts from that argument's own.
    """

    slot: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, slot: int = 0) -> Output:
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        return cls(slot, tensor.dtype, shape, tensor.stride(), offset)

    @property
    def span(self) -> int:
        """How many elements there are from its first to its last."""
        steps = zip(self.shape, self.stride, strict=True)
        return 0 if 0 in self.shape else 1 + sum((size - 1) * step for size, step in steps)

    def on(self, storage: torch.UntypedStorage, start: int = 0) -> Tensor:
        """Return a tensor of this geometry on ``storage``, whose argument begins at ``start``."""
        return tensor_on(storage, self.dtype, self.shape, self.stride, start + self.offset)


@dataclass(slots=True, repr=False)
class Same:
    """An output that is one of the tensor arguments itself, by its position among them. ``grown``
    is the geometry that the operator gives it where it had too few elements (``out=``).
    """

    position: int
    grown: Output | None = None


class Temporary(NamedTuple):
    """A request that an operator's body gives back before it returns."""

    number: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    label: str
    confidence: Confidence


#: One step of an operator's body: a request of its own, minus the number of one that is given back,
#: an output whose storage is made, or a library's workspace that stays and may be there already.
Step = Temporary | int | Output | Same | Buffer


@dataclass(slots=True, eq=False, repr=False)
class Plan:
    """What an operator returns, and the bytes it takes beyond.

    ``slots`` are the storages that the outputs lie on: the bytes of a new one, or ``-1 - position``
    for the storage of the tensor argument at that position. ``outputs`` has the structure of the
    operator's result, with ``Output`` and ``Same`` in the place of tensors. ``steps`` is the order
    in which a kernel or a body makes outputs, and makes and gives back what else it asks for;
    outputs that are not among them are made at the end, in the order of their slots.
    """

    slots: tuple[int, ...]
    outputs: Any
    workspace: Workspace | None = None
    """What is to be noted of what it asks for, whose requests are among the steps."""
    steps: tuple[Step, ...] = ()
    confidences: dict[int, Confidence] = field(default_factory=dict)
    """How sure the bytes of a slot are, where they are not exact."""
    on_host: frozenset[int] = frozenset()
    """Slots that are made on the host, wherever the others are."""
    repeatable: bool = True
    """Whether the next call of the geometry asks for the same: not if values decided a shape."""
    work: CallWork | None = None
    """What the kernel has to do."""
    broadcast: str = ""
    """The inputs' shapes, where a pointwise operator makes more elements than any of them has."""
    drawn: tuple[Any, ...] | None = None
    """What the CPU's kernel fills with random numbers, once that was asked."""
    cost: tuple[int, int, int] | None = None
    """The operations and bytes that the outputs' values take, once that was asked, and how many
    times what is cheap they may be to be computed always."""

    constant: Tensor | None = None
    """The memory of the only output, where that is of the call's numbers alone, and small."""
    numbers: tuple[int, ...] | None = None
    """The positions of Python numbers that C++ wrapped in tensors of the host's, once that was
    asked: arguments of the same types have the same."""
    takes_more: bool = True
    """Whether there is anything beside the steps to be booked or told: what is noted of a
    workspace, numbers that were wrapped in tensors, a broadcast."""
    tells_values: bool = True
    """Whether something may be to be noted of values that are not computed."""
    is_plain: bool = False
    """Whether the fast path follows it: its outputs are all made where its tensors are, by an
    operator that is plain."""
    makes_one: bool = False
    """Whether all outputs are one tensor on a new storage; asked for every operator."""

    def complete(self) -> None:
        """Take note that outputs, slots and steps are what they are to be."""
        if [*map(id, self.steps)] == [*map(id, argument_leaves(self.outputs, (Output, Same)))]:
            self.steps = ()  # as outputs are made anyway
        self.makes_one = (
            type(self.outputs) is Output
            and len(self.slots) == 1
            and self.slots[0] >= 0
            and not (self.on_host or self.confidences)
            and (not self.steps or self.outputs in self.steps)
        )

    def on_meta(self, tensors: list[Tensor]) -> Any:
        """Return the outputs without memory; ``tensors`` are the operator's arguments in order."""

        def shown(output: Output | Same) -> Tensor:
            if isinstance(output, Same):
                if output.grown is None:
                    return tensors[output.position]
                output = output.grown
            shape, stride = output.shape, output.stride
            return torch.empty_strided(shape, stride, dtype=output.dtype, device="meta")

        return replace_leaves(self.outputs, (Output, Same), shown)

    def follow(self, workspace: Workspace, order: Sequence[int] = ()) -> None:
        """Make outputs and the requests of a workspace in the order that its kernel makes them in.
        ``order`` are the positions of outputs that the kernel makes in another order than theirs.
        """
        outputs = self.outputs if type(self.outputs) is tuple else (self.outputs,)
        left = {id(one): one for one in (outputs[at] for at in order)}
        left |= {id(one): one for one in argument_leaves(self.outputs, (Output, Same))}
        steps: list[Step] = []
        alive: list[Temporary] = []
        requests = workspace.requests
        if not any(isinstance(request, Made) for request in requests):
            requests = (ALL, *requests)
        for number, request in enumerate(requests, start=1):
            if isinstance(request, Made):
                at = request.position
                made = [*left.values()] if at is None else [outputs[at]]
                steps += [output for output in made if left.pop(id(output), None)]
            elif isinstance(request, First):
                nbytes, others = request
                first = [one for one in alive if one.nbytes == nbytes][others]
                alive.remove(first)
                steps.append(-first.number)
            elif isinstance(request, Buffer):
                steps.append(request)
            elif request > 0:
                alive.append(Temporary(number, request, (), "", "", workspace.confidence))
                steps.append(alive[-1])
            else:
                last = max(at for at, one in enumerate(alive) if one.nbytes == -request)
                steps.append(-alive.pop(last).number)
        # An output whose size a library decides on is as sure as the workspace it asks for with it.
        is_told = workspace.confidence in (Confidence.LIBRARY, Confidence.BOUNDED)
        for slot, sure in self.confidences.items():
            if is_told and sure is Confidence.UNKNOWN:
                self.confidences[slot] = workspace.confidence
        self.steps = (*steps, *workspace.kept, *(-one.number for one in reversed(alive)))
        noted = workspace._replace(requests=(), kept=())
        self.workspace = None if noted.is_nothing else noted

    def resize(self, position: int, nbytes: int | None) -> None:
        """Give the flat output at ``position`` the size that a library decides on. ``None``: it was
        not measured, and has at least the bytes that it has.
        """
        output = self.outputs[position]
        self.confidences[output.slot] = Confidence.UNKNOWN
        if nbytes is not None:
            slots = list(self.slots)
            slots[output.slot] = nbytes
            self.slots = tuple(slots)
            output.shape, output.stride = (nbytes // output.dtype.itemsize,), (1,)
            self.confidences[output.slot] = Confidence.CALIBRATED


_MOST_PLANS = 200_000
"""More than a process should keep of one machine's: they are all forgotten then."""


@lru_cache(maxsize=64)  # an update's calibration grows from test to test
def remembered_plans(
    host: Host,
    gpu: Gpu | None,
    calibration: Calibration | None = None,
    settings: tuple[Any, ...] = (),
    cudnn: Library | str | None = None,
) -> dict[Any, Plan]:
    """Return the plans that earlier traces of this process found for a machine.

    ``cudnn`` is asked about the GPU, or the reason why it is not, which a plan's unknown workspaces
    tell; ``settings`` are torch's own on which a GPU's kernels and
    their workspaces depend.
    """
    return {}


def plan_of_result(
    result: Any, tensors: list[Tensor], shapes: list[torch.Size] | None = None
) -> Plan:
    """Return the plan that an operator's ``result`` stands for. ``tensors`` are its tensor
    arguments in order, and ``shapes`` the shapes they had before it ran.
    """
    backwards = [*enumerate(tensors)][::-1]  # of several in one place the first counts
    positions = {id(tensor): position for position, tensor in backwards}
    inputs = {storage_address(tensor): position for position, tensor in backwards}
    slot_of: dict[int, int] = {}
    slots: list[int] = []
    made_before: dict[int, Output] = {}

    def output(tensor: Tensor) -> Output | Same:
        if id(tensor) in made_before:  # one tensor returned twice, and to be held twice
            return made_before[id(tensor)]
        same = positions.get(id(tensor))
        if same is not None:
            if shapes is None or shapes[same] == tensor.shape:
                return Same(same)
            return Same(same, Output.of(tensor))
        key = storage_address(tensor)
        slot = slot_of.get(key)
        if slot is None:
            slot = slot_of[key] = len(slots)
            position = inputs.get(key)
            slots.append(tensor.untyped_storage().nbytes() if position is None else -1 - position)
        made = Output.of(tensor, slot)
        if slots[slot] < 0:
            made.offset -= int(tensors[-1 - slots[slot]].storage_offset())
        made_before[id(tensor)] = made
        return made

    outputs = replace_tensors(result, output)  # which fills the slots
    return Plan(tuple(slots), outputs)


def plan_pointwise(tensors: list[Tensor]) -> Plan | None:
    """Return the plan of a pointwise operator in the common case, which needs no ``meta`` kernel.

    That is: floating tensors of one geometry without gaps, and Python numbers. TensorIterator gives
    their output the same geometry (aten/src/ATen/TensorIterator.cpp, fast_set_up and
    compute_types). Returns None for every other case.
    """
    first = tensors[0]
    dtype, shape, stride = first.dtype, first.shape, first.stride()
    if not dtype.is_floating_point or not first.is_contiguous():
        return None
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.shape != shape or tensor.stride() != stride:
            return None
    nbytes = first.numel() * first.element_size()
    return Plan((nbytes,), Output(0, dtype, tuple(shape), stride, 0))


def broadcast_of(operator: OpOverload, tensors: list[Tensor], plan: Plan) -> str:
    """Return which shapes were broadcast to more elements than any of them has, and to which.
    Losses get their arguments expanded (``broadcast_tensors`` in torch.nn.functional), and count
    with the elements that they have in memory.
    """
    if len(tensors) < 2 or type(plan.outputs) not in (Output, Same):
        return ""
    whole = 0
    if type(plan.outputs) is Output and torch.Tag.pointwise in operator.tags:
        whole = prod(plan.outputs.shape)
    elif all(tensor.shape == tensors[0].shape for tensor in tensors):
        whole = tensors[0].numel()
    own = [  # without expansion
        tuple(size if stride else 1 for size, stride in zip(one.shape, one.stride(), strict=True))
        for one in tensors
    ]
    if whole < 2 or any(prod(shape) >= whole for shape in own):
        return ""
    made = torch.broadcast_shapes(*own)
    if prod(made) <= max(map(prod, own)):  # what is expanded was expanded before
        return ""
    return f"{' with '.join(f'{list(shape)}' for shape in own)} made {list(made)}"


def plan_on_meta(
    operator: OpOverload, function: Callable[..., Any], args: Args, kwargs: Kwargs
) -> Plan:
    """Return the plan of ``operator`` by running ``function`` on ``meta`` clones of its arguments.
    Raises ``UnsupportedOperatorError`` where nothing is known for ``meta``, and whatever the
    operator raises for arguments it does not accept.
    """
    if function is operator and lacks_geometry(operator):
        raise unsupported(operator, "register_fake was not called for it")
    clones: dict[int, Tensor] = {}
    ordered: list[Tensor] = []

    def clone(tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":  # a number or a mask in another form: no argument itself
            return tensor
        known = clones.get(id(tensor))
        if known is None:
            known = clones[id(tensor)] = on_meta(tensor)
        ordered.append(known)
        return known

    meta_args = _without_generators(replace_tensors(args, clone))
    meta_kwargs = _without_generators(replace_tensors(kwargs, clone))
    shapes = [tensor.shape for tensor in ordered]
    # What a record describes may go by the program's mode, as its kernel does.
    records = function is not operator and torch.is_grad_enabled()
    with torch.set_grad_enabled(records), cast(Any, kernels.OnlyCpp)():
        try:
            out = meta_kwargs.get("out")
            made_for_it = isinstance(out, Tensor) and out.numel() == 0
            if function is operator:
                result = kernels.run_on_meta(operator, *meta_args, **meta_kwargs)
            else:
                result = function(*meta_args, **meta_kwargs)
            if made_for_it and out.numel() > 1:
                _lay_out(operator, meta_args, meta_kwargs)
        except NotImplementedError as error:
            raise unsupported(operator, str(error)) from error
        except Exception as error:
            # The program gave an operator what it does not accept. Where in a ``meta`` kernel that
            # came out says nothing to who wrote the program.
            raise error.with_traceback(None) from None
    return plan_of_result(result, ordered, shapes)


def _without_generators(given: Any) -> Any:
    """Leave out generators, which no shape depends on: torch's Python functions for shapes refuse
    them (torch/_refs/__init__.py, ``exponential``).
    """
    return replace_leaves(given, torch.Generator, lambda _: None)


def _lay_out(operator: OpOverload, args: Args, kwargs: Kwargs) -> None:
    """Give an ``out`` that was made for the operator the layout that a new tensor would have.
    TensorIterator does so with a tensor it resizes (aten/src/ATen/TensorIterator.cpp,
    set_output_raw_strided); on ``meta`` it stays contiguous.
    """
    out = kwargs["out"]
    if torch.Tag.pointwise in operator.tags:
        others = {name: value for name, value in kwargs.items() if name != "out"}
        # TensorIterator weighs operands alike whose layouts disagree.
        made: Any = sum(argument_tensors((args, others)))
        if isinstance(made, Tensor) and made.shape == out.shape:
            out.as_strided_(made.shape, made.stride())


def unsupported(operator: OpOverload, reason: str) -> UnsupportedOperatorError:
    """Return the error for an operator whose outputs' geometry cannot be found."""
    first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return UnsupportedOperatorError(
        f"the output shapes of {operator.name()} are unknown: it has no kernel for "
        f"'meta' tensors ({first[:200]}). Give it one with "
        f'torch.library.register_fake("{operator.name().split(".")[0]}", function), where '
        f"function takes the operator's arguments and returns empty tensors of the right shape; "
        f"for an operator that is not yours, return an OperatorModel from the pytest hook "
        f"pytest_torchmem_register_operators"
    )


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
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
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
        ``given``. While a graph is ``captured``, every output is on the device: attention.cu, «Seed
        and Offset Device».
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
        """Return the function that a record has for the geometry of outputs on a device. Raises
        what torch raises where it has no kernel for the device.
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
    args: Args,
    kwargs: Kwargs,
    tensors: list[Tensor],
    own: Callable[..., Any] | None,
) -> Plan:
    """Return which storages a call makes and how its outputs lie on them. ``tensors`` are those
    among the arguments, ``own`` is the function that gives the geometry of this operator's outputs,
    where ``meta`` does not.
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


def geometry_of_arguments(args: Args, tensors: list[Tensor]) -> Any:
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
    return geometry_of(args, tensors)


def geometry_of(value: Any, tensors: list[Tensor]) -> Any:
    """Return what of an argument decides the outputs' geometry; tensors are appended in order.
    Raises ``SubclassAsked`` where a subclass of tensors would be asked what it says of that.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        found: list[Any] = []
        for item in value:  # often hundreds of tensors
            own = type(item)
            if own in _TENSOR_TYPES:
                tensors.append(item)
                found.append((item.shape, item.stride(), item.dtype))
            elif own in _AS_THEY_ARE:
                found.append(item)
            elif own is list and _AS_THEY_ARE.issuperset(map(type, item)):  # sizes
                found.append(tuple(item))
            else:
                found.append(geometry_of(item, tensors))
        return tuple(found)
    if kind is float or kind is bool:
        return (kind, value)
    if isinstance(value, Tensor):
        if modes.torch_function_enabled() and modes.overrides(kind):
            raise SubclassAsked
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype)
    if issubclass(kind, _Generator):
        return None
    return value
