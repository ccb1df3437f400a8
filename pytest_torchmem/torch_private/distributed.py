"""Process groups of a world of which one process is there: torch's fake ones stand for all.

And what ``DTensor`` and ``fully_shard`` keep: of meshes and operators, of arguments and a step.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.futures import Future

from pytest_torchmem.torch_private.keys import schema
from pytest_torchmem.torch_private.names import (
    listed,
    optional,
    private_if_imported,
    private_name_if_imported,
)
from pytest_torchmem.torch_private.patches import ABSENT, Additions, LookedAt, Replacements, unless

_C10D = "torch.distributed.distributed_c10d"
_process_group = private_if_imported("torch._C._distributed_c10d.ProcessGroup")
_find_group = private_if_imported("torch.distributed.distributed_c10d._resolve_process_group")
_fake_group = private_if_imported("torch._C._distributed_c10d.FakeProcessGroup")
_CREATE = private_name_if_imported("torch._C._distributed_c10d.FakeProcessGroup._create_internal")
_is_built = private_if_imported(f"{_C10D}._NCCL_AVAILABLE")
_DEFAULT = private_name_if_imported(f"{_C10D}._World.default_pg")
_register = private_if_imported("torch._C._distributed_c10d._register_process_group")
_unregister = private_if_imported("torch._C._distributed_c10d._unregister_process_group")
_state = private_if_imported(f"{_C10D}._world")
_work_of = private_if_imported("torch._C._distributed_c10d._create_work_from_future")
_work = private_if_imported("torch._C._distributed_c10d.Work")
_SOURCE = private_name_if_imported("torch._C._distributed_c10d.Work._source_rank")
_NCCL = {
    "ProcessGroupNCCL": None,
    "ProcessGroupNCCL2": "_create_nccl2_process_group",
    "ProcessGroupNCCLLazy": "_create_nccl_lazy_process_group",
}
"""What stands for NCCL, and the functions that make one where not every torch has it (since 2.15
"nccl" is ``ProcessGroupNCCL2``: distributed_c10d.py, ``_register_builtin_nccl_backend``)."""
_SPLIT = private_name_if_imported(f"{_C10D}._get_split_source")
SYMMETRIC_MEMORY = private_name_if_imported("torch.distributed._symmetric_memory")
"""The module of symmetric memory, in ``torch.distributed``."""
_symmetric = private_if_imported("torch._C._distributed_c10d._SymmetricMemory")
_ALLOCATIONS = tuple(
    private_name_if_imported(f"torch._C._distributed_c10d._SymmetricMemory.{name}")
    for name in ("empty_strided_p2p", "get_mempool_allocator", "rendezvous", "set_backend")
)
"""What needs a backend of symmetric memory (torch/csrc/distributed/c10d/symm_mem)."""
_ENABLE = private_name_if_imported("torch._C._distributed_c10d._SymmetricMemory.set_group_info")
_ENABLED = private_name_if_imported("torch.distributed._symmetric_memory._group_name_to_store")
_numbered_dtypes = private_if_imported(
    "torch.distributed._symmetric_memory._maybe_convert_scalar_types_to_dtypes"
)
_FUNCTIONAL = private_name_if_imported("torch.distributed._functional_collectives")
_TIMEOUT = timedelta(minutes=10)
"""torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, kProcessGroupNCCLDefaultTimeout."""
_TABLES = tuple(
    private_name_if_imported(f"{_C10D}.{name}")
    for name in listed(
        "_pg_map _pg_names _pg_group_ranks _pg_backend_config _tags_to_pg _pg_to_tag"
    )
)
"""What ``torch.distributed`` has written down of groups; dictionaries."""
_NUMBERS = tuple(
    private_name_if_imported(f"{_C10D}.{name}")
    for name in ("_group_count", "_backend", "_default_pg_init_method")
)

GATHERS_LISTS = "c10d::allgather_"
_COPIES_INPUTS = ("c10d::reduce_scatter", "c10d::_reduce_scatter")
"""What gloo reduces copies of the inputs by (ProcessGroupGloo.cpp, ``reduce_scatter``)."""


def flattened_like(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return what NCCL gathers into for a list of outputs, ``None`` where it needs nothing.

    It gathers tensors of one size into one and copies from there; uneven ones are broadcast each
    (ProcessGroupNCCL.cpp, ``allgather``; Utils.hpp, ``newLikeFlat``).
    """
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        return None
    return first.new_empty((len(tensors), *first.shape))


