"""What a trace has to know of one overload: its schema and tags, and its record, read once."""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, cached_property
from typing import Any

import torch

from pytest_torchmem.operators import registry
from pytest_torchmem.operators.calls import Binding, Bound, InOrder
from pytest_torchmem.operators.registry import OperatorKind, aten, find_record, taught_of
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private import keys


def _positions(name: str) -> cached_property[tuple[int, ...]]:
    return cached_property(lambda on: on._value(name))


class OnDevice:
    """The aspects of one overload that are others on each device, bound to its arguments;
    ``OperatorRecord`` says what each of them is.

    What users taught comes first, then the record of the overload, then that of all overloads.
    """

    def __init__(self, overload: keys.OpOverload, device: str) -> None:
        self._overload = overload
        self._device = device
        self._name = str(overload.name())
        self.taught = taught_of(overload, device)

    @cached_property
    def meta(self) -> Callable[..., Any] | None:
        """The function for the geometry of the outputs, called as the operator is."""
        binding = self._bound("meta")
        return None if binding is None else lambda *args, **kwargs: binding(args, kwargs)

    def __getattr__(self, aspect: str) -> Bound | None:
        """Return another aspect that is a function."""
        if aspect not in registry.ASPECTS:
            raise AttributeError(aspect)
        self.__dict__[aspect] = found = self._bound(aspect)
        return found

    @cached_property
    def python_kernel(self) -> Any:
        """The key of its kernel, where that is a function in Python that nobody described."""
        if self.taught is not None:
            return None
        return keys.undescribed_in_python(self._overload, self._device)

    order, host_outputs = _positions("order"), _positions("host_outputs")

    @cached_property
    def is_missing(self) -> bool:
        """Whether torch has no kernel of it for this device."""
        return self._device in find_record(self._name).not_on

    def _bound(self, aspect: str) -> Bound | None:
        taught = self.taught
        if taught is not None and aspect in taught.aspects:
            return InOrder(taught.aspects[aspect], self._overload, registry.LEADS[aspect])
        names = [self._name, *([self._name.partition(".")[0]] if aspect in registry.SHARED else [])]
        for device in (self._device, registry.EVERY):
            for name in names:
                function = getattr(find_record(name), aspect).get(device)
                if function is not None:
                    return Binding(function, self._overload)
        return None

    def _value(self, aspect: str) -> tuple[int, ...]:
        of_record = getattr(find_record(self._name), aspect).get(self._device, ())
        taught = {} if self.taught is None else self.taught.aspects
        found: tuple[int, ...] = taught.get(aspect, of_record)
        return found


