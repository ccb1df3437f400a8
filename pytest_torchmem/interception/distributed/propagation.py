"""What ``DTensor`` and ``fully_shard`` do again for every tensor, done once where it is the same.

``_foreach_mul_`` of the gradients of a model, or ``_fused_adamw_``, is propagated once in a program
and takes torch time that grows with the square of their number: for each tensor all combinations of
placements are made, and the placements of all tensors are read. Tensors of one shape and placement
have the same combinations, and what is read is the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from pytest_torchmem.torch_private.distributed.sharding import (
    CONCATENATE,
    ELEMENTWISE,
    EXPAND,
    EXPAND_LIST,
    FAKE_ARGUMENT,
    FAKE_ARGUMENTS,
    FLAG,
    MAP_ONLY,
    PREPARE,
    is_one_placement,
    mesh_class,
    op_schema,
    op_schemas,
    ops_utils,
    propagation,
    single_dim_strategies,
    strided_shard,
)

_NUMBERS = frozenset({bool, int, float, complex, str, type(None)})
Replace = Callable[[Any, str, Callable[..., Any]], None]


def shorten_propagation(replace: Replace) -> None:
    """Replace what ``DTensor`` does for each tensor of a list; it gives what it gave."""
    module, utils, strategies = propagation(), ops_utils(), single_dim_strategies()
    strided = strided_shard()
    if hasattr(op_schema(), FAKE_ARGUMENTS) and hasattr(op_schemas(), FAKE_ARGUMENT):
        arguments = _FakeArguments(getattr(op_schemas(), FAKE_ARGUMENT))
        replace(op_schema(), FAKE_ARGUMENTS, arguments.generating)
        replace(op_schemas(), FAKE_ARGUMENT, lambda original: arguments.of)
    if hasattr(strategies, ELEMENTWISE) and hasattr(strategies, MAP_ONLY):
        replace(strategies, ELEMENTWISE, cache)
        replace(strategies, MAP_ONLY, _mapping)
    names = ((module, FLAG), (module, EXPAND_LIST), (utils, EXPAND), (strategies, PREPARE))
    if strided is None or not all(hasattr(owner, name) for owner, name in names):
        return
    combinations = _Combinations()
    replace(module, FLAG, lambda original: _Flags(original, strided))
    replace(module, EXPAND_LIST, combinations.beginning)
    replace(utils, EXPAND, combinations.expanding)
    replace(strategies, PREPARE, combinations.preparing)


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


class _FakeArguments:
    """The fake tensors that stand for the arguments of one operator: one for all in its lists that
    are alike. They are read for what the outputs look like, and for nothing else.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        self._made: dict[Any, Any] | None = None

    def generating(self, original: Any) -> Any:
        """Return what makes the arguments of an operator."""

        def generate(schema: Any) -> Any:
            in_list = any(isinstance(one, (list, tuple)) for one in schema.args_schema)
            self._made = {} if in_list else None
            try:
                return original(schema)
            finally:
                self._made = None

        return generate

    def of(self, spec: Any) -> Any:
        """Return what stands for one tensor."""
        if self._made is None:
            return self._original(spec)
        key = (spec.tensor_meta, spec.mesh.device_type)
        try:
            made = self._made.get(key)
        except TypeError:  # symbolic sizes
            return self._original(spec)
        if made is None:
            made = self._made[key] = self._original(spec)
        return made


class _Combinations:
    """The combinations of placements of one operator, by what they are made of."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}
        self._in_list = False

    def beginning(self, original: Any) -> Any:
        """Return what begins with another operator: its strategies are changed afterwards."""

        def expand_list(mesh: Any, schema: Any, *args: Any, **kwargs: Any) -> Any:
            expand = original(mesh, schema, *args, **kwargs)

            def strategy(*called: Any) -> Any:
                self._found.clear()
                self._in_list = True
                try:
                    return expand(*called)
                finally:
                    self._found.clear()
                    self._in_list = False

            return strategy

        return expand_list

    def expanding(self, original: Any) -> Any:
        """Return what makes all combinations, once for tensors of one geometry and placement."""

        def expand(mesh: Any, schema: Any, single: Any, **kwargs: Any) -> Any:
            options = [(name, _hashable(value)) for name, value in kwargs.items()]
            key = (mesh, *map(tuple, single), *options)
            return self._once(key, schema, lambda: original(mesh, schema, single, **kwargs))

        return expand

    def preparing(self, original: Any) -> Any:
        """Return what finds the placements on one dimension of the mesh, as often."""

        def prepare(info: Any, schema: Any, output: Any, *args: Any) -> Any:
            key = (id(info), _hashable(output), *args)
            return self._once(key, schema, lambda: original(info, schema, output, *args))

        return prepare

    def _once(self, key: tuple[Any, ...], schema: Any, make: Callable[[], Any]) -> Any:
        key = (key, _key(schema)) if self._in_list else ()
        try:
            found = self._found.get(key) if key else None
        except TypeError:  # an unhashable argument, or symbolic sizes
            return make()
        if found is None:
            found = make()
            if key:
                self._found[key] = found
        return found


def _key(schema: Any) -> tuple[Any, ...]:
    """Return what combinations depend on of an operator and its arguments."""
    parts: list[Any] = [schema.op]
    for one in (*schema.args_schema, *schema.kwargs_schema.values()):
        if is_one_placement(one):
            parts.append(one.strategies[0].output_spec)
        else:
            parts.append((type(one), _hashable(one)))
    return tuple(parts)


def _hashable(value: Any) -> Any:
    return tuple((type(one), one) for one in value) if type(value) is list else value


def _mapping(original: Any) -> Any:
    """Return ``tree_map_only`` that looks into no list of numbers, which stands beside a list of
    tensors and is looked into for each of these.
    """
    numbers: list[Any] = []  # the last lists of which that was found

    def is_plain(value: Any) -> bool:
        if type(value) not in (list, tuple):
            return not isinstance(value, dict)
        if any(one is value for one in numbers):
            return True
        if any(type(one) not in _NUMBERS for one in value):
            return False
        numbers[:] = [*numbers[-3:], value]
        return True

    def tree_map_only(kind: Any, function: Any, tree: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kind, type) and type(tree) is tuple and len(tree) == 2:
            places, names = tree
            if type(places) is tuple and type(names) is dict:
                both = (*places, *names.values())
                if all(isinstance(one, kind) or is_plain(one) for one in both):
                    changed = tuple(_changed(one, kind, function) for one in places)
                    named = {name: _changed(one, kind, function) for name, one in names.items()}
                    return changed, named
        return original(kind, function, tree, *args, **kwargs)

    return tree_map_only


def _changed(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    return function(value) if isinstance(value, kind) else value


class _Flags:
    """Settles how strided shards are read, by those of all arguments of an operator."""

    def __init__(self, original: Any, strided: type) -> None:
        self._original, self._strided = original, strided
        self._schema: Any = None
        self._told = SimpleNamespace(args_spec=())

    def __call__(self, strategy: Any, schema: Any) -> None:
        """Do it, with one argument for each way there is among them."""
        if schema is not self._schema:
            ways: dict[Any, Any] = {}
            for spec in schema.args_spec:
                if any(isinstance(one, self._strided) for one in spec.placements):
                    ways.setdefault(spec.use_strided_shard_as_shard_order, spec)
            self._schema, self._told = schema, SimpleNamespace(args_spec=tuple(ways.values()))
        self._original(strategy, self._told)
