"""Modules that are split over processes: ``fully_shard`` and ``DistributedDataParallel``.

Both are Python and operators, and run as they are where the program itself wraps its modules. One
that was wrapped before belongs to other groups of processes, and is refused.

What they do again for every tensor is done once where it is the same: ``_foreach_mul_`` of a
model's gradients, or ``_fused_adamw_``, is propagated once in a program. For each tensor all
combinations of placements are made, and fake tensors show what comes out, which takes longer than
the step itself. Layers are alike: few tensors of a list differ in shape and placement.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace as with_changes
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed
from torch import nn

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import LASTING, Layer, TraceContext
from pytest_torchmem.interception.python_api.program import (
    LAUNCHER,
    LAUNCHES,
    launching,
    starts_of_processes,
)
from pytest_torchmem.interception.world import refuse_symmetric_memory
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step.trees import modules_by_path
from pytest_torchmem.torch_private import distributed, patches
from pytest_torchmem.torch_private.keys import schema

_BEFORE = (
    " was wrapped for several processes before the trace. Build and wrap it in the function that "
    "is traced, with world_size="
)
_TRACED_BEFORE = (
    " was in another trace before this one. Wrap the model in the function that is traced, with "
    "world_size=, or in a fixture that is set up for each test"
)
_OLD = (
    "FullyShardedDataParallel is not supported in a trace. Use "
    "torch.distributed.fsdp.fully_shard, its successor, which is"
)


_SYMMETRIC = f"torch.distributed.{distributed.SYMMETRIC_MEMORY}"
_FOLLOWED = (
    *(f"torch.distributed.{name}" for name in ("fsdp", "tensor", "checkpoint", "pipelining")),
    _SYMMETRIC,
    LAUNCHER,
)


def _of_fsdp(name: str) -> Any:
    """Return a class of ``torch.distributed.fsdp``, or None where that is not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


Places = WeakKeyDictionary[Any, torch.device | None]
"""Where the parameters of DDP's reducers are."""

#: Methods of ``torch.distributed.Logger`` (torch/csrc/distributed/c10d/logger.cpp).
_LOGGING = ("set_construction_data_and_log", "set_runtime_stats_and_log")
_WRAPPERS: tuple[Callable[[], Any], ...] = (
    lambda: nn.parallel.DistributedDataParallel,
    partial(_of_fsdp, "FSDPModule"),
    partial(_of_fsdp, "FullyShardedDataParallel"),
)


def holds_reducer(value: object) -> bool:
    """Return whether something is, or holds, a module in ``DistributedDataParallel``. Its reducer
    is of C++, and cannot be as it was before a trace.
    """
    kind = nn.parallel.DistributedDataParallel
    if isinstance(value, nn.Module):
        return any(isinstance(one, kind) for one in value.modules())
    if isinstance(value, (list, tuple)):
        return any(map(holds_reducer, value))
    own = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return any(isinstance(one, nn.Module) and holds_reducer(one) for one in own.values())


def refuse_wrapped(target: nn.Module) -> None:
    """Raise ``UnsupportedOperatorError`` for a module that has one wrapped for several processes.
    Its copy could not be made, or would be wrapped anew.
    """
    kinds = tuple(filter(None, (find() for find in _WRAPPERS)))
    for path, inner in modules_by_path(target):
        if isinstance(inner, kinds):
            kind = next(kind for kind in kinds if isinstance(inner, kind))
            where = f"{type(target).__name__}.{path}" if path else type(target).__name__
            raise UnsupportedOperatorError(f"{where} ({kind.__name__}){_BEFORE}")