def with_work(
    overload: Any,
    args: tuple[Any, ...],
    given: Sequence[Tensor],
    made: Sequence[Tensor] = (),
    *,
    waits: bool = False,
) -> Any:
    """Return the result of a collective, its written tensors, and finished work.

    ``Work.get_future`` gives the tensors that it made, or else wrote to: reducer.cpp and the
    communication hooks of ``DistributedDataParallel`` go on with them. Work holds what was
    ``made`` (ProcessGroupNCCL.cpp, ``WorkNCCL::outputs_``), and what it was ``given``: gloo's for
    as long as there is work, NCCL's until it is waited for (``waits``;
    ``stashed_for_allocator_safety_``).
    """
    tensors: Any = list(made) or args[0]
    while isinstance(tensors, list) and tensors and isinstance(tensors[0], list):
        tensors = tensors[0]
    outputs = tensors if isinstance(tensors, list) else [tensors]
    name = overload.name()
    known = {id(one) for one in outputs}
    held = [one for one in given if id(one) not in known]
    if held and outputs and (waits or not name.startswith(_COPIES_INPUTS)):
        first = outputs[0].detach()  # C++ keeps what Python has attached to a tensor
        first.held_by_work = _Held(held if waits else tuple(held), _done(outputs))
        outputs = [first, *outputs[1:]]
    work = _work_of()(_done(outputs)).boxed()
    return (args[0], work) if len(schema(overload).returns) > 1 else work


def _done(value: list[Tensor]) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


class _Held(NamedTuple):
    """What work holds, and its future does not."""

    tensors: Sequence[Tensor]
    """A list where that ends when the work is waited for."""
    future: Any
    """What the program gets."""


def _held_by(work: Any, future: Any) -> _Held | None:
    with suppress(RuntimeError):  # work of another kind
        for one in future(work).value():
            return getattr(one, "held_by_work", None)
    return None


def _held_work(off: Callable[[], bool]) -> dict[str, Any]:
    """Let a future hold nothing that its work was given, nor NCCL's work once it was waited for."""
    kind = _work()
    future, waiting = kind.get_future, kind.wait

    def get_future(work: Any) -> Any:
        held = None if off() else _held_by(work, future)
        return future(work) if held is None else held.future

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        found = waiting(work, *args, **kwargs)
        held = None if off() else _held_by(work, future)
        if held is not None and isinstance(held.tensors, list):
            held.tensors.clear()
        return found

    return {"get_future": get_future, "wait": wait}


def nccl_groups(off: Callable[[], bool]) -> tuple[Replacements, Sequence[LookedAt]]:
    """Let ``init_process_group("nccl")`` make torch's fake process group, unless ``off()``. Builds
    for the CPU lack ``ProcessGroupNCCL``. Returns also what else this depends on.
    """
    c10d, fake = sys.modules.get(_C10D), _fake_group()
    looked_at = ((sys.modules, _C10D, ABSENT if c10d is None else c10d),)
    if c10d is None or fake is None or _is_built() is None:
        return [], looked_at
    of_module: dict[str, Any] = {
        "_NCCL_AVAILABLE": True,
        "default_pg_nccl_timeout": _TIMEOUT,
        # Groups are made anew, as a fake one gives no part of itself to others. Since torch 2.15 it
        # says that it would (FakeProcessGroup.hpp, ``supportsSplitting``), to groups with options
        # of its own kind.
        _SPLIT: unless(off, lambda *_: None, getattr(c10d, _SPLIT)),
    }
    names = [name for name, one in _NCCL.items() if one is None or hasattr(c10d, one)]
    groups = _groups(dict.fromkeys(names, (0, 1)), off)
    return [(c10d, of_module), _sequence_numbers(), *groups], looked_at


