"""What ``DTensor`` remembers of meshes: how it splits operators, and how it redistributes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

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
