"""The memory of graphs: which storages there are as they run, and how long they live.

Each node of a graph that AOTAutograd made has fake tensors (``meta["val"]``). Those of inputs and
constants say what a graph is given: it is run in a trace on tensors like these.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.factories import device_said
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.profile.node_table import NodeRow, NodeTable
from pytest_torchmem.profile.timeline import GRAPH_NODE, Kind
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.targets.target import DeviceName
from pytest_torchmem.torch_private.tensors import storage_address
from pytest_torchmem.tracing.trace import WATCH, trace


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory while one node of a graph runs, in bytes."""

    phase: str
    """``"forward"`` or ``"backward"``."""
    node: str
    operator: str
    made: int
    """What it makes."""
    peak: int
    """What is alive while it runs: also what it reads for the last time, and on the CPU the 8 bytes
    of a number that is wrapped in a tensor meanwhile."""
    live: int
    """What is alive when it has run, and what nobody reads any more is gone."""


@dataclass(frozen=True, slots=True)
class GraphProfile:
    """The memory of graphs node by node; kernels' workspaces are not included."""

    nodes: tuple[NodeMemory, ...]
    baseline: int
    """What the forward is given (parameters, buffers and inputs), and constants of the graphs."""
    retained: int
    """What is alive when the forward has run."""
    end: int
    """What is alive when all graphs have run."""

    @property
    def forward_peak(self) -> int:
        return max((n.peak for n in self.nodes if n.phase == "forward"), default=self.baseline)

    @property
    def backward_peak(self) -> int | None:
        """Return the peak of the backward, or ``None`` without one."""
        peaks = [n.peak for n in self.nodes if n.phase == "backward"]
        return max(peaks) if peaks else None

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak or 0)


def graph_profile(
    forward: fx.GraphModule, backward: fx.GraphModule | None = None, *, mutated: int = 0
) -> GraphProfile:
    """Return the memory of a forward graph, and of its backward, from the lifetimes of storages.

    The graphs are those of AOTAutograd (``trace(model, x, mode="aot").graphs``), or any whose nodes
    have tensors in ``meta["val"]``. They are taken to run as ``torch.fx.Interpreter`` runs them: a
    value lives until the node that reads it last has run. What the forward is given lives
    throughout, and so do constants of the graphs and what the forward returns to the program. What
    it returns for the backward lives until that has read it, and so does the tangent. ``mutated``
    is how many of the first outputs are new values of inputs (running statistics): these are copied
    when the forward has run, and are gone unless the backward reads them. A result that nobody
    reads lives until its graph ends.

    Raises ``UsageError`` for a graph without these tensors.
    """
    graphs = [forward] if backward is None else [forward, backward]
    for graph in graphs:
        found = getattr(graph, "graph", None)
        if not isinstance(found, fx.Graph):
            raise UsageError(
                f"expected a torch.fx.GraphModule, not {type(graph).__name__}: pass graphs of "
                'AOTAutograd, such as trace(model, x, mode="aot").graphs'
            )
        if not found.find_nodes(op="output"):
            raise UsageError("the graph has no output node: what it returns is not known")
    program = _Program(forward, backward, mutated)
    token = WATCH.set(program)
    try:
        profile = trace(program.run, device=program.device, memory="unlimited", values="none")
    finally:
        WATCH.reset(token)
    timeline = profile.timeline
    tensors = tuple(
        one._replace(nbytes=0) if one.kind is Kind.WORKSPACE else one
        for one in timeline.allocations
    )
    live = timeline._replace(allocations=tensors).live()[program.before :]
    phases = zip(graphs, ("forward", "backward"), strict=False)
    nodes = [one for graph, phase in phases for one in program.nodes(graph, phase, live)]
    baseline, retained, end = (live[position] for position in program.moments)
    return GraphProfile(tuple(nodes), baseline, retained, end)