def groups_of_world(rank: int, size: int, off: Callable[[], bool]) -> Replacements:
    """Let the backends for the host make torch's fake process group, unless ``off()``."""
    c10d = sys.modules[_C10D]
    there = _groups({"ProcessGroupGloo": (0, 1), "ProcessGroupMPI": (rank, size)}, off)
    values: dict[str, Any] = {
        flag: True for flag in ("_GLOO_AVAILABLE", "_MPI_AVAILABLE") if hasattr(c10d, flag)
    }
    # A program chooses by it (accelerate/state.py, ``_prepare_backend``), and torch's own check is
    # that of ``distributed_c10d``: MPI can be named, and is chosen where it is built.
    built = c10d.is_mpi_available()
    public = (sys.modules["torch.distributed"], {"is_mpi_available": lambda: built})
    original, levels = c10d.get_debug_level, c10d.DebugLevel

    def debug_level() -> Any:
        """No collective is compared with those of others, as TORCH_DISTRIBUTED_DEBUG=DETAIL asks:
        what does so numbers them, which the fake group does not (ProcessGroupWrapper.cpp).
        """
        level = original()
        return levels.INFO if level == levels.DETAIL and not off() else level

    values["get_debug_level"] = debug_level
    # What was received from anybody is the first other process's.
    source = unless(off, lambda _: int(rank == 0), getattr(_work(), _SOURCE))
    of_work = _work(), {_SOURCE: source, **_held_work(off)}
    return [*there, (c10d, values), public, _sequence_numbers(), of_work]


def _sequence_numbers() -> tuple[Any, dict[str, Any]]:
    return _fake_group(), {"_set_sequence_number_for_group": lambda group: None}


def symmetric_memory(instead: Callable[..., Any]) -> Replacements:
    """Let ``instead``, which gets the original first, be called for symmetric memory."""
    kind = _symmetric()
    names = [name for name in _ALLOCATIONS if hasattr(kind, name)]
    replaced = {name: staticmethod(partial(instead, getattr(kind, name))) for name in names}
    return [(kind, replaced)] if replaced else []


def symmetric_groups(on_thread: Callable[[], bool]) -> Replacements:
    """Have no group known to symmetric memory, whose module is imported, for a while. C++ keeps
    what it is told of a group for the process, with its store (``set_group_info``).
    """
    module, kind = sys.modules[f"torch.distributed.{SYMMETRIC_MEMORY}"], _symmetric()
    enable: Any = getattr(kind, _ENABLE, None)

    def set_group_info(*args: Any, **kwargs: Any) -> None:
        if not on_thread():
            enable(*args, **kwargs)

    found: list[tuple[Any, dict[str, Any]]] = []
    if hasattr(module, _ENABLED):
        found.append((module, {_ENABLED: {}}))
    if enable is not None:
        found.append((kind, {_ENABLE: staticmethod(set_group_info)}))
    return found


def dtypes_of_numbers(numbers: Sequence[Any]) -> Sequence[torch.dtype | None]:
    """Return the dtypes that operators of ``symm_mem`` get, as numbers where they are in a list."""
    convert = _numbered_dtypes()
    found: Sequence[torch.dtype | None] = numbers if convert is None else convert(list(numbers))
    return found


def _groups(
    names: Mapping[str, tuple[int, int]], off: Callable[[], bool]
) -> list[tuple[Any, dict[str, Any]]]:
    """Return the stand-ins for backends' classes. MPI would say to each which process of how many
    it is.
    """
    kinds = Additions({name: _group_class(name, off, world) for name, world in names.items()})
    return [(sys.modules[module], kinds) for module in (_C10D, "torch.distributed")]