class OperatorSpec:
    """What a trace has to know of one overload."""

    def __init__(self, overload: keys.OpOverload) -> None:
        registry.describe_namespace(overload.namespace)
        name = str(overload.name())
        record = find_record(name)
        for device in registry.DEVICES:
            taught = taught_of(overload, device)
            if taught is not None:
                apart = {*registry.LEADS, "order", "host_outputs", "takes_nothing"}
                same = {name: one for name, one in taught.aspects.items() if name not in apart}
                record = copy(record)
                vars(record).update(same)
        family = name.partition(".")[0]
        self.overload, self.name, self.record = overload, name, record
        self.shared = find_record(family)
        """What is known of all of the operator's overloads."""
        self.kind = record.kind or _kind_of(overload, name)
        self.cpu, self.cuda = OnDevice(overload, "cpu"), OnDevice(overload, "cuda")
        collective = overload.namespace in COLLECTIVES
        # A collective is not run on known values either: other processes would have to be there.
        self.opaque = collective or keys.is_opaque(overload)
        """Whether its kernel is not run for values: a user's, described without it, or c10d's."""
        self.composite = (
            keys.composite_key(overload) is not None
            and record.kind is not OperatorKind.LEAF
            and (not self.opaque or keys.is_triton_operator(overload))
        )
        """Whether its body is a sequence of other operators, to be run for what it allocates."""
        bodies = self.cpu.decomposition, self.cuda.decomposition
        self.has_body = self.composite or bodies != (None, None)
        """Whether other operators are run for it, which autocast may lower."""
        self.masks = record.masks
        by_data = not _BY_DATA.isdisjoint(overload.tags)
        self.dynamic = record.data_dependent or (not record.masks and by_data)
        """Whether the shape of its outputs depends on data."""
        self.functional = overload.namespace == FUNCTIONAL
        """Whether it is a collective that returns its outputs (c10d/Functional.cpp)."""
        self.broadcasts = self.functional and name.startswith(_BROADCASTS)
        """Whether it is such a one that sends what one process has."""
        self.makes_work = collective and any(
            str(one.type).endswith(".c10d.Work") for one in keys.schema(overload).returns
        )
        """Whether it returns what a collective is waited for by."""
        self.leaves_work = self.functional and record.kind is not OperatorKind.NATIVE
        """Whether it is a collective that has begun when it returns, and makes what is awaited."""
        self.reads_conjugates = bool(self.shared.workspace) and keys.has_kernel(name, "Conjugate")
        """Whether its kernel is given conjugates as they are, and decides itself which it copies;
        for others the dispatcher makes them before (ATen/ConjugateFallback.cpp)."""
        self.makes_empty = name.startswith(_EMPTY)
        """Whether nobody has written to what it makes."""
        self.copies_whole = name in _COPIES
        """Whether it makes a copy of a tensor, also of one that nobody has written to."""
        self._read_arguments(collective)

    def _read_arguments(self, collective: bool) -> None:
        overload, record, shared, name = self.overload, self.record, self.shared, self.name
        arguments, tags = list(enumerate(keys.schema(overload).arguments)), overload.tags
        written = {
            position: argument
            for position, argument in arguments
            if (argument.alias_info is not None and argument.alias_info.is_write)
            # The schemas of collectives (torch/csrc/distributed/c10d/Ops.cpp) do not say that what
            # they write is not this process's own. What ``broadcast_`` and the reductions in place
            # write to keeps what is known of it, as if this process were the only one.
            or (collective and str(argument.name).startswith("output"))
            or (collective and name.startswith("c10d::recv"))
        }
        of_tensors = [(at, one) for at, one in arguments if str(one.type) == "Tensor"]
        self.argument_names = tuple(str(argument.name) for _, argument in arguments)
        self.tensors = tuple(at for at, one in of_tensors if not one.kwarg_only)
        """Positions of the arguments that are always tensors."""
        self.mutated = tuple(at for at, one in written.items() if not one.kwarg_only)
        """Positions of the arguments it writes to."""
        self.mutated_names = tuple(one.name for one in written.values() if one.kwarg_only)
        """Keyword-only arguments it writes to (``out=``)."""
        self.holds = tuple(
            (at, one.name, record.holds[one.name])
            for at, one in arguments
            if one.name in record.holds
        )
        """Positions and names of arguments, and what their storages turn out to be by this call."""
        self.takes_device = "device" in self.argument_names
        self.random = torch.Tag.nondeterministic_seeded in tags
        fills = self.makes_empty or shared.fills in (registry.Fills.NUMBERS, registry.Fills.ZEROS)
        self.ignores_values = fills and any(at not in written for at, _ in of_tensors)
        """Whether it is given tensors for their shape and type, and fills its output otherwise."""
        self.keeps_geometry = (
            torch.Tag.pointwise in tags
            and not (written or shared.other_dtype)
            and [str(output.type) for output in keys.schema(overload).returns] == ["Tensor"]
        )
        """Whether it is pointwise and makes one tensor, in the dtype of its floating arguments."""
        even = record.unknown_outputs is registry.UnknownOutputs.EVEN_COUNTS
        of_others = overload.namespace == "c10d" or self.broadcasts
        self.needs_values = not (of_others or self.random or even or self.ignores_values)
        """Whether nothing is to be known of its outputs unless its arguments' values are."""
        self.writes = bool(written or record.also_writes)
        self.changes_values = bool(record.unknown_outputs or self.writes)
        """Whether something is to be noted of values also where they are not known."""
        self.checks_values = bool(record.check_values or shared.check_values)
        """Whether its kernel refuses positions, which may be known where other values are not."""
        changes = self.writes or self.holds
        elsewhere = self.takes_device or record.copies_across or record.also_by
        waits = self.makes_work or self.leaves_work
        self.is_plain = self.needs_values and not (
            changes or elsewhere or waits or self.dynamic or self.masks
        )
        """Whether it makes new tensors, where its tensors are, and does nothing else."""
        unlike = self.random or self.functional or self.opaque or self.dynamic
        self.reads_in_place = not (unlike or self.mutated_names)
        """Whether the CPU's kernel may be given a trace's own tensors, where their storages show
        what they hold: it computes with them as they are, and resizes none."""
        self.reads_real = self.reads_in_place and not self.writes and overload.namespace == "aten"
        """Whether it may be given the program's real tensors: it writes to no argument."""

    def of_kind(self, kind: OperatorKind, *, opaque: bool = False) -> "OperatorSpec":
        """Return the same treated as another kind; of an ``opaque`` one no body is run."""
        made = copy(self)
        made.kind = kind
        if opaque:
            made.composite, made.opaque, made.reads_in_place = False, True, False
        return made

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
        """Return the positions of Python numbers that C++ wrapped in tensors of no dimension. A
        fallback gets the number where C++ made such a tensor of one.
        """
        given = (position for position in self.tensors if position < len(args))
        return tuple(one for one in given if isinstance(args[one], (bool, int, float, complex)))

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
            number, dtype = args[position], _dtype_beside(first, args[position])
            exact = torch.float64 if dtype is not None and isinstance(number, float) else None
            made = torch.full((), number, dtype=exact, device=device)
            # Not of that type from the beginning, which refuses what wraps around: ``int8 + 300``.
            converted[position] = made if dtype is None else made.to(dtype)
        return tuple(converted)

    def with_exact_numbers(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the same for an operator that is computed, with numbers as exact as C++ has them.

        Kernels in reduced precision compute with the number itself, and not with what the dtype
        beside it makes of it (``original_scalar_value`` in aten/src/ATen/TensorIterator.h).
        """
        positions = self.numbers(args)
        if not positions or keys.takes_numbers(self.overload.overloadpacket.__name__):
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
        return [args[position] for position in self.mutated if position < len(args)] + [
            kwargs[name] for name in self.mutated_names if name in kwargs
        ]

    def all_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return those, and what it writes to although its schema does not say so.

        Batch norms do in training (native/Normalization.cpp, ``batch_norm_cpu_update_stats``).
        """
        written, names = self.written(args, kwargs), self.argument_names
        if self.record.also_writes and (
            "training" not in names or args[names.index("training")] is not False
        ):
            places = map(names.index, self.record.also_writes)
            written += [args[place] for place in places if place < len(args)]
        return written


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
DRAWS_INTO = frozenset(
    aten("bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_")
)
_ONLY_WRITES = DRAWS_INTO.union(
    aten("""
        index_copy_ index_fill_ index_put_ _index_put_impl_ masked_fill_ masked_scatter_ put_
        scatter_ fill_diagonal_ _foreach_copy_ _foreach_zero_ rrelu_with_noise rrelu_with_noise_
    """)
)
"""Operators in place beside those that overwrite all: their results need no value from before."""

FUNCTIONAL = "_c10d_functional"
"""The namespace of collectives that return their outputs; c10d/Functional.cpp."""
_BROADCASTS = "_c10d_functional::broadcast"
COLLECTIVES = frozenset({"c10d", FUNCTIONAL, "_c10d_functional_autograd"})
"""Namespaces of operators that need other processes."""


@cache
def spec_of(overload: keys.OpOverload) -> OperatorSpec:
    """Return what is to be known of ``overload``."""
    return OperatorSpec(overload)


#: Operators on quantized tensors and on weights that they have packed for themselves.
_QUANTIZED = frozenset({"quantized", "_quantized"})
#: How torch says that values decide the shapes of what an operator returns.
_BY_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _kind_of(overload: keys.OpOverload, name: str) -> OperatorKind:
    if keys.is_composite_implicit(overload):
        return OperatorKind.DECOMPOSED
    if overload.is_view and not name.startswith("aten::_unsafe"):
        return OperatorKind.NATIVE
    if torch.Tag.inplace_view in overload.tags:  # ``transpose_`` changes no more than metadata
        return OperatorKind.NATIVE
    if "Tensor" not in str(keys.schema(overload)):  # marks for a profiler, arithmetic on shapes
        return OperatorKind.NATIVE
    if overload.namespace in _QUANTIZED:
        return OperatorKind.QUANTIZED
    return OperatorKind.LEAF
