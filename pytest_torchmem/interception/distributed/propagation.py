"""What ``DTensor`` and ``fully_shard`` do again for every tensor, done once where it is the same.

``_foreach_mul_`` of a model's gradients, or ``_fused_adamw_``, is propagated once in a program. For
each tensor all combinations of placements are made, and fake tensors show what comes out, which
takes longer than the step itself. Layers are alike: few tensors of a list differ in shape and
placement.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace as with_changes
from typing import Any

import torch

from pytest_torchmem.torch_private.dispatch.operators import schema
from pytest_torchmem.torch_private.distributed.sharding import (
    CONCATENATE,
    NOT_CACHED,
    SHOWN,
    mesh_class,
    op_schema,
    propagator,
    tensor_spec,
)

_FOREACH = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""What treats the tensors of its lists one by one (torch/distributed/tensor/_ops/
single_dim_strategy.py, ``_expand_single_dim_strategy_to_mesh``)."""
Replace = Callable[[Any, str, Callable[..., Any]], None]


def shorten_propagation(replace: Replace) -> None:
    """Propagate an operator on lists once for each different tensor, with the same result."""
    there = all(hasattr(propagator(), name) for name in (NOT_CACHED, SHOWN))
    if there and op_schema() is not None and tensor_spec() is not None:
        replace(propagator(), NOT_CACHED, _propagating)
        replace(propagator(), SHOWN, _showing)


def keep_joined_meshes(replace: Replace) -> None:
    """Let ``fully_shard`` join its mesh and that of tensor parallelism once, not for every
    parameter: a mesh of 512 processes takes a millisecond. What it makes is on the host.
    """
    if hasattr(mesh_class(), CONCATENATE):
        replace(mesh_class(), CONCATENATE, _joining)


def _joining(original: Any) -> Any:
    found: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def concatenate(meshes: list[Any]) -> Any:
        key = tuple(map(id, meshes))
        if key not in found:  # beside the meshes, so that no other gets their addresses
            found[key] = (tuple(meshes), original(meshes))
        return found[key][1]

    return staticmethod(concatenate)


def _propagating(original: Any) -> Callable[..., Any]:
    """Return ``ShardingPropagator.propagate_op_sharding_non_cached``."""

    def propagate(self: Any, called: Any) -> Any:
        alike = _Alike.of(called) if called.op.name().startswith(_FOREACH) else None
        if alike is None:
            return original(self, called)
        found = original(self, alike.shortened(called))
        outputs, asked = found.output_spec, found.redistribute_schema
        return with_changes(
            found,
            output_spec=alike.spread(outputs) if isinstance(outputs, (list, tuple)) else outputs,
            redistribute_schema=None if asked is None else alike.lengthened(asked),
        )

    return propagate


def _showing(original: Any) -> Callable[..., Any]:
    """Return what runs an operator on fake tensors to see its outputs, unless there are none, or
    it is written to its first argument as it lies there.
    """

    def show(self: Any, called: Any) -> Any:
        operator, args = called.op, called.args_schema
        if not schema(operator).returns:
            return None
        in_place = called.is_inplace_op() and torch.Tag.pointwise in operator.tags
        if in_place and args and isinstance(args[0], tensor_spec()):
            return args[0].tensor_meta
        return original(self, called)

    return show


class _Alike:
    """The elements of an operator's lists, of which many are the same in each list."""

    def __init__(self, lists: frozenset[int], first: Sequence[int], places: Sequence[int]) -> None:
        self._lists = lists
        """Which arguments they are."""
        self._first = first
        """Where each kind of elements stands first."""
        self._places = places
        """Which kind each element is, in the order of ``_first``."""

    @classmethod
    def of(cls, called: Any) -> "_Alike | None":
        """Return them, or None if no two are the same, or one has symbolic sizes."""
        args, spec = called.args_schema, tensor_spec()
        lists = [one for one in args if isinstance(one, (list, tuple)) and one]
        of_tensors = [one for one in lists if isinstance(one[0], spec)]
        count = len(of_tensors[0]) if of_tensors else 0
        if any(len(one) != count for one in lists):
            return None
        if any(isinstance(one, (list, tuple)) for one in called.kwargs_schema.values()):
            return None
        kinds: dict[Any, int] = {}
        first: list[int] = []
        places: list[int] = []
        try:
            for index, elements in enumerate(zip(*lists, strict=True)):
                key = tuple(_key(element, spec) for element in elements)
                if key not in kinds:
                    kinds[key] = len(first)
                    first.append(index)
                places.append(kinds[key])
        except TypeError:  # symbolic sizes have no hash
            return None
        if len(first) == count:
            return None
        chosen = frozenset(
            index for index, one in enumerate(args) if isinstance(one, (list, tuple)) and one
        )
        return cls(chosen, first, places)

    def shortened(self, called: Any) -> Any:
        """Return the operator with one element of each kind."""
        return self._with_lists(called, self._first)

    def lengthened(self, called: Any) -> Any:
        """Return an operator that was shortened with all elements."""
        return self._with_lists(called, self._places)

    def spread(self, values: Sequence[Any]) -> Any:
        """Return what belongs to each element, from what belongs to each kind."""
        return type(values)(values[place] for place in self._places)  # type: ignore[call-arg]

    def _with_lists(self, called: Any, order: Sequence[int]) -> Any:
        kind: Any = op_schema()
        args = tuple(
            type(one)(one[place] for place in order) if index in self._lists else one
            for index, one in enumerate(called.args_schema)
        )
        return kind(called.op, args, called.kwargs_schema, schema_info=called.schema_info)


def _key(element: Any, spec: type) -> Any:
    """Return what decides how an element is split."""
    if isinstance(element, spec):
        return element, element.use_strided_shard_as_shard_order  # type: ignore[attr-defined]
    return type(element), element
