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
from pytest_torchmem.interception.context import LASTING, Layer, TraceContext, calling
from pytest_torchmem.interception.python_api import program
from pytest_torchmem.interception.world import refuse_symmetric_memory
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.step import imports, trees
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
    program.LAUNCHER,
)


def _of_fsdp(name: str) -> Any:
    """Return a class of ``torch.distributed.fsdp``, or None where that is not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


#: Methods of ``torch.distributed.Logger`` (torch/csrc/distributed/c10d/logger.cpp).
_LOGGING = ("set_construction_data_and_log", "set_runtime_stats_and_log")


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
    sharding = map(_of_fsdp, ("FSDPModule", "FullyShardedDataParallel"))
    kinds = (nn.parallel.DistributedDataParallel, *filter(None, sharding))
    for path, inner in trees.modules_by_path(target):
        if kind := next((kind for kind in kinds if isinstance(inner, kind)), None):
            where = f"{type(target).__name__}.{path}" if path else type(target).__name__
            raise UnsupportedOperatorError(f"{where} ({kind.__name__}){_BEFORE}")


@contextmanager
def split_modules(trace: TraceContext) -> Iterator[None]:
    """Follow the modules that the program splits over processes. What is imported in the course of
    the trace is followed from then on.
    """
    with ExitStack() as stack:
        splitting = _Splitting(trace, stack)
        if not trace.stands:
            stack.callback(splitting.forget_states)
        followed: set[str] = set()
        wanted: list[tuple[Any, Mapping[str, Any]]] = []

        def follow(*modules: str) -> None:
            for module in modules:
                for owner, name, method in splitting.followed(module):
                    key = f"{getattr(owner, '__name__', '')}.{name}"
                    if owner is not None and hasattr(owner, name) and key not in followed:
                        followed.add(key)
                        place = patches.Replaceable.of(owner, name)
                        instead = _calling_module if name == _CALL else calling
                        wanted.append(place.by(instead(method, place.original)))
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
        stack.enter_context(imports.told_of_imports(follow))
        yield


_CALL = "__call__"


def _calling_module(method: Callable[..., Any], original: Any) -> Callable[..., Any]:
    # Named as attribution's ``CALL_MODULES`` say, so that a compiler goes on to what it calls.
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return method(original, module, *args, **kwargs)

    return call


_FOREACH = ("aten::_foreach_", "aten::_amp_foreach_", "aten::_fused_")
"""What treats the tensors of its lists one by one (torch/distributed/tensor/_ops/
single_dim_strategy.py, ``_expand_single_dim_strategy_to_mesh``)."""


class _Splitting:
    """What stands for functions of torch by which modules are split, in one trace."""

    def __init__(self, trace: TraceContext, at_end: ExitStack) -> None:
        self._trace, self._at_end = trace, at_end
        self._wrapped: WeakSet[Any] = WeakSet()
        """Modules that the trace has sharded."""
        self._known: WeakSet[Any] = WeakSet()
        """Modules that fixtures have sharded and that were taken over."""
        self._joined: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def followed(self, module: str) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield what a module brings and this torch has: owners, names, and what stands there."""
        if module.startswith("torch.distributed.fsdp"):
            kind = _of_fsdp("FSDPModule")
            yield kind, _CALL, self._call
            yield kind, distributed.STATE_OF_SHARDING, self._find_state
            yield _of_fsdp("FullyShardedDataParallel"), "__init__", self._refuse
            yield patches.sharding_state(), "init", self._shard
            yield patches.fully_sharding(), patches.SHARDED_STATES, self._note
            yield patches.replicating(), patches.REPLICATED_STATES, self._note
            if self._trace.target.gpu is not None:
                yield distributed.mesh_class(), distributed.CONCATENATE, self._join
        shortens = distributed.op_schema() is not None and distributed.tensor_spec() is not None
        if module.startswith("torch.distributed.tensor") and shortens:
            # An operator on lists is propagated once for each different tensor, with the same
            # result.
            yield distributed.propagator(), distributed.NOT_CACHED, _propagate
            yield distributed.propagator(), distributed.SHOWN, _show
        if module.startswith("torch.distributed.checkpoint"):
            yield patches.checkpoint_agreement(), "__init__", self._agree_alone
            yield patches.checkpoint_planner(), patches.VALIDATE_PLAN, self._validate
        if module.startswith("torch.distributed.pipelining"):
            # Before torch 2.12 and since 2.15 no stage asks others in messages of its own
            # (torch/distributed/pipelining/stage.py).
            yield patches.pipeline_stage(), patches.FORWARD_VOTE, self._vote
            yield patches.pipeline_stage(), patches.BACKWARD_RESULT, self._tell_vote
        if module == program.LAUNCHER:
            launch = partial(program.launch_agent, self._trace)
            yield sys.modules.get(program.LAUNCHER), "launch_agent", launch

    def forget_states(self) -> None:
        """Forget what ``fully_shard`` made for modules, which are given back as they were."""
        states = patches.module_states()
        if states is not None:
            for module in tuple(self._wrapped):
                states.pop(module, None)

    def _note(self, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Note what ``fully_shard`` or ``replicate`` is given, before it changes anything."""
        for one in [module] if isinstance(module, nn.Module) else list(module):
            self._trace.note_module(one)
        return original(module, *args, **kwargs)

    def _shard(self, original: Any, state: Any, modules: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the modules that are split (``FSDPState.init``)."""
        if not self._trace.off():
            self._wrapped.update(modules)
        return original(state, modules, *args, **kwargs)

    def _vote(self, original: Any, stage: Any, has_backward: bool, received_acc: Any = None) -> Any:
        """Ask the stages before whether tensors' shapes have to be sent. The others are taken to
        have been given as much as this one.
        """
        if self._trace.off():
            return original(stage, has_backward, received_acc)
        kind: Any = patches.needs_messages()
        given = not kind.needs_dynamic(getattr(stage, patches.GIVEN_TENSORS), has_backward)
        own = torch.tensor([int(given)], dtype=torch.int32, device=stage.device)
        return own if received_acc is None else received_acc * own

    def _tell_vote(self, original: Any, stage: Any, received_result: Any = None) -> Any:
        """Tell the stages before what the vote was."""
        return original(stage, received_result) if self._trace.off() else received_result

    def _agree_alone(
        self, original: Any, agreement: Any, group: Any, use_dist: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Let a process plan its part of a checkpoint alone (``_DistWrapper.__init__``): what
        others would write is not known, and not written.
        """
        original(agreement, group, use_dist and self._trace.off(), *args, **kwargs)

    def _validate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Find no parts of tensors that no process writes."""
        found = original(*args, **kwargs)
        if self._trace.off():
            return found
        return [] if isinstance(found, list) else True

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not yet a hook's turn: ``FSDPState._pre_forward`` would note that a forward has begun.
        # ``FSDPModule`` is mixed into a module's own class, which brings ``__call__``.
        self._take_over(module)
        return nn.Module.__call__(module, *args, **kwargs)

    def _find_state(self, original: Any, module: nn.Module) -> Any:
        """Take over a module whose state any method of ``FSDPModule`` asks for."""
        self._take_over(module)
        return original(module)

    def _take_over(self, module: nn.Module) -> None:
        """Restore after the trace what a module that a fixture has sharded keeps of a step, the
        buffers and streams of ``fully_shard``; unless the trace has sharded it or knows it already.
        """
        trace, others = self._trace, (self._wrapped, self._known)
        if any(module in known for known in others) or trace.off() or trace.stands:
            return
        kind = _of_fsdp("FSDPModule")
        found = [one for one in module.modules() if isinstance(one, kind)]
        found = [one for one in found if not any(one in known for known in others)]
        self._known.update(found)  # which are asked for their state now
        if trace.target.world is None or not all(map(distributed.is_of_this_world, found)):
            self._known.difference_update(found)
            where = f"{trace.user_line()}: {type(module).__name__} (FSDPModule)"
            raise UnsupportedOperatorError(f"{where}{_BEFORE}")
        for one in found:
            self._at_end.callback(distributed.sharding_kept(one))
            trace.note_module(one)

    def _refuse(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trace.on_thread():
            raise UnsupportedOperatorError(f"{self._trace.user_line()}: {_OLD}")
        return original(*args, **kwargs)

    def _join(self, original: Any, meshes: list[Any]) -> Any:
        """Join the meshes of ``fully_shard`` and of tensor parallelism once, not for every
        parameter: a mesh of 512 processes takes a millisecond. What is made is on the host.
        """
        key = tuple(map(id, meshes))
        if key not in self._joined:  # beside the meshes, so that no other gets their addresses
            self._joined[key] = tuple(meshes), original(meshes)
        return self._joined[key][1]


def _propagate(original: Any, propagator: Any, called: Any) -> Any:
    """Propagate each kind of tensors once (``propagate_op_sharding_non_cached``)."""
    alike = _Alike.of(called) if called.op.name().startswith(_FOREACH) else None
    if alike is None:
        return original(propagator, called)
    found = original(propagator, alike.with_lists(called, alike.first))
    outputs, asked = found.output_spec, found.redistribute_schema
    return with_changes(
        found,
        output_spec=alike.spread(outputs) if isinstance(outputs, (list, tuple)) else outputs,
        redistribute_schema=asked and alike.with_lists(asked, alike.places),
    )


def _show(original: Any, propagator: Any, called: Any) -> Any:
    """Run an operator on fake tensors to see its outputs, unless there are none, or it is written
    to its first argument as it lies there.
    """
    operator, args = called.op, called.args_schema
    if not schema(operator).returns:
        return None
    in_place = called.is_inplace_op() and torch.Tag.pointwise in operator.tags
    if in_place and args and isinstance(args[0], distributed.tensor_spec()):
        return args[0].tensor_meta
    return original(propagator, called)


def _of_processes(trace: TraceContext) -> Layer[None]:
    """Replace what starts processes, and in each what agrees with the others.

    ``DistributedDataParallel`` compares its parameters' shapes with others': it writes to and
    reads from memory (torch/csrc/distributed/c10d/reducer.cpp,
    ``verify_params_across_processes``). In a trace all processes run the same program.
    """
    replacements, verify = program.Processes(trace).replacements(), patches.VERIFY_PARAMETERS
    original = getattr(torch.distributed, verify, None)
    if original is None:
        return Layer(replacements, None)
    logger: Any = torch.distributed.Logger  # type: ignore[attr-defined]
    # torch's own asks gloo's and NCCL's groups for more than fake ones have
    quiet = {
        name: patches.unless(trace.off, lambda *_, **__: None, getattr(logger, name))
        for name in _LOGGING
    }
    reducer: Any = torch.distributed.Reducer  # type: ignore[attr-defined]
    made, rebuild = _Reducers(trace), patches.REBUILD_BUCKETS
    functions = {
        verify: patches.unless(trace.off, lambda *_: None, original),
        "Reducer": lambda *args, **kwargs: made.make(reducer, *args, **kwargs),
    }
    buckets = {rebuild: calling(made.rebuild, getattr(reducer, rebuild))}
    others = (torch.distributed, functions), (logger, quiet), (reducer, buckets)
    return Layer([*replacements, *others], None)


class _Reducers:
    """What makes reducers and their buckets of gradients. C++ makes these where the parameters are,
    which to it is the host (reducer.cpp, ``initialize_buckets``).
    """

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self._places: WeakKeyDictionary[Any, torch.device | None] = WeakKeyDictionary()
        """Where the parameters are."""
        self._traces: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def make(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trace.off():
            return original(parameters, *args, **kwargs)
        first = next(iter(parameters), None)
        place = None if first is None else first.device
        with self._trace.holding(Kind.COMMUNICATION), self._trace.placing_on(place):
            made = original(parameters, *args, **kwargs)
        self._places[made] = place
        return made

    def rebuild(self, original: Any, reducer: Any) -> Any:
        """Make the buckets anew, in the order of the first backward. It is called before each
        forward. The buckets are then views of what one trace has.
        """
        trace = self._trace
        if trace.off():
            return original(reducer)
        if self._traces.setdefault(reducer, ref(trace.itself))() is not trace.itself:
            where = f"{trace.user_line()}: DistributedDataParallel"
            raise UnsupportedOperatorError(f"{where}{_TRACED_BEFORE}")
        with trace.holding(Kind.COMMUNICATION), trace.placing_on(self._places.get(reducer)):
            return original(reducer)


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
        of_args, spec = enumerate(called.args_schema), distributed.tensor_spec()
        lists = {at: one for at, one in of_args if isinstance(one, (list, tuple)) and one}
        of_tensors = [one for one in lists.values() if isinstance(one[0], spec)]
        count = len(of_tensors[0]) if of_tensors else 0
        if any(len(one) != count for one in lists.values()):
            return None
        if any(isinstance(one, (list, tuple)) for one in called.kwargs_schema.values()):
            return None
        elements = zip(*lists.values(), strict=True)
        keys = [tuple(_key(one, spec) for one in together) for together in elements]
        try:
            kinds = {key: kind for kind, key in enumerate(dict.fromkeys(keys))}
        except TypeError:  # symbolic sizes have no hash
            return None
        if len(kinds) == count:
            return None
        places = [kinds[key] for key in keys]
        return cls(frozenset(lists), [*map(places.index, kinds.values())], places)

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
