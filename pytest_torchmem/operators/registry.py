"""One record for each operator: everything that a trace knows of it beyond its schema.

A record is made by naming the operator, and every aspect hangs on it the same way::

    native_dropout = operator("aten::native_dropout", order={"cuda": (1, 0)})

    @native_dropout.workspace("cpu")
    def mask_as_numbers(input: Tensor) -> int:
        '''The mask in the type of the input; native/Dropout.cpp, native_dropout_cpu.'''
        return dense_bytes(input)

A name without an overload (``"aten::mm"``) is that of the overload without a name. Its geometry and
its workspace are those of every overload that has none of its own.
Functions take the operator's arguments by the names of its schema (``calls.py``) and only those
that they use.

Registering the same aspect twice raises ``ValueError``. ``tests/operators/test_registry.py`` checks
every record against the operators that torch has.

A module with records is imported when an operator is met that it speaks of, by the index of
``index.json``: a model uses few of them. What users teach of operators for a run comes before the
profiler's own records.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache, partial
from importlib import import_module
from pkgutil import get_data, walk_packages
from typing import Any, NamedTuple, TypeVar

from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.torch_private.keys import OpOverload
from pytest_torchmem.torch_private.patches import is_another

PACKAGE = __name__.rpartition(".")[0]
INDEX = "index.json"
"""Beside this module; written by ``python -m benchmarks.operator_index --write``."""

BY_VERSION = frozenset({"elementwise"})
"""Modules that speak of other operators with other versions of torch, and stand in no index."""


@cache
def read_index() -> dict[str, dict[str, str]]:
    """Return the names of operators, those of ATen without namespace: what each of the ``modules``
    speaks of, and for each of the devices in ``paths`` those that have a path there.
    """
    found: dict[str, dict[str, str]] = json.loads(get_data(PACKAGE, INDEX) or b"{}")
    return found


@cache
def load() -> None:
    """Import every family."""
    for module in walk_packages(import_module(PACKAGE).__path__, f"{PACKAGE}."):
        import_module(module.name)


@cache
def _waiting() -> dict[str, tuple[str, ...]]:
    """Return the modules that speak of operators which nobody has asked for yet."""
    for module in BY_VERSION:
        import_module(f"{PACKAGE}.{module}")
    found: dict[str, tuple[str, ...]] = {}
    for module, names in read_index()["modules"].items():
        for name in aten(names):
            found[name] = (*found.get(name, ()), module)
    return found


_COLLECTIVES = "pytest_torchmem.operators.distributed.collectives"
_BY_NAMESPACE = {
    "bitsandbytes": "pytest_torchmem.operators.third_party.bitsandbytes",
    "c10d": _COLLECTIVES,
    "_c10d_functional": _COLLECTIVES,
    "_c10d_functional_autograd": _COLLECTIVES,
    "torch_attn": "pytest_torchmem.operators.attention.values",
    "torchvision": "pytest_torchmem.operators.third_party.torchvision",
    "fsdp": "pytest_torchmem.operators.distributed.fully_shard",
    "symm_mem": "pytest_torchmem.operators.distributed.symmetric_memory",
}
"""Modules by the namespace of the operators that their ``describe()`` makes records of."""


@cache
def describe_namespace(namespace: str) -> None:
    """Make the records of the operators of a package that the program has imported."""
    if namespace in _BY_NAMESPACE:
        import_module(_BY_NAMESPACE[namespace]).describe()


#: Aspects that are functions, and what each gets before the operator's arguments in their order.
LEADS: Mapping[str, tuple[str, ...]] = {
    "meta": (),
    "workspace": ("machine", "outputs"),
    "decomposition": ("machine",),
    "path": ("call",),
    "nested": ("nested",),
    "sparse": (),
    "compressed": ("machine",),
    "storages": ("outputs",),
    "at_most": (),
    "values": (),
    "flops": ("outputs",),
}


class Taught(NamedTuple):
    """Aspects of one overload on one device, by the names of ``OperatorRecord``'s fields."""

    aspects: Mapping[str, Any]

    @property
    def describes_kernel(self) -> bool:
        """Whether it describes outputs and workspace, so that no body is run."""
        return bool(set(self.aspects) - {"path", "values", "flops"})

    def speaks_of(self, *, composite: bool) -> bool:
        """Whether it can belong to this operator, a composite or one with a kernel. ``path`` is for
        the former alone, ``values`` for both, everything else for kernels.
        """
        if composite:
            return not set(self.aspects) - {"path", "values"}
        return "path" not in self.aspects


