"""What ``fully_shard`` keeps of its arguments, and of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch.distributed
from torch import nn

from pytest_torchmem.torch_private.distributed.process_groups import groups_known
from pytest_torchmem.torch_private.names import private_if_imported, private_name_if_imported

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_kind = private_if_imported(f"{_PACKAGE}._fully_shard.FSDPModule")
STATE_OF_SHARDING = private_name_if_imported(f"{_PACKAGE}._fully_shard.FSDPModule._get_fsdp_state")
"""The method that every other one of an ``FSDPModule`` begins with."""
_GROUP = private_name_if_imported(f"{_PACKAGE}._fsdp_state.FSDPState._fsdp_param_group")
_GROUPS = private_name_if_imported(f"{_PACKAGE}._fsdp_state.FSDPState._fsdp_param_groups")


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
    kept = [(own, {name: _copied(one) for name, one in own.items()}) for own in _states(module)]

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
    of_torch = str(type(one).__module__).startswith(_PACKAGE)
    return of_torch and not of_others and hasattr(one, "__dict__")


def _copied(one: Any) -> Any:
    return type(one)(one) if type(one) in (list, set, dict) else one