class _Program:
    """Runs graphs as a program does that holds what they are given and what they return to it.

    It takes note of how many events there are on the graphs' device.
    """

    def __init__(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None, mutated: int
    ) -> None:
        self._forward, self._backward, self._mutated = forward, backward, mutated
        graphs = [forward] if backward is None else [forward, backward]
        nodes = [node for graph in graphs for node in graph.graph.nodes]
        said = (device_said(one) for node in nodes for one in tensors_in(node.meta.get("val")))
        self.device: DeviceName = "cuda" if any(one.type == "cuda" for one in said) else "cpu"
        self._place = torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")
        self._constants = [node for node in nodes if isinstance(_constant(node), Tensor)]
        self._events: list[int] = []
        self.before = 0
        """How many events of what was there before stand before them."""
        self.moments: list[int] = []
        """When the forward begins, when it has run, and when all graphs have."""
        self._spans: dict[fx.Node, tuple[int, int]] = {}
        """When each node begins, and when it has run."""

    def at_begin(self, ledger: Ledger) -> None:
        self._events = ledger.on(self._place).events

    def at_end(self, ledger: Ledger) -> None:
        self.before = len(ledger.on(self._place).earlier)

    @torch.no_grad()
    def run(self) -> object:
        then = _inputs(self._backward)
        inputs = _made((*_inputs(self._forward), *self._constants))
        constants = {node: inputs.pop(node) for node in self._constants}
        self.moments.append(len(self._events))
        returned = self._run(self._forward, constants, dict(inputs))
        names = {node.name for node in then}  # as the forward has them
        saved = {node.name: value for node, value in returned if node.name in names}
        own = [value for _, value in returned[: len(returned) - len(saved)][self._mutated :]]
        del returned
        self.moments.append(len(self._events))
        gradients = []
        if self._backward is not None:
            given = _made(node for node in then if node.name not in saved)
            given |= {node: saved.pop(node.name) for node in then if node.name in saved}
            gradients = self._run(self._backward, constants, given)
        self.moments.append(len(self._events))
        return inputs, constants, own, gradients

    def _run(
        self, graph: fx.GraphModule, constants: dict[fx.Node, Tensor], given: dict[fx.Node, Any]
    ) -> list[tuple[fx.Node, Any]]:
        """Run a graph on what it is ``given``, and return its outputs with their nodes."""
        here, spans = len(self._events), self._spans
        spans |= dict.fromkeys(given, (here, here))
        noting = _Noting(graph, constants, self._events, spans)
        result = noting.run(initial_env=given, enable_io_processing=False)
        given.clear()  # of values that nobody reads
        both = (*graph.graph.output_node().args, result)
        several = (one if isinstance(one, (tuple, list)) else (one,) for one in both)
        pairs = zip(*several, strict=True)
        return [(node, value) for node, value in pairs if isinstance(node, fx.Node)]

    def nodes(self, graph: fx.GraphModule, phase: str, live: Sequence[int]) -> Iterator[NodeMemory]:
        """Yield the memory of each node, given the bytes that are alive after so many events."""
        spans = [self._spans[node] for node in graph.graph.nodes]
        after = (start for start, _ in spans[1:])
        for node, (start, stop), gone in zip(graph.graph.nodes, spans, after, strict=False):
            operator = str(node.target) if node.op != "placeholder" else ""
            made, most = live[stop] - live[start], max(live[start : stop + 1])
            yield NodeMemory(phase, node.name, operator, made, most, live[gone])


class _Noting(fx.Interpreter):
    """Runs a graph; a value is gone when the node that reads it last has run."""

    def __init__(
        self,
        graph: fx.GraphModule,
        constants: dict[fx.Node, Tensor],
        events: list[int],
        spans: dict[fx.Node, tuple[int, int]],
    ) -> None:
        super().__init__(graph)
        self._constants, self._events, self._spans = constants, events, spans

    def run_node(self, n: fx.Node) -> Any:
        begun = len(self._events)
        result = self._constants[n] if n in self._constants else super().run_node(n)
        self._spans[n] = begun, len(self._events)
        return result