_TAUGHT: dict[tuple[OpOverload, str], Taught] = {}
_generations = [0]


def teach(overloads: Iterable[OpOverload], devices: Iterable[str], taught: Taught) -> None:
    """Let aspects come first for overloads on devices."""
    _TAUGHT.update({(overload, device): taught for device in devices for overload in overloads})
    _generations.append(len(_generations))


def forget(overloads: Iterable[OpOverload], devices: Iterable[str]) -> None:
    """Let the profiler's own records hold again."""
    for device in devices:
        for overload in overloads:
            _TAUGHT.pop((overload, device), None)
    _generations.append(len(_generations))


def taught_of(overload: OpOverload, device: str) -> Taught | None:
    return _TAUGHT.get((overload, device))


def taught_paths(device: str) -> tuple[OpOverload, ...]:
    """Return the composite operators that users taught a path on a device."""
    return tuple(
        overload
        for (overload, on), taught in _TAUGHT.items()
        if on == device and "path" in taught.aspects
    )


def generation() -> int:
    """Return a number that is another one whenever what users teach has changed."""
    return _generations[-1]


DEVICES = ("cpu", "cuda")
EVERY = ""
"""Stands for the devices that have no function of their own."""
Function = Callable[..., Any]
Functions = dict[str, Function]
"""By device: ``"cpu"``, ``"cuda"`` or ``EVERY``."""
_F = TypeVar("_F", bound=Function)


class OperatorKind(Enum):
    """What the interceptor does with an operator."""

    LEAF = "its outputs are made hollow, with the geometry it has on meta"
    DECOMPOSED = "it is decomposed into the operators it is made of"
    NATIVE = "it runs as it is: it makes no storage and reads no data"
    SCALAR = "it hands a value to Python"
    LIFT = "it brings a tensor made of Python numbers into the trace"
    RESIZE = "it changes the size of a storage"
    COMPRESSED = "it makes a compressed sparse tensor of others"
    NESTED = "it makes a nested tensor of others, or what one is made of"
    QUANTIZED = "it makes quantized tensors, which are real, or works on packed ones"
    ZERO = "it makes a tensor that is all zero and has no memory"
    PASS = "it checks data and decides nothing"


class Fills(Enum):
    """What a factory fills its output with: its values are worth knowing where they are few."""

    NUMBERS = "numbers, whatever the tensors hold that it is given, or what is there"
    ZEROS = "zeros, whatever they hold"
    STEPS = "steps between two numbers, which tensors may hold"
    RANDOM = "random numbers"


class UnknownOutputs(Enum):
    """What is assumed of an operator's outputs where what it reads is not known."""

    TRUE = "true, as it is of every finite number"
    FALSE = "false, as it is of every finite number"
    COMPARED = "what 1 compared with the other side gives; integers equal no others"
    ANY_OR_ALL = "of numbers true, of truth values what is assumed of them"
    AND = "what all of its inputs count as"
    OR = "what one of its inputs counts as"
    NOT = "the contrary of what its input counts as"
    POSITIONS = "the first of the positions that were found"
    CARRIED = "what stands for all of its inputs, which it puts elsewhere"
    IS_IN = "false: integers equal no others"
    EVEN_COUNTS = "that every bin has as many as the others"


_NONE: dict[str, Any] = {}
"""Of every record that has none by device: nobody writes to it."""


