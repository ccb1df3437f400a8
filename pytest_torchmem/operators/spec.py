"""What a trace has to know of one overload: its schema and tags, and its record, read once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch

from pytest_torchmem.operators.calls import Binding, Bound, InOrder
from pytest_torchmem.operators.families import describe_namespace
from pytest_torchmem.operators.overlay import LEADS, taught_of
from pytest_torchmem.operators.registry import (
    DEVICES,
    EVERY,
    Fills,
    OperatorKind,
    OperatorRecord,
    UnknownOutputs,
    aten,
    find_record,
)
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.dispatch.operators import (
    OpOverload,
    composite_key,
    has_kernel,
    is_composite_implicit,
    is_opaque,
    is_triton_operator,
    schema,
    takes_numbers,
    undescribed_in_python,
)


def _aspect(name: str, shared: bool = False) -> cached_property[Bound | None]:
    """An aspect of an overload; one that is ``shared`` is also that of overloads without one."""
    return cached_property(lambda on: on._bound(name, shared))


class OnDevice:
    """The aspects of one overload that are others on each device, bound to its arguments;
    ``OperatorRecord`` says what each of them is.

    What users taught comes first, then the record of the overload, then that of all overloads.
    """

    def __init__(self, overload: OpOverload, device: str) -> None:
        self._overload = overload
        self._device = device
        self._name = str(overload.name())
        self.taught = taught_of(overload, device)

    @cached_property
    def meta(self) -> Callable[..., Any] | None:
        """The function for the geometry of the outputs, called as the operator is."""
        binding = self._bound("meta", shared=True)
        return None if binding is None else lambda *args, **kwargs: binding(args, kwargs)

    check = _aspect("check", shared=True)
    check_values = _aspect("check_values", shared=True)
    workspace = _aspect("workspace", shared=True)
    decomposition = _aspect("decomposition")
    path = _aspect("path")
    nested = _aspect("nested")
    sparse = _aspect("sparse", shared=True)
    compressed = _aspect("compressed")
    values = _aspect("values")
    flops = _aspect("flops", shared=True)
    entry_flops = _aspect("entry_flops", shared=True)
    at_most = _aspect("at_most", shared=True)
    storages = _aspect("storages")

    @cached_property
    def python_kernel(self) -> Any:
        """The key of its kernel, where that is a function in Python that nobody described."""
        return (
            None if self.taught is not None else undescribed_in_python(self._overload, self._device)
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Positions of the outputs in the order in which the kernel makes them."""
        return self._value("order")

    @cached_property
    def host_outputs(self) -> tuple[int, ...]:
        """Positions of outputs that the kernel makes on the host."""
        return self._value("host_outputs")

    @cached_property
    def is_missing(self) -> bool:
        """Whether torch has no kernel of it for this device."""
        record = find_record(self._name)
        return record is not None and self._device in record.not_on

    def _bound(self, aspect: str, shared: bool = False) -> Bound | None:
        taught = self.taught
        if taught is not None and aspect in taught.aspects:
            return InOrder(taught.aspects[aspect], self._overload, LEADS[aspect])
        names = (self._name, self._name.partition(".")[0]) if shared else (self._name,)
        for device in (self._device, EVERY):
            for name in names:
                record = find_record(name)
                function = getattr(record, aspect).get(device) if record is not None else None
                if function is not None:
                    return Binding(function, self._overload)
        return None

    def _value(self, aspect: str) -> tuple[int, ...]:
        if self.taught is not None and aspect in self.taught.aspects:
            found: tuple[int, ...] = self.taught.aspects[aspect]
            return found
        record = find_record(self._name)
        return getattr(record, aspect).get(self._device, ()) if record is not None else ()