def _inputs(graph: fx.GraphModule | None) -> list[fx.Node]:
    return [] if graph is None else list(graph.graph.find_nodes(op="placeholder"))


def _constant(node: fx.Node) -> Any:
    """Return what of its module a node stands for: each graph has constants of its own."""
    held: Any = node.graph.owning_module if node.op == "get_attr" else None
    for name in str(node.target).split("."):
        held = getattr(held, name, None)
    return held


def _made(nodes: Iterable[fx.Node]) -> dict[fx.Node, Any]:
    """Return tensors as nodes are given them; those that share a storage get some that do.

    A constant that a trace left behind does not say that it was on the GPU; the fake tensor of its
    node does. Raises ``UsageError`` for a node that is read and says nothing of its value.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def made(like: Tensor, said: Tensor) -> Tensor:
        storage, device = like.untyped_storage(), device_said(said)
        address = storage_address(like)
        if address not in storages:
            memory = torch.empty(int(storage.nbytes()), dtype=torch.uint8, device=device)
            storages[address] = memory.untyped_storage()
        size, stride = [*map(int, like.size())], [*map(int, like.stride())]
        offset = int(like.storage_offset())
        empty = torch.empty(0, dtype=like.dtype, device=device)
        return empty.set_(storages[address], offset, size, stride)

    found: dict[fx.Node, Any] = {}
    for node in nodes:
        value, constant = node.meta.get("val"), _constant(node)
        if node.users and value is None and constant is None and "val" not in node.meta:
            raise UsageError(
                f"node {node.name!r} has no tensors in meta['val']: pass graphs of AOTAutograd, "
                'such as trace(model, x, mode="aot").graphs'
            )
        if isinstance(constant, Tensor):
            found[node] = made(constant, value if isinstance(value, Tensor) else constant)
        elif isinstance(value, Tensor):
            found[node] = made(value, value)
        else:
            found[node] = int(value) if isinstance(value, torch.SymInt) else value
    return found


_META = ("fwd_in", "fwd_tmp", "fwd_out", "bwd_tmp", "bwd_out", "fwd_flops", "bwd_flops")


def node_table(target: Any, *args: Any, **kwargs: Any) -> NodeTable:
    """Trace one training step of ``target``, and return the memory and work of its operators.

    The arguments are those of ``trace``. Of a ``torch.fx.GraphModule`` each row has its ``node``,
    and each node's ``meta`` gets what it needs: ``meta["memory"]`` is its ``NodeRow``, and
    ``fwd_in``, ``fwd_tmp``, ``fwd_out``, ``bwd_tmp``, ``bwd_out`` (bytes), ``fwd_flops``,
    ``bwd_flops`` and ``save_fwd_in`` (whether the backward needs what it read) are its figures.
    Raises what ``trace`` raises.
    """
    if not isinstance(target, fx.GraphModule):
        return trace(target, *args, **kwargs).node_table()
    table = trace(_noting(target), *args, **kwargs).node_table()
    rows = {row.node: row for row in table.by_node()}
    for node in target.graph.nodes:
        row = rows.get(node.name) or NodeRow("forward", "", "", "", node=node.name)
        node.meta["memory"] = row
        node.meta.update((name, getattr(row, name)) for name in _META)
        node.meta["save_fwd_in"] = row.fwd_in_saved > 0
    return table


def note(name: str) -> None:
    """Say that the operators from now on belong to the node ``name`` of a graph."""
    GRAPH_NODE.set(name)


def _noting(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module whose graph says before each node which one it is.

    The code that is made of it lets go of values where that of the original does.
    """
    graph = copy.deepcopy(module.graph)
    for node in tuple(graph.nodes):
        if node.op != "placeholder":
            with graph.inserting_before(node):
                graph.call_function(note, ("" if node.op == "output" else node.name,))
    return fx.GraphModule(module, graph, type(module).__name__)