class OperatorRecord:
    """All that is known of one operator; what is ``None`` or empty follows from its schema."""

    def __init__(self, name: str) -> None:
        self.name = name  # alone: a process has many hundreds, and asks for few

    source: str = ""
    """The file and function of torch that the record follows."""
    kind: OperatorKind | None = None
    """How the interceptor treats it; ``LEAF`` for a composite operator whose body is not run."""
    meta: Functions = _NONE
    """Outputs on ``meta`` from arguments on ``meta``, where torch has none or has them wrong."""
    check: Functions = _NONE
    """Raises what kernels do of arguments that ``meta`` takes; once for a geometry and numbers."""
    check_values: Functions = _NONE
    """Raises what the kernel raises for positions of tensors that are known; asked at each call
    whose values are not all known, and so not computed; for every overload."""
    workspace: Functions = _NONE
    """The bytes that the kernel takes beyond its outputs."""
    decomposition: Functions = _NONE
    """The kernel as a sequence of operators, for kernels that call others."""
    path: Functions = _NONE
    """The operators that a composite operator is made of on a device, where they are others."""
    nested: Functions = _NONE
    """The kernel for nested tensors, where it reaches into memory."""
    sparse: Functions = _NONE
    """The kernel for sparse COO tensors, ``None`` for what is not modelled; for every overload."""
    compressed: Functions = _NONE
    """The kernel for compressed sparse tensors, where it reads their values."""
    storages: Functions = _NONE
    """Outputs on storages that are larger than they are."""
    at_most: Functions = _NONE
    """The largest outputs on ``meta`` that any values make, None where nothing says how large they
    are; for every overload. They stand for those that nobody knows, and the profile says so."""
    values: Functions = _NONE
    """What computes its outputs on the CPU, where that has no kernel of it, or has one with other
    outputs than that of a device; they are taken by position, and ``None``, which counts as zero,
    where nobody reads them."""
    unread: Functions = _NONE
    """The tensors whose values a call does not read, and need not be known; for every overload."""
    flops: Functions = _NONE
    """Floating-point operations of a call, where ``torch.utils.flop_counter`` has no formula."""
    entry_flops: Functions = _NONE
    """The same of one call with sparse tensors, which goes by how many entries they have."""
    order: dict[str, tuple[int, ...]] = _NONE
    """Positions of the outputs in the order in which the kernel makes them, if that is another one:
    it decides which blocks the caching allocator gives them."""
    takes_nothing: frozenset[str] = frozenset()
    """Devices where the kernel takes nothing beyond its outputs."""
    kernel_on: frozenset[str] = frozenset()
    """Devices that have one kernel for an operator that is composite elsewhere."""
    not_on: frozenset[str] = frozenset()
    """Devices that torch has no kernel for."""
    host_outputs: Mapping[str, tuple[int, ...]] = _NONE
    """Positions of outputs that the kernel for a device makes on the host."""
    across_devices: bool = False
    """Whether its tensors may be on several devices."""
    masks: bool = False
    """Whether its indices may be boolean masks, which stand for as many rows as are true."""
    data_dependent: bool = False
    """Whether the shape of its outputs depends on data, although torch does not tag it so."""
    decided_by: tuple[int, ...] | None = None
    """Positions of the tensors whose values decide the outputs' shape; ``None``: all of them."""
    size_argument: str = ""
    """The argument by which a program may say how large outputs are that depend on data."""
    size_is_least: bool = False
    """Whether they may be larger than that: they are taken not to be."""
    library_output: int | None = None
    """Position of the output whose size a library alone decides."""
    library_state: bool = False
    """Whether its one output is a state that a library keeps, of a size that it alone decides."""
    not_in_key: tuple[str, ...] = ()
    """Arguments that a calibration key leaves out: they decide nothing, or follow from others."""
    also_writes: tuple[str, ...] = ()
    """Arguments that it writes to although its schema does not say so."""
    keeps_values: tuple[str, ...] = ()
    """Arguments that it writes to and whose known values stay."""
    resizes_by_count: bool = False
    """Whether an ``out=`` of as many elements keeps its shape; native/RangeFactories.cpp."""
    unknown_outputs: UnknownOutputs | None = None
    """What its outputs count as where what it reads is not known."""
    refuses_types: bool = False
    """Whether every device's kernel refuses types, numbers and dimensions, of few elements too."""
    refuses_values: bool = False
    """Whether kernels for every device refuse some values; for every overload."""
    fills: Fills | None = None
    """What it fills its output with, if it is a factory; for every overload."""
    of_host: str = ""
    """The last of its tensors, if that has to be on the CPU wherever the others are."""
    elsewhere: str = ""
    """What torch says where that tensor is on another ``device``."""
    overwrites: bool = False
    """Whether what it writes to needs no value before; for every overload."""
    other_dtype: bool = False
    """Whether, pointwise, it answers floating tensors in another dtype; for every overload."""
    saves_number: bool = False
    """Whether the node of its gradient saves a Python number that it is given, in place."""
    sparse_metadata: bool = False
    """Whether it only takes a sparse COO tensor apart, and reads no data; for every overload."""
    sparse_by_operators: bool = False
    """Whether its kernel for COO tensors reads no data itself; for every overload."""
    compressed_by_operators: bool = False
    """Whether its kernel for compressed tensors reads no values itself; for every overload."""
    asks_cusparse: bool = False
    """Whether cuSPARSE decides what it takes of compressed tensors on CUDA."""
    holds: Mapping[str, Kind] = _NONE
    """What the storages of an argument turn out to be by its being called with them."""
    also_by: Callable[[Iterable[Any]], Any] | None = None
    """Returns what decides about its outputs beside the geometry of its arguments."""
    copies_across: bool = False
    """Whether it copies between host and GPU, by temporaries where the ends do not fit."""
    waits: bool = False
    """Whether it waits for the collective that makes the tensor that it is given."""
    work_holds: frozenset[str] = frozenset()
    """Devices where its work holds what it was given until one of its outputs is waited for."""