def _group_class(name: str, off: Callable[[], bool], world: tuple[int, int]) -> Any:
    fake: Any = _fake_group()
    original: Any = getattr(sys.modules[_C10D], name, None)
    kinds = (fake,) if original is None else (fake, original)

    def make(rank: int, size: int) -> Any:
        return getattr(fake, _CREATE, fake)(rank, size, fake.Options())

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kinds)

        def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            if original is not None and off():
                return original(store, rank, size, *args, **kwargs)
            return make(rank, size)

        def create(cls, ranks: list[int]) -> Any:
            if original is not None and off():
                return original.create(ranks)
            own, size = world
            if not ranks:
                return make(own, size)
            return make(ranks.index(own), len(ranks)) if own in ranks else None

    class Options(fake.Options):  # type: ignore[misc]
        """``ProcessGroupNCCL.Options``, with which nothing is done."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__()
            self.is_high_priority_stream = is_high_priority_stream

    return Kind(name, (), {"Options": getattr(original, "Options", Options)})


@dataclass(slots=True, eq=False, repr=False)
class Groups:
    """What ``torch.distributed`` knows of process groups; of none, to begin with."""

    tables: dict[str, dict[Any, Any]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=lambda: {_NUMBERS[0]: 0})
    default: Any = None
    coalesced: dict[Any, Any] = field(default_factory=dict)
    names: dict[Any, str] = field(default_factory=dict)


def groups_known() -> Groups:
    c10d, state = sys.modules[_C10D], _state()
    tables = {name: _copy(getattr(c10d, name)) for name in _TABLES}
    numbers = {name: getattr(c10d, name) for name in _NUMBERS}
    return Groups(
        tables, numbers, state.default_pg, dict(state.pg_coalesce_state), dict(state.pg_names)
    )


def know_groups(groups: Groups) -> None:
    """Have these groups there, and no others."""
    c10d, state = sys.modules[_C10D], _state()
    for name in dict(state.pg_names).values():
        _unregister()(name)
    for name in _TABLES:
        getattr(c10d, name).clear()
        getattr(c10d, name).update(_copy(groups.tables.get(name, {})))
    state.pg_coalesce_state.clear()
    state.pg_coalesce_state.update(groups.coalesced)
    state.default_pg = groups.default
    for name, number in groups.numbers.items():
        setattr(c10d, name, number)
    for group, name in groups.names.items():
        _register()(name, group)


@contextmanager
def groups_put_aside(instead: Groups | None = None) -> Iterator[None]:
    """Set the existing process groups aside, and restore them afterwards."""
    before = groups_known()
    know_groups(instead or Groups())
    try:
        yield
    finally:
        know_groups(before)


def default_group_noted(note: Callable[[], None]) -> Replacements:
    """Let ``note`` be called where ``torch.distributed`` finds a default group that is there."""
    kind = type(_state())
    original = getattr(kind, _DEFAULT)

    def find(state: Any) -> Any:
        found = original.fget(state)
        if found is not None:
            note()
        return found

    return [(kind, {_DEFAULT: property(find, original.fset)})]


def _copy(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of a table of groups, and of the lists of groups in it."""
    return {key: list(one) if isinstance(one, list) else one for key, one in table.items()}


def register_meta_kernels() -> None:
    """Let functional collectives have torch's kernels for ``meta``.

    Without them C++ sends tensors on ``meta``, and its registry of work (c10d/ProcessGroup.cpp,
    ``WorkRegistry``) keeps them until the process ends.
    """
    import_module(f"torch.distributed.{_FUNCTIONAL}")


def place_in_group(arguments: Iterable[Any]) -> tuple[int, int] | None:
    """Return this process's rank in the group among an operator's arguments, and the group's size.
    The group may be named.
    """
    group = _group_among(arguments)
    return None if group is None else (int(group.rank()), int(group.size()))


