"""What ``DTensor`` remembers of meshes: how it splits operators, and how it redistributes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from pytest_torchmem.torch_private.names import (
    optional,
    private_if_imported,
    private_name_if_imported,
)

_PACKAGE = "torch.distributed.tensor"
#: What says how an operator's outputs are split, given how its inputs are.
propagation = private_if_imported("torch.distributed.tensor._sharding_prop")
FLAG = private_name_if_imported(
    "torch.distributed.tensor._sharding_prop._propagate_use_strided_shard_flag"
)
EXPAND_LIST = private_name_if_imported(
    "torch.distributed.tensor._sharding_prop._expand_single_dim_strategy_to_mesh"
)
ops_utils = private_if_imported("torch.distributed.tensor._ops.utils")
EXPAND = private_name_if_imported(
    "torch.distributed.tensor._ops.utils.expand_to_full_mesh_op_strategy"
)
single_dim_strategies = private_if_imported("torch.distributed.tensor._ops.single_dim_strategy")
PREPARE = private_name_if_imported(
    "torch.distributed.tensor._ops.single_dim_strategy._PreparedSingleDimStrategy"
)
op_schema = private_if_imported("torch.distributed.tensor._op_schema.OpSchema")
FAKE_ARGUMENTS = private_name_if_imported(
    "torch.distributed.tensor._op_schema.OpSchema.gen_fake_args"
)
op_schemas = private_if_imported("torch.distributed.tensor._op_schema")
FAKE_ARGUMENT = private_name_if_imported(
    "torch.distributed.tensor._op_schema._rebuild_tensor_from_dtensor_meta"
)
mesh_class = private_if_imported("torch.distributed.device_mesh.DeviceMesh")
CONCATENATE = private_name_if_imported("torch.distributed.device_mesh.DeviceMesh._concatenate")
ELEMENTWISE = private_name_if_imported(
    "torch.distributed.tensor._ops.single_dim_strategy._resolve_foreach_elementwise_overload"
)
MAP_ONLY = private_name_if_imported(
    "torch.distributed.tensor._ops.single_dim_strategy.tree_map_only"
)
strided_shard = private_if_imported("torch.distributed.tensor.placement_types._StridedShard")
_strategy = private_if_imported("torch.distributed.tensor._op_schema.OpStrategy")
_random = private_if_imported(f"{_PACKAGE}._random")
_TRACKER = private_name_if_imported(f"{_PACKAGE}._random._rng_tracker")
"""What draws the random numbers of shards, on the device of the first mesh that needed it."""
_forget_in_cpp = optional("torch._C._clear_DTensor_sharding_propagator_cache")
_forget_plans = private_if_imported(f"{_PACKAGE}._redistribute.clear_redistribute_planner_cache")


def is_one_placement(argument: Any) -> bool:
    """Return whether an operator's argument is a tensor that is placed in one way."""
    kind = _strategy()
    if kind is None or not isinstance(argument, kind) or len(argument.strategies) != 1:
        return False
    only = argument.strategies[0]
    return only.input_specs is None and not isinstance(only.output_specs, tuple)


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
    if hasattr(_random(), _TRACKER):
        setattr(_random(), _TRACKER, None)


def _caches() -> Iterator[Any]:
    """Yield what of the package has a cache of its own, on this thread."""
    for name, module in tuple(sys.modules.items()):
        if name.startswith(_PACKAGE) and isinstance(module, ModuleType):
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
