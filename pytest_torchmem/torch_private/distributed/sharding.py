"""What ``DTensor`` and ``fully_shard`` keep: of meshes and operators, of arguments and a step."""

import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import nn

from pytest_torchmem.torch_private.distributed.process_groups import groups_known
from pytest_torchmem.torch_private.names import (
    optional,
    private_if_imported,
    private_name_if_imported,
)

_PACKAGE = "torch.distributed.tensor"
#: What says how an operator's outputs are split, given how its inputs are.
propagator = private_if_imported("torch.distributed.tensor._sharding_prop.ShardingPropagator")
NOT_CACHED = private_name_if_imported(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator.propagate_op_sharding_non_cached"
)
SHOWN = private_name_if_imported(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached"
)
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
    _forget_replaced()
    if hasattr(_random(), _TRACKER):
        setattr(_random(), _TRACKER, None)


def _forget_replaced() -> None:
    """Forget what stood for attention in contexts that were left: it holds their meshes.

    ``context_parallel`` never does (``_distribute_function``, ``_restore_function`` in
    torch/distributed/tensor/experimental/_context_parallel/_attention.py).
    """
    for _, module in _modules():
        table: dict[Any, tuple[str, Any]] = vars(module).get(_REPLACED, {})
        for stand_in, (name, _) in tuple(table.items()):
            if getattr(torch.nn.functional, name, None) is not stand_in:
                del table[stand_in]


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
                    yield from _with_cache(getattr(attribute, "__func__", attribute))
                    for inner in tuple(getattr(attribute, "__dict__", {}).values()):
                        yield from _with_cache(inner)
                        for deeper in tuple(getattr(inner, "__dict__", {}).values()):
                            yield from _with_cache(deeper)


def _with_cache(value: Any) -> Iterator[Any]:
    if callable(getattr(value, "cache_clear", None)) and not isinstance(value, type):
        yield value


_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_kind = private_if_imported(f"{_FULLY_SHARD}._fully_shard.FSDPModule")
STATE_OF_SHARDING = private_name_if_imported(
    f"{_FULLY_SHARD}._fully_shard.FSDPModule._get_fsdp_state"
)
"""The method that every other one of an ``FSDPModule`` begins with."""
_GROUP = private_name_if_imported(f"{_FULLY_SHARD}._fsdp_state.FSDPState._fsdp_param_group")
_GROUPS = private_name_if_imported(f"{_FULLY_SHARD}._fsdp_state.FSDPState._fsdp_param_groups")


def arguments_of_sharding(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module was given to ``fully_shard`` with that costs or saves memory.

    Nothing for other modules, and for those whose parameters are in the groups of others.
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
        elif id(one) not in seen and _keeps_of_a_step(one):
            seen.add(id(one))
            waiting.extend(vars(one).values())
            yield vars(one)


def _keeps_of_a_step(one: Any) -> bool:
    of_others = isinstance(one, (type, Enum, nn.Module))
    of_torch = str(type(one).__module__).startswith(_FULLY_SHARD)
    return of_torch and not of_others and hasattr(one, "__dict__")