def reduction_among(arguments: Iterable[Any]) -> str:
    """Return what a collective reduces by, "SUM" say; "" where it does not reduce;
    torch/csrc/distributed/c10d/Types.hpp, ``ReduceOp::RedOpType``.
    """
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError, AttributeError):  # it is something else
                kind: Any = torch.distributed.ReduceOp.RedOpType
                return str(kind(argument.op()).name)  # type: ignore[attr-defined]
    return ""


def group_of(arguments: Iterable[Any]) -> tuple[str, tuple[int, ...], int] | None:
    """Return the name of the group among an operator's arguments, the ranks of its processes, and
    which of these is this one.

    Raises ``LookupError`` for a group of another world, which is put aside.
    """
    group = _group_among(arguments)
    if group is None:
        return None
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    return str(group.group_name), ranks, ranks[group.rank()]


def _group_among(arguments: Iterable[Any]) -> Any:
    kind, find = _process_group(), _find_group()
    for argument in arguments:
        if isinstance(argument, str) and find is not None:
            with suppress(RuntimeError, KeyError, ValueError):  # it is something else
                return find(argument)
        if kind is not None and isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):  # it is something else
                return kind.unbox(argument)
    return None


_PACKAGE = "torch.distributed.tensor"
#: What says how an operator's outputs are split, given how its inputs are.
_PROPAGATOR = f"{_PACKAGE}._sharding_prop.ShardingPropagator"
propagator = private_if_imported(_PROPAGATOR)
NOT_CACHED = private_name_if_imported(f"{_PROPAGATOR}.propagate_op_sharding_non_cached")
SHOWN = private_name_if_imported(f"{_PROPAGATOR}._propagate_tensor_meta_non_cached")
op_schema = private_if_imported("torch.distributed.tensor._op_schema.OpSchema")
tensor_spec = private_if_imported("torch.distributed.tensor._dtensor_spec.DTensorSpec")
mesh_class = private_if_imported("torch.distributed.device_mesh.DeviceMesh")
CONCATENATE = private_name_if_imported("torch.distributed.device_mesh.DeviceMesh._concatenate")
_REPLACED = "_replaced_functions"
"""A module's table of what stands for functions of ``torch.nn.functional``, by stand-in."""
_random = private_if_imported(f"{_PACKAGE}._random")
_TRACKER = private_name_if_imported(f"{_PACKAGE}._random._rng_tracker")
"""What draws the random numbers of shards, on the device of the first mesh that needed it."""
_forget_in_cpp = optional("torch._C._clear_DTensor_sharding_propagator_cache")
_forget_plans = private_if_imported(f"{_PACKAGE}._redistribute.clear_redistribute_planner_cache")


