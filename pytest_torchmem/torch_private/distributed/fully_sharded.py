"""What ``fully_shard`` keeps of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from pytest_torchmem.torch_private.names import private_if_imported, private_name_if_imported

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_kind = private_if_imported(f"{_PACKAGE}._fully_shard.FSDPModule")
_STATE = private_name_if_imported(f"{_PACKAGE}._fully_shard.FSDPModule._get_fsdp_state")
_GROUP = private_name_if_imported(f"{_PACKAGE}._fsdp_state.FSDPState._fsdp_param_group")
_GROUPS = private_name_if_imported(f"{_PACKAGE}._fsdp_state.FSDPState._fsdp_param_groups")


def arguments_of_sharding(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what a module was given to ``fully_shard`` with that costs or saves memory.

    Nothing for other modules, and for those whose parameters are in the groups of others.
    """
    kind = _kind()
    if kind is None or not isinstance(module, kind):
        return
    state = getattr(module, _STATE)()
    groups = getattr(state, _GROUPS, None)
    group: Any = groups[0] if groups else getattr(state, _GROUP, None) if groups is None else None
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