@contextmanager
def split_modules(trace: TraceContext) -> Iterator[None]:
    """Follow the modules that the program splits over processes. What is imported in the course of
    the trace is followed from then on.
    """
    wrapped: WeakSet[Any] = WeakSet()
    with ExitStack() as stack:
        if not trace.stands:
            stack.callback(_forget_states, wrapped)
        take_over = _TakenOver(trace, stack, wrapped)
        followed: set[str] = set()
        wanted: list[tuple[Any, Mapping[str, Any]]] = []

        def follow(*modules: str) -> None:
            for module in modules:
                for owner, name, function in _followed(trace, module, wrapped, take_over):
                    key = f"{getattr(owner, '__name__', '')}.{name}"
                    if owner is not None and hasattr(owner, name) and key not in followed:
                        followed.add(key)
                        wanted.append((owner, {name: function(getattr(owner, name))}))
                if module == _SYMMETRIC and module in sys.modules and module not in followed:
                    followed.add(module)
                    refuse = partial(refuse_symmetric_memory, trace.on_thread)
                    wanted.extend(distributed.symmetric_memory(refuse))
                    wanted.extend(distributed.symmetric_groups(trace.on_thread))
            if wanted:
                stack.enter_context(patches.replaced_all(tuple(wanted)))
                wanted.clear()

        stack.enter_context(LASTING.layer("processes", _of_processes))
        follow(*(name for name in _FOLLOWED if name in sys.modules))
        stack.enter_context(trace.after_imports(follow))
        yield