@dataclass(slots=True, eq=False)
class OperatorSpec:
    """What a trace has to know of one overload."""

    overload: OpOverload
    name: str
    kind: OperatorKind
    record: OperatorRecord
    shared: OperatorRecord
    """What is known of all of the operator's overloads."""
    cpu: OnDevice
    cuda: OnDevice
    composite: bool
    """Whether its body is a sequence of other operators, to be run for what it allocates."""
    opaque: bool
    """Whether its kernel is not run for values: a user's own, described without it, or c10d's."""
    dynamic: bool
    """Whether the shape of its outputs depends on data."""
    random: bool
    masks: bool
    tensors: tuple[int, ...]
    """Positions of the arguments that are always tensors."""
    argument_names: tuple[str, ...]
    mutated: tuple[int, ...]
    """Positions of the arguments it writes to."""
    mutated_names: tuple[str, ...]
    """Keyword-only arguments it writes to (``out=``)."""
    functional: bool
    """Whether it is a collective that returns its outputs (c10d/Functional.cpp)."""
    broadcasts: bool
    """Whether it is such a one that sends what one process has."""
    takes_device: bool
    """Whether it has a ``device`` argument."""
    makes_work: bool
    """Whether it returns what a collective is waited for by."""
    leaves_work: bool
    """Whether it is a collective that has begun when it returns, and makes what is waited for."""
    holds: tuple[tuple[int, str, Kind], ...]
    """Positions and names of arguments, and what their storages turn out to be by this call."""
    keeps_geometry: bool
    """Whether it is pointwise and makes one tensor, in the dtype of its floating arguments."""
    ignores_values: bool
    """Whether it is given tensors for their shape and type, and fills its output otherwise."""
    needs_values: bool
    """Whether nothing is to be known of its outputs unless its arguments' values are."""
    changes_values: bool
    """Whether something is to be noted of values also where they are not known."""
    checks_values: bool
    """Whether its kernel refuses positions, which may be known where other values are not."""
    reads_conjugates: bool
    """Whether its kernel is given conjugates as they are, and decides itself which it copies; for
    others the dispatcher makes them before (ATen/ConjugateFallback.cpp)."""
    makes_empty: bool = field(init=False)
    """Whether nobody has written to what it makes."""
    copies_whole: bool = field(init=False)
    """Whether it makes a copy of a tensor, also of one that nobody has written to."""
    is_plain: bool = field(init=False)
    """Whether it makes new tensors, where its tensors are, and does nothing else."""
    reads_in_place: bool = field(init=False)
    """Whether the CPU's kernel may be given a trace's own tensors, where their storages show what
    they hold: it computes with them as they are, and resizes none."""

    def __post_init__(self) -> None:
        self.reads_in_place = not (
            self.random or self.functional or self.opaque or self.mutated_names or self.dynamic
        )
        self.makes_empty = self.name.startswith(_EMPTY)
        self.copies_whole = self.name in _COPIES
        self.is_plain = self.needs_values and not (
            self.mutated
            or self.mutated_names
            or self.record.also_writes
            or self.record.copies_across
            or self.holds
            or self.dynamic
            or self.masks
            or self.makes_work
            or self.leaves_work
            or self.takes_device
            or self.record.asks_grad_mode
        )

    @classmethod
    def read(cls, overload: OpOverload) -> "OperatorSpec":
        """Return what is to be known of ``overload``, from its schema."""
        describe_namespace(overload.namespace)
        name = str(overload.name())
        record = find_record(name) or OperatorRecord(name)
        for device in DEVICES:
            taught = taught_of(overload, device)
            if taught is not None:
                record = replace(record, **taught.of_the_overload())
        family = name.partition(".")[0]
        shared = find_record(family) or OperatorRecord(family)
        arguments = schema(overload).arguments
        collective = overload.namespace in COLLECTIVES
        functional = overload.namespace == FUNCTIONAL
        broadcasts = functional and name.startswith(_BROADCASTS)
        written = [
            (position, argument)
            for position, argument in enumerate(arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (collective and _is_received(name, str(argument.name)))
        ]
        tags = overload.tags
        # A collective is not run on known values either: other processes would have to be there.
        opaque = collective or is_opaque(overload)
        ignores_values = shared.fills in (Fills.NUMBERS, Fills.ZEROS) and any(
            str(argument.type) == "Tensor" and position not in dict(written)
            for position, argument in enumerate(arguments)
        )
        return cls(
            overload=overload,
            name=name,
            kind=record.kind or _kind_of(overload, name),
            record=record,
            shared=shared,
            cpu=OnDevice(overload, "cpu"),
            cuda=OnDevice(overload, "cuda"),
            composite=composite_key(overload) is not None
            and record.kind is not OperatorKind.LEAF
            and (not opaque or is_triton_operator(overload)),
            opaque=opaque,
            dynamic=record.data_dependent or (not record.masks and _depends_on_data(overload)),
            random=torch.Tag.nondeterministic_seeded in tags,
            masks=record.masks,
            tensors=tuple(
                position
                for position, argument in enumerate(arguments)
                if not argument.kwarg_only and str(argument.type) == "Tensor"
            ),
            argument_names=tuple(str(argument.name) for argument in arguments),
            mutated=tuple(position for position, argument in written if not argument.kwarg_only),
            mutated_names=tuple(argument.name for _, argument in written if argument.kwarg_only),
            makes_work=collective
            and any(str(one.type).endswith(".c10d.Work") for one in schema(overload).returns),
            leaves_work=functional and record.kind is not OperatorKind.NATIVE,
            holds=tuple(
                (position, argument.name, record.holds[argument.name])
                for position, argument in enumerate(arguments)
                if argument.name in record.holds
            ),
            functional=functional,
            broadcasts=broadcasts,
            takes_device=any(argument.name == "device" for argument in arguments),
            keeps_geometry=torch.Tag.pointwise in tags
            and not (written or shared.other_dtype)
            and [str(output.type) for output in schema(overload).returns] == ["Tensor"],
            needs_values=not (
                overload.namespace == "c10d"
                or broadcasts
                or torch.Tag.nondeterministic_seeded in tags
                or record.unknown_outputs is UnknownOutputs.EVEN_COUNTS
                or ignores_values
            ),
            ignores_values=ignores_values,
            changes_values=bool(record.unknown_outputs or written or record.also_writes),
            checks_values=bool(record.check_values or shared.check_values),
            reads_conjugates=bool(shared.workspace) and has_kernel(name, "Conjugate"),
        )

    def device_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the device that a call names, or None; ``prims::device_put`` takes it in order."""
        if "device" in kwargs or not self.takes_device:
            return kwargs.get("device")
        place = self.argument_names.index("device")
        return args[place] if place < len(args) else None

    def placed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call that makes its tensors on ``device``, if it takes one."""
        if not self.takes_device:
            return args, kwargs
        place = self.argument_names.index("device")
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if place < len(args):
            return (*args[:place], device, *args[place + 1 :]), kwargs
        return args, {**kwargs, "device": device}

    def values_on(self, device: str) -> Callable[..., Any] | None:
        """Return what computes the outputs of a device's kernel on the CPU, which has none such.

        What a user taught for one device is the same on both.
        """
        own, other = (self.cuda, self.cpu) if device == "cuda" else (self.cpu, self.cuda)
        return own.values or (other.values if other.taught is not None else None)

    @property
    def flops(self) -> Bound | None:
        """The function for the floating-point operations of a call.

        It is the same on every device, but may have been taught for one.
        """
        return self.cpu.flops or self.cuda.flops

    def on(self, device: str) -> OnDevice:
        """Return what is known of the kernel for ``"cpu"`` or ``"cuda"``."""
        return self.cuda if device == "cuda" else self.cpu

    def one_kernel_on(self, device: str) -> bool:
        """Return whether a device has one kernel for an operator that is composite elsewhere."""
        # CUDA has kernels for lists of tensors (ATen/native/cuda/ForeachBinaryOpList.cu, …), the
        # CPU a loop over them (ATen/native/ForeachOpsKernels.cpp).
        return device in self.record.kernel_on or (
            device == "cuda" and self.name.startswith(("aten::_foreach_", "aten::_fused_"))
        )

    def numbers(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of Python numbers that C++ wrapped in tensors of no dimension.

        A fallback gets the number where C++ made such a tensor of one.
        """
        found = [
            position
            for position in self.tensors
            if position < len(args) and isinstance(args[position], (bool, int, float, complex))
        ]
        return tuple(found)

    def with_numbers_as_tensors(self, args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
        """Return arguments that can be handed to the operator from Python.

        Only some operators take a number back where they want a tensor
        (torch/csrc/utils/python_arg_parser.cpp, should_allow_numbers_as_tensors). The tensor's
        dtype is the one that leaves the result's dtype as it is with a wrapped number.
        """
        positions = self.numbers(args)
        if not positions:
            return args
        first = next((item for item in args if isinstance(item, torch.Tensor)), None)
        converted = list(args)
        for position in positions:
            dtype = _dtype_beside(first, args[position])
            exact = (
                torch.float64 if dtype is not None and isinstance(args[position], float) else None
            )
            made = torch.full((), args[position], dtype=exact, device=device)
            # Not of that type from the beginning, which refuses what wraps around: ``int8 + 300``.
            converted[position] = made if dtype is None else made.to(dtype)
        return tuple(converted)

    def with_exact_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the same for an operator that is computed, with numbers as exact as C++ has them.

        Kernels in reduced precision compute with the number itself, and not with what the dtype
        beside it makes of it (``original_scalar_value`` in aten/src/ATen/TensorIterator.h).
        """
        positions = self.numbers(args)
        if not positions or takes_numbers(self.overload.overloadpacket.__name__):
            return args
        first = next((item for item in args if isinstance(item, torch.Tensor)), None)
        converted = list(self.with_numbers_as_tensors(args, "cpu"))
        if first is not None and first.dim() and first.dtype.is_floating_point:
            for position in positions:
                if isinstance(args[position], float):
                    converted[position] = torch.full((), args[position], dtype=torch.float64)
        return tuple(converted)

    def held(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[torch.Tensor, Kind]]:
        """Return tensors of this call with what their storages turn out to be."""
        return [
            (tensor, kind)
            for position, name, kind in self.holds
            for tensor in argument_tensors(
                args[position] if position < len(args) else kwargs.get(name)
            )
        ]

    def only_writes(self, args: tuple[Any, ...]) -> bool:
        """Return whether this call reads nothing of what it writes to, whole or in part."""
        if self.mutated_names or self.shared.overwrites:
            return True
        family, _, overload = self.name.partition(".")
        accumulates = any(one is True for one in args[3:4])
        return family in _ONLY_WRITES and "reduce" not in overload and not accumulates

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that this call writes to."""
        return [args[position] for position in self.mutated if position < len(args)] + [
            kwargs[name] for name in self.mutated_names if name in kwargs
        ]


def _dtype_beside(tensor: torch.Tensor | None, number: complex) -> torch.dtype | None:
    if tensor is None or isinstance(number, bool) or tensor.dtype is torch.bool:
        return None
    if isinstance(number, complex):
        return tensor.dtype if tensor.is_complex() else None
    integral = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return None if isinstance(number, float) and integral else tensor.dtype


#: What makes storages that nobody has written to.
_EMPTY = ("aten::empty", "aten::new_empty", "prims::empty", "_quantized::empty")
_COPIES = ("aten::clone", "aten::_to_copy")
_ONLY_WRITES = frozenset(
    aten("""
        bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ index_copy_
        index_fill_ index_put_ _index_put_impl_ masked_fill_ masked_scatter_ put_ scatter_
        fill_diagonal_ _foreach_copy_ _foreach_zero_
    """)
)
"""Operators in place beside those that overwrite all: their results need no value from before."""

FUNCTIONAL = "_c10d_functional"
"""The namespace of collectives that return their outputs; c10d/Functional.cpp."""
_BROADCASTS = "_c10d_functional::broadcast"
COLLECTIVES = frozenset({"c10d", FUNCTIONAL, "_c10d_functional_autograd"})
"""Namespaces of operators that need other processes."""


def _is_received(name: str, argument: str) -> bool:
    """Return whether a collective writes what is not this process's own value to an argument.

    Their schemas (torch/csrc/distributed/c10d/Ops.cpp) do not say. What ``broadcast_`` and the
    reductions in place write to keeps what is known of it, as if this process were the only one.
    """
    return argument.startswith("output") or name.startswith("c10d::recv")


@cache
def spec_of(overload: OpOverload) -> OperatorSpec:
    """Return what is to be known of ``overload``."""
    return OperatorSpec.read(overload)


#: Operators on quantized tensors and on weights that they have packed for themselves.
_QUANTIZED = frozenset({"quantized", "_quantized"})


def _depends_on_data(overload: OpOverload) -> bool:
    """Return whether torch says that values decide the shapes of what an operator returns."""
    tags = overload.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _kind_of(overload: OpOverload, name: str) -> OperatorKind:
    if is_composite_implicit(overload):
        return OperatorKind.DECOMPOSED
    if overload.is_view and not name.startswith("aten::_unsafe"):
        return OperatorKind.NATIVE
    if torch.Tag.inplace_view in overload.tags:  # ``transpose_`` changes no more than metadata
        return OperatorKind.NATIVE
    if "Tensor" not in str(schema(overload)):  # marks for a profiler, arithmetic on shapes
        return OperatorKind.NATIVE
    if overload.namespace in _QUANTIZED:
        return OperatorKind.QUANTIZED
    return OperatorKind.LEAF
