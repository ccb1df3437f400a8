"""A module as the graphs that AOTAutograd makes of it, run operator by operator.

AOTAutograd traces forward and backward together on fake tensors, and its partitioner cuts the joint
graph in two: which activations are saved is decided there, by a minimal cut, and not by the nodes
of autograd. Both graphs are run by ``torch.fx.Interpreter``, which lets go of each value after its
last use. This is what ``torch.compile(backend="aot_eager_decomp_partition")`` runs, without its
decompositions, and what compilers begin with.
"""

import copy
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, fx, nn

from pytest_torchmem.errors import UsageError
from pytest_torchmem.interception.attribution import place_among
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.profile.timeline import GRAPH_NODE
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private import compiler, patches

_NO_ADDRESS = "Cannot access data pointer"
"""How torch refuses the address of a tensor without one (c10/core/StorageImpl.cpp)."""


class NamedGraph(fx.Interpreter):
    """One graph, run with the names of its nodes written down."""

    def run_node(self, n: fx.Node) -> Any:
        token = GRAPH_NODE.set(n.name)
        try:
            return super().run_node(n)
        finally:
            GRAPH_NODE.reset(token)


class _Output:
    """The output of a module, of any class, and its tensors."""

    def __init__(self, value: Any) -> None:
        self._value = value
        found: dict[int, Tensor] = {}
        _collect(value, found, set())
        self._known = tuple(found)
        self.tensors = list(found.values())

    def with_tensors(self, tensors: list[Tensor]) -> Any:
        """Return the same with others in the place of its tensors."""
        return copy.deepcopy(self._value, dict(zip(self._known, tensors, strict=True)))


def _collect(value: Any, found: dict[int, Tensor], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
        return
    if id(value) in seen or isinstance(value, (nn.Module, type, str, bytes)):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = value
    else:
        inside = ()
    for item in (*inside, *getattr(value, "__dict__", {}).values()):
        _collect(item, found, seen)


class AheadOfTime:
    """The graphs of one module, made when it is first called with inputs of a kind."""

    def __init__(self, module: nn.Module, interceptor: Interceptor | None) -> None:
        self._module = module
        self._forward = module.forward
        self._interceptor = interceptor
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._tracing = False
        self.graphs: list[fx.GraphModule] = []
        """Those that were made, each forward before its backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._tracing:
            return self._forward(*args, **kwargs)
        # What modules have as attributes, and not as parameters or buffers: AOTAutograd takes no
        # tensors that it is not given; ``torch.compile`` gives it these as well.
        others = {
            f"{path}.{name}" if path else name: value
            for path, one in self._module.named_modules()
            for name, value in vars(one).items()
            if isinstance(value, Tensor) and value.is_leaf
        }
        # Graphs are made for the geometry of inputs, other arguments, and the modes.
        tensors = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
            for tensor in tensors_in((args, kwargs, others))
        )
        values = repr(
            [value for value in (*args, *kwargs.values()) if not isinstance(value, (Tensor, dict))]
        )
        modes = torch.is_grad_enabled(), self._module.training, torch.is_autocast_enabled("cpu")
        key = (tensors, values, modes)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(len(others))
        parameters = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        try:
            # The module's own forward runs, and composite operators go the way of the device.
            tracing = patches.having(self, _tracing=True)
            with tracing, compiler.taken_for_compiling(), self._in_mode(makes_graphs=True):
                return compiled(parameters, buffers, others, args, kwargs)
        except RuntimeError as error:
            what = _without_graph(error)
            if not what:
                raise
            frames = walk_tb(error.__traceback__)
            line = place_among([(frame.f_code.co_filename, at) for frame, at in frames])
            raise UsageError(f"{line}: AOTAutograd makes no graph of {what}") from None

    def _compile(self, others: int) -> Callable[..., Any]:
        # Imported when first asked for: they import the compiler.
        from functorch.compile import aot_function, min_cut_rematerialization_partition  # type: ignore[import-untyped]

        made: list[_Output] = []

        def functional(parameters: Any, buffers: Any, others: Any, args: Any, kwargs: Any) -> Any:
            state = (parameters, buffers, others)
            made[:] = [_Output(torch.func.functional_call(self._module, state, args, kwargs))]
            return made[0].tensors

        held = sum(1 for _ in self._module.parameters()) + sum(1 for _ in self._module.buffers())
        compiled: Callable[..., list[Tensor]] = aot_function(
            functional,
            fw_compiler=self._run_as_it_is,
            bw_compiler=self._run_as_it_is,
            partition_fn=min_cut_rematerialization_partition,
            num_params_buffers=held + others,
        )

        def run(*inputs: Any) -> Any:
            tensors = compiled(*inputs)  # which calls ``functional`` the first time
            return made[0].with_tensors(tensors)

        return run

    def _run_as_it_is(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)

        def run(args: list[Any]) -> Any:
            running = patches.having(self, _tracing=False)
            with running, compiler.taken_for_compiling(False), self._in_mode(makes_graphs=False):
                return NamedGraph(graph).boxed_run(args)

        return compiler.given_a_list(run)

    def _in_mode(self, makes_graphs: bool) -> AbstractContextManager[None]:
        interceptor = self._interceptor
        if interceptor is None:
            return nullcontext()
        return interceptor.in_mode(interceptor.mode._replace(makes_graphs=makes_graphs))


def _without_graph(error: RuntimeError) -> str:
    """Return what AOTAutograd makes no graph of, and what to do, or "" for another error."""
    if _NO_ADDRESS in str(error):
        return (
            "what asks for a tensor's address, as layers of cuDNN do (nn.LSTM): trace it with "
            'mode="eager"'
        )
    if isinstance(error, compiler.DECIDES_BY_VALUES):
        return (
            f"a program that decides by the values of tensors ({error}): trace it with "
            'mode="eager", or with mode="inductor", which breaks the graph there'
        )
    return ""


def run_ahead_of_time(module: nn.Module, interceptor: Interceptor | None = None) -> AheadOfTime:
    """Let a module run as its graphs from now on, and return these."""
    graphs = AheadOfTime(module, interceptor)
    module.forward = types.MethodType(lambda self, *args, **kwargs: graphs(*args, **kwargs), module)
    return graphs