def _followed(
    trace: TraceContext, module: str, wrapped: WeakSet[Any], take_over: Callable[[nn.Module], None]
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield what a module brings and this torch has: owners, names, and makers of replacements."""
    if module.startswith("torch.distributed.fsdp"):
        kind = _of_fsdp("FSDPModule")
        yield kind, "__call__", partial(_calling, take_over)
        yield kind, distributed.STATE_OF_SHARDING, partial(_asking, take_over)
        yield _of_fsdp("FullyShardedDataParallel"), "__init__", partial(_refusing, trace)
        yield patches.sharding_state(), "init", partial(_sharding, trace, wrapped)
        yield patches.fully_sharding(), patches.SHARDED_STATES, partial(_noting, trace)
        yield patches.replicating(), patches.REPLICATED_STATES, partial(_noting, trace)
        if trace.target.gpu is not None:
            yield distributed.mesh_class(), distributed.CONCATENATE, _joining
    shortens = distributed.op_schema() is not None and distributed.tensor_spec() is not None
    if module.startswith("torch.distributed.tensor") and shortens:
        # An operator on lists is propagated once for each different tensor, with the same result.
        yield distributed.propagator(), distributed.NOT_CACHED, _propagating
        yield distributed.propagator(), distributed.SHOWN, _showing
    if module.startswith("torch.distributed.checkpoint"):
        yield patches.checkpoint_agreement(), "__init__", partial(_agreeing_alone, trace)
        yield patches.checkpoint_planner(), patches.VALIDATE_PLAN, partial(_validating, trace)
    if module.startswith("torch.distributed.pipelining"):
        # Before torch 2.12 and since 2.15 no stage asks others in messages of its own
        # (torch/distributed/pipelining/stage.py).
        yield patches.pipeline_stage(), patches.FORWARD_VOTE, partial(_voting, trace)
        yield patches.pipeline_stage(), patches.BACKWARD_RESULT, partial(_agreeing, trace)
    if module == LAUNCHER:
        yield sys.modules.get(LAUNCHER), LAUNCHES, partial(launching, trace)


def _forget_states(wrapped: WeakSet[Any]) -> None:
    """Forget what ``fully_shard`` made for modules, which are given back as they were."""
    states = patches.module_states()
    if states is not None:
        for module in tuple(wrapped):
            states.pop(module, None)


def _noting(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return what ``fully_shard`` or ``replicate`` begins with, before it changes anything."""

    def find(module: Any, *args: Any, **kwargs: Any) -> Any:
        for one in [module] if isinstance(module, nn.Module) else list(module):
            trace.note_module(one)
        return original(module, *args, **kwargs)

    return find


def _sharding(trace: TraceContext, wrapped: WeakSet[Any], original: Any) -> Callable[..., Any]:
    """Return ``FSDPState.init``, which is called with the modules that are split."""

    def init(self: Any, modules: Any, *args: Any, **kwargs: Any) -> Any:
        if not trace.off():
            wrapped.update(modules)
        return original(self, modules, *args, **kwargs)

    return init


def _voting(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return what asks the stages before whether tensors' shapes have to be sent. The others are
    taken to have been given as much as this one.
    """

    def vote(stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
        if trace.off():
            return original(stage, has_backward, received_acc)
        kind: Any = patches.needs_messages()
        given = not kind.needs_dynamic(getattr(stage, patches.GIVEN_TENSORS), has_backward)
        own = torch.tensor([int(given)], dtype=torch.int32, device=stage.device)
        return own if received_acc is None else received_acc * own

    return vote


def _agreeing(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return what tells the stages before what the vote was."""
    return patches.unless(trace.off, lambda stage, received_result=None: received_result, original)


def _of_processes(trace: TraceContext) -> Layer[None]:
    """Replace what starts processes, and in each what agrees with the others."""
    return Layer([*starts_of_processes(trace), *_comparing(trace)], None)


def _comparing(trace: TraceContext) -> patches.Replacements:
    """Replace what ``DistributedDataParallel`` compares its parameters' shapes with others' by.

    It writes to and reads from memory (torch/csrc/distributed/c10d/reducer.cpp,
    ``verify_params_across_processes``). In a trace all processes run the same program.
    """
    original = getattr(torch.distributed, patches.VERIFY_PARAMETERS, None)
    if original is None:
        return []
    logger: Any = torch.distributed.Logger  # type: ignore[attr-defined]
    # torch's own asks gloo's and NCCL's groups for more than fake ones have
    quiet = {
        name: patches.unless(trace.off, lambda *_, **__: None, getattr(logger, name))
        for name in _LOGGING
    }
    reducer: Any = torch.distributed.Reducer  # type: ignore[attr-defined]
    places: Places = WeakKeyDictionary()
    buckets = {
        patches.REBUILD_BUCKETS: _making_buckets(
            trace, getattr(reducer, patches.REBUILD_BUCKETS), places
        )
    }
    verify = patches.unless(trace.off, lambda *_: None, original)
    functions = {
        patches.VERIFY_PARAMETERS: verify,
        "Reducer": _making_reducer(trace, reducer, places),
    }
    return [(torch.distributed, functions), (logger, quiet), (reducer, buckets)]


def _agreeing_alone(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return ``_DistWrapper.__init__``: in a trace a process plans its part of a checkpoint alone.
    What others would write is not known, and not written.
    """

    def init(self: Any, group: Any, use_dist: bool, *args: Any, **kwargs: Any) -> None:
        original(self, group, use_dist and trace.off(), *args, **kwargs)

    return init


def _validating(trace: TraceContext, original: Any) -> Callable[..., Any]:
    """Return what finds parts of tensors that no process writes."""

    def validate(*args: Any, **kwargs: Any) -> Any:
        if trace.off():
            return original(*args, **kwargs)
        found = original(*args, **kwargs)
        return [] if isinstance(found, list) else True

    return validate


def _making_reducer(trace: TraceContext, original: Any, places: Places) -> Callable[..., Any]:
    """Return what makes a reducer, with its buckets of gradients (reducer.cpp,
    ``initialize_buckets``). C++ makes them where the parameters are, which to it is the host.
    """

    def make(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if trace.off():
            return original(parameters, *args, **kwargs)
        first = next(iter(parameters), None)
        place = None if first is None else first.device
        with trace.holding(Kind.COMMUNICATION), trace.placing_on(place):
            made = original(parameters, *args, **kwargs)
        places[made] = place
        return made

    return make


def _making_buckets(trace: TraceContext, original: Any, places: Places) -> Callable[..., Any]:
    """Return what makes a reducer's buckets anew, in the order of the first backward. It is called
    before each forward. Its buckets are then views of what one trace has.
    """
    traces: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def make(reducer: Any) -> Any:
        if trace.off():
            return original(reducer)
        if traces.setdefault(reducer, ref(trace.itself))() is not trace.itself:
            where = f"{trace.user_line()}: DistributedDataParallel"
            raise UnsupportedOperatorError(f"{where}{_TRACED_BEFORE}")
        with trace.holding(Kind.COMMUNICATION), trace.placing_on(places.get(reducer)):
            return original(reducer)

    return make


def _calling(take_over: Callable[[nn.Module], None], _: Any) -> Callable[..., Any]:
    # Not yet a hook's turn: ``FSDPState._pre_forward`` would note that a forward has begun.
    # Named as attribution's ``CALL_MODULES`` say, so that a compiler goes on to what it calls.
    # ``FSDPModule`` is mixed into a module's own class, which brings ``__call__``.
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        take_over(module)
        return nn.Module.__call__(module, *args, **kwargs)

    return call


def _asking(take_over: Callable[[nn.Module], None], original: Any) -> Callable[..., Any]:
    """Return what every method of ``FSDPModule`` begins with."""

    def find_state(module: nn.Module) -> Any:
        take_over(module)
        return original(module)

    return find_state


class _TakenOver:
    """Modules that fixtures have sharded: restored after a trace. What they keep of a step, the
    buffers and streams of ``fully_shard``, is of one trace.
    """

    def __init__(self, trace: TraceContext, at_end: ExitStack, wrapped: WeakSet[Any]) -> None:
        self._trace, self._at_end, self._wrapped = trace, at_end, wrapped
        self._known: WeakSet[Any] = WeakSet()

    def __call__(self, module: nn.Module) -> None:
        """Take a module over, unless the trace has sharded it or knows it already."""
        trace = self._trace
        if module in self._wrapped or module in self._known or trace.off() or trace.stands:
            return
        kind = _of_fsdp("FSDPModule")
        found = [one for one in module.modules() if isinstance(one, kind)]
        found = [one for one in found if one not in self._wrapped and one not in self._known]
        self._known.update(found)  # which are asked for their state now
        if trace.target.world is None or not all(map(distributed.is_of_this_world, found)):
            self._known.difference_update(found)
            where = f"{trace.user_line()}: {type(module).__name__} (FSDPModule)"
            raise UnsupportedOperatorError(f"{where}{_BEFORE}")
        for one in found:
            self._at_end.callback(distributed.sharding_kept(one))
            trace.note_module(one)


def _refusing(trace: TraceContext, original: Any) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        if trace.on_thread():
            raise UnsupportedOperatorError(f"{trace.user_line()}: {_OLD}")
        return original(*args, **kwargs)

    return method


_FOREACH = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""What treats the tensors of its lists one by one (torch/distributed/tensor/_ops/
single_dim_strategy.py, ``_expand_single_dim_strategy_to_mesh``)."""


def _joining(original: Any) -> Any:
    """Join the meshes of ``fully_shard`` and of tensor parallelism once, not for every parameter:
    a mesh of 512 processes takes a millisecond. What is made is on the host.
    """
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
        found = original(self, alike.with_lists(called, alike.first))
        outputs, asked = found.output_spec, found.redistribute_schema
        return with_changes(
            found,
            output_spec=alike.spread(outputs) if isinstance(outputs, (list, tuple)) else outputs,
            redistribute_schema=asked and alike.with_lists(asked, alike.places),
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
        if in_place and args and isinstance(args[0], distributed.tensor_spec()):
            return args[0].tensor_meta
        return original(self, called)

    return show


class _Alike:
    """The elements of an operator's lists, of which many are the same in each list."""

    def __init__(self, lists: frozenset[int], first: Sequence[int], places: Sequence[int]) -> None:
        self._lists = lists
        """Which arguments they are."""
        self.first = first
        """Where each kind of elements stands first."""
        self.places = places
        """Which kind each element is, in the order of ``first``."""

    @classmethod
    def of(cls, called: Any) -> "_Alike | None":
        """Return them, or None if no two are the same, or one has symbolic sizes."""
        args, spec = called.args_schema, distributed.tensor_spec()
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

    def spread(self, values: Sequence[Any]) -> Any:
        """Return what belongs to each element, from what belongs to each kind."""
        return type(values)(values[place] for place in self.places)  # type: ignore[call-arg]

    def with_lists(self, called: Any, order: Sequence[int]) -> Any:
        """Return the operator with elements of its lists: ``first`` of each kind, or ``places``."""
        kind: Any = distributed.op_schema()
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