def forget_meshes() -> None:
    """Clear the caches of ``DTensor``, whose keys hold meshes and so process groups."""
    if f"{_PACKAGE}._api" not in sys.modules:
        return
    for cache in tuple(_caches()):
        cache.cache_clear()
    forget = _forget_plans()
    if forget is not None:
        forget()
    if _forget_in_cpp is not None:
        _forget_in_cpp()
    # What stood for attention in contexts that were left holds their meshes: ``context_parallel``
    # never forgets it (``_distribute_function``, ``_restore_function`` in
    # torch/distributed/tensor/experimental/_context_parallel/_attention.py).
    for _, module in _modules():
        table: dict[Any, tuple[str, Any]] = vars(module).get(_REPLACED, {})
        for stand_in, (name, _) in tuple(table.items()):
            if getattr(torch.nn.functional, name, None) is not stand_in:
                del table[stand_in]
    if hasattr(_random(), _TRACKER):
        setattr(_random(), _TRACKER, None)


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the modules of the package that are imported."""
    for name, module in tuple(sys.modules.items()):
        if name.startswith(_PACKAGE) and isinstance(module, ModuleType):
            yield name, module


def _caches() -> Iterator[Any]:
    """Yield what of the package has a cache of its own, on this thread."""
    for name, module in _modules():
        for value in tuple(vars(module).values()):
            yield from _with_cache(value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute in tuple(vars(value).values()):
                    yield from _with_cache(getattr(attribute, "__func__", attribute), levels=2)


def _with_cache(value: Any, levels: int = 0) -> Iterator[Any]:
    """Yield what has a cache, of something and of its attributes so many levels deep."""
    if callable(getattr(value, "cache_clear", None)) and not isinstance(value, type):
        yield value
    for inner in tuple(getattr(value, "__dict__", {}).values()) if levels else ():
        yield from _with_cache(inner, levels - 1)


_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_kind = private_if_imported(f"{_FULLY_SHARD}._fully_shard.FSDPModule")
STATE_OF_SHARDING = private_name_if_imported(
    f"{_FULLY_SHARD}._fully_shard.FSDPModule._get_fsdp_state"
)
"""The method that every other one of an ``FSDPModule`` begins with."""
_GROUP = private_name_if_imported(f"{_FULLY_SHARD}._fsdp_state.FSDPState._fsdp_param_group")
_GROUPS = private_name_if_imported(f"{_FULLY_SHARD}._fsdp_state.FSDPState._fsdp_param_groups")


def arguments_of_sharding(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module was given to ``fully_shard`` with that costs or saves memory. Nothing for
    other modules, and for those whose parameters are in the groups of others.
    """
    kind = _kind()
    if kind is None or not isinstance(module, kind):
        return
    group = next(_groups_of(module), None)
    if group is None:
        return
    after = getattr(group, "post_forward_mesh_info", None)
    same = after == getattr(group, "mesh_info", None)
    yield "reshard_after_forward", str(same if after is None or same else after.shard_mesh_size)
    parameters = getattr(group, "fsdp_params", None)
    # Since torch 2.15 a policy may differ by parameter, and the group has none.
    of_policy = group if hasattr(group, "mp_policy") or not parameters else parameters[0]
    types = getattr(of_policy, "mp_policy", None)
    for name in ("param_dtype", "reduce_dtype"):
        yield name, str(getattr(types, name, None)).removeprefix("torch.")
    yield "offload_policy", type(getattr(group, "offload_policy", None)).__name__


def _groups_of(module: nn.Module) -> Iterator[Any]:
    """Yield the groups of a module's parameters that are gathered together."""
    state = getattr(module, STATE_OF_SHARDING)()
    groups = getattr(state, _GROUPS, None)
    if groups is None:
        groups = [getattr(state, _GROUP, None)]
    yield from (group for group in groups if group is not None)


def is_of_this_world(module: nn.Module) -> bool:
    """Return whether a sharded module's groups of processes are among those that are there now."""
    there = groups_known().names
    kind = getattr(torch.distributed, "ProcessGroup", ())
    return all(
        one in there
        for group in _groups_of(module)
        for one in vars(group.mesh_info).values()
        if isinstance(one, kind)
    )


def sharding_kept(module: nn.Module) -> Callable[[], None]:
    """Return what gives the state of a sharded module the attributes that it has now.

    A first step makes streams, and finds out which module is the root; each makes buffers and
    events, and changes which parameters a module has.
    """
    tables = (list, set, dict)
    kept = [
        (own, {name: type(one)(one) if type(one) in tables else one for name, one in own.items()})
        for own in _states(module)
    ]

    def give_back() -> None:
        for own, before in kept:
            own.clear()
            own.update(before)

    return give_back


def _states(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of all that is of ``fully_shard`` and belongs to a module."""
    waiting: list[Any] = [getattr(module, STATE_OF_SHARDING)()]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple, set, dict)):
            waiting.extend(one.values() if isinstance(one, dict) else one)
        elif id(one) not in seen:
            seen.add(id(one))
            of_others = isinstance(one, (type, Enum, nn.Module)) or not hasattr(one, "__dict__")
            if str(type(one).__module__).startswith(_FULLY_SHARD) and not of_others:
                waiting.extend(vars(one).values())
                yield vars(one)