_RECORDS: dict[str, OperatorRecord] = {}
DESCRIBED: dict[str, dict[str, None]] = {}
"""The operators that each module speaks of, for the index of families."""

_KINDS = OperatorRecord.__annotations__
ASPECTS = frozenset(aspect for aspect, kind in _KINDS.items() if kind == Functions)
"""The fields of a record that are functions by device."""
SHARED = ASPECTS - {"decomposition", "path", "nested", "compressed", "values", "storages"}
"""Those that are also an overload's that has none of its own."""


class Operators(NamedTuple):
    """Operators that are described together: an aspect of theirs is registered for all of them, on
    the devices that are named, or else on both.
    """

    names: tuple[str, ...]

    def __getattr__(self, aspect: str) -> Callable[..., Callable[[_F], _F]]:
        """Return what registers a function of an aspect: ``operator(...).workspace("cuda")``."""
        if aspect not in ASPECTS:
            raise AttributeError(aspect)
        return partial(self._register, aspect)

    def _register(self, aspect: str, *devices: str) -> Callable[[_F], _F]:
        def register(function: _F) -> _F:
            for name in self.names:
                record = record_of(name)
                functions = getattr(record, aspect)
                for device in devices or (EVERY,):
                    if is_another(functions.get(device), function):
                        where = device or "every device"
                        raise ValueError(f"{name} has another {aspect} on {where} already")
                    functions = {**functions, device: function}
                setattr(record, aspect, functions)
            return function

        return register


def aten(names: str, suffix: str = "") -> list[str]:
    """Return the full names of operators, ATen's if no other namespace, each with ``suffix``."""
    return [f"{name if '::' in name else f'aten::{name}'}{suffix}" for name in names.split()]


def operator(*names: str, **aspects: Any) -> Operators:
    """Describe operators, of which a text may name several, as ``aten`` does: ``aspects`` are
    fields of ``OperatorRecord``. Raises ``ValueError`` for an aspect that one of them has already
    with another value.
    """
    module = sys._getframe(1).f_globals["__name__"]
    names = tuple(name for text in names for name in aten(text))
    DESCRIBED.setdefault(module, {}).update(dict.fromkeys(names))
    for name in names:
        record = record_of(name)
        for aspect, value in aspects.items():
            before = getattr(record, aspect)
            again = callable(before) and not is_another(before, value)
            if isinstance(value, dict) and isinstance(before, dict):
                twice = [key for key in value if key in before and before[key] != value[key]]
                if twice:
                    raise ValueError(f"{name} has another {aspect} on {twice[0]} already")
                setattr(record, aspect, {**before, **value})
            elif isinstance(value, frozenset) and isinstance(before, frozenset):
                setattr(record, aspect, before | value)
            elif again or before == value or before in (None, "", False, ()):
                setattr(record, aspect, value)
            else:
                raise ValueError(f"{name} has another {aspect} already: {before!r}")
    return Operators(names)


def record_of(name: str) -> OperatorRecord:
    """Return the record of an operator or overload, made at its first use."""
    record = _RECORDS.get(name)
    if record is None:
        record = _RECORDS[name] = OperatorRecord(name)
    return record


def find_record(name: str) -> OperatorRecord:
    """Return the record of an operator or overload, whose families are imported: one that says
    nothing if they have none.
    """
    waiting = _waiting()
    for module in waiting.get(name, ()):
        import_module(f"{PACKAGE}.{module}")
    waiting.pop(name, None)
    return _RECORDS.get(name) or OperatorRecord(name)


def records() -> Mapping[str, OperatorRecord]:
    """Return every record by name, as far as families have been imported."""
    return _RECORDS
