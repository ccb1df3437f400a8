"""The memory of graphs, read from them: which storages there are, and how long they live.

Nothing is run. Each node of a graph that AOTAutograd made has fake tensors (``meta["val"]``), which
share storages where the real ones will, but for a few things. Where the partitioner put one node in
the place of another that computes the same, a view lies on the fake storage of the one that is gone
(torch/_functorch/compile_utils.py, ``fx_graph_cse``). Each graph has constants of its own, which
are one for fake tensors. Some kernels leave more than their result needs: a loss that is reduced
lies on a storage of all of its elements (aten/src/ATen/native/BinaryOps.cpp,
``TORCH_META_FUNC(smooth_l1_loss)``); those that call other operators are run alone. And some
outputs of kernels of the GPU are on the host, which a fake tensor does not say.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api.factories import device_said
from pytest_torchmem.graphs.operators_at import run_alone
from pytest_torchmem.interception.plan import Output, Plan, Same, find_plan, geometry_of_arguments
from pytest_torchmem.operators.spec import spec_of
from pytest_torchmem.profile.node_table import NodeRow, NodeTable
from pytest_torchmem.profile.timeline import GRAPH_NODE
from pytest_torchmem.step.trees import argument_leaves, argument_tensors, tensors_in
from pytest_torchmem.targets.target import DeviceName
from pytest_torchmem.torch_private.keys import OpOverload, is_view
from pytest_torchmem.torch_private.tensors import storage_address
from pytest_torchmem.tracing.trace import trace


class GraphStorages:
    """The storages of some graphs, whose values have the same names in all of them, by address."""

    def __init__(self, graphs: Iterable[fx.GraphModule]) -> None:
        nodes = [node for graph in graphs for node in graph.graph.nodes]
        said = [one for node in nodes for one in _devices(node)]
        self._device: DeviceName = "cuda" if any(device == "cuda" for _, device in said) else "cpu"
        self._same: dict[int, int] = {}
        """Storages that are another one, by their addresses."""
        self._nbytes: dict[int, int] = {}
        """The bytes of those that fake tensors do not tell; 0 of those that are elsewhere."""
        self._plans: dict[Any, Plan | None] = {}
        for tensor, device in said:
            if device != self._device:
                self._nbytes[storage_address(tensor)] = 0
        self._inner = run_alone(nodes, _value, self._device)
        for node in nodes:
            inner = self._inner.get(node)
            if inner is not None:
                results = _values(node)
                if len(inner.made) == len(results):
                    for result, nbytes in zip(results, inner.made, strict=True):
                        if nbytes is not None:
                            self._nbytes.setdefault(self._address(result), nbytes)
            elif node.op == "call_function" and isinstance(node.target, OpOverload):
                self._look_at(node, node.target)

    def of(self, node: fx.Node) -> list[tuple[int, int]]:
        """Return the storages of a node's result on the graphs' device, by address, with bytes.

        Raises ``UsageError`` for a node that is read and says nothing of its result.
        """
        if _value(node) is None and "val" not in node.meta and node.op != "output" and node.users:
            raise UsageError(
                f"node {node.name!r} has no tensors in meta['val']: pass graphs of AOTAutograd, "
                'such as trace(model, x, mode="aot").graphs'
            )
        found = []
        for tensor in _values(node):
            address = self._address(tensor)
            nbytes = self._nbytes.get(address, tensor.untyped_storage().nbytes())
            found.append((address, int(nbytes)))  # of symbols: what they stand for
        return found

    def inner_peak(self, node: fx.Node) -> int:
        """Return the bytes that a node of several operators makes and holds at once, or 0."""
        found = self._inner.get(node)
        return 0 if found is None else found.peak

    def _address(self, tensor: Tensor) -> int:
        address = storage_address(tensor)
        return self._same.get(address, address)

    def _look_at(self, node: fx.Node, operator: OpOverload) -> None:
        results = _values(node)
        if is_view(operator):
            for base in _values(node.args[0])[:1] if node.args else ():
                address = self._address(base)
                for view in results:
                    if self._address(view) != address:
                        self._same[storage_address(view)] = address
                        self._nbytes.setdefault(address, base.untyped_storage().nbytes())
            return
        plan = self._plan(node, operator)
        outputs = [] if plan is None else argument_leaves(plan.outputs, (Output, Same))
        if plan is None or len(outputs) != len(results):
            return
        on_host = spec_of(operator).on(self._device).host_outputs
        for place, (output, result) in enumerate(zip(outputs, results, strict=True)):
            if isinstance(output, Output) and plan.slots[output.slot] >= 0:
                nbytes = 0 if place in on_host else plan.slots[output.slot]
                self._nbytes.setdefault(self._address(result), nbytes)

    def _plan(self, node: fx.Node, operator: OpOverload) -> Plan | None:
        """Return the plan of a node's call; ``None`` where it has none before it is run."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
        tensors: list[Tensor] = []
        spec = spec_of(operator)
        try:
            key = operator, geometry_of_arguments((*args, *kwargs.values()), tensors), (*kwargs,)
            if key not in self._plans:
                own = spec.on(self._device).meta
                found = argument_tensors((args, kwargs))
                self._plans[key] = find_plan(spec, args, dict(kwargs), found, own)
            return self._plans[key]
        except Exception:  # symbols for sizes, data that decides, a device without a kernel
            return None


def _devices(node: fx.Node) -> list[tuple[Tensor, str]]:
    """Return the tensors of a node's result, each with the type of its device.

    A constant that a trace left behind does not say that it was on the GPU; the fake tensor of its
    node does.
    """
    values, fakes = _values(node), list(tensors_in(node.meta.get("val")))
    saying = fakes if node.op == "get_attr" and len(fakes) == len(values) else values
    return [(one, device_said(said).type) for one, said in zip(values, saying, strict=True)]


def _value(node: fx.Node) -> Any:
    """Return the fake tensors of a node's result, or what of its module a node stands for.

    That is a constant, of which each graph has its own, or a graph for an operator of higher order.
    """
    held: Any = node.graph.owning_module if node.op == "get_attr" else None
    for name in str(node.target).split("."):
        held = getattr(held, name, None)
    return node.meta.get("val") if held is None else held


def _values(node: Any) -> list[Tensor]:
    """Return the fake tensors of a node's result that have a storage, or the real constant."""
    value = _value(node) if isinstance(node, fx.Node) else None
    return [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided]


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
    """What is alive while it runs: also what it reads for the last time."""
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
    walk = _Walk(GraphStorages(graphs))
    inputs = walk.begin(graphs)
    baseline = walk.live
    nodes = list(walk.run(forward, "forward", held=inputs))
    outputs, given = _outputs(forward), () if backward is None else backward.graph.nodes
    names = {node.name for node in given if node.op == "placeholder"}  # as the forward has them
    last = len(names.intersection(node.name for node in outputs))
    own = outputs[: len(outputs) - last][mutated:]
    held = inputs.union(walk.addresses(own))
    saved = [node for node in outputs if node.name in names]
    walk.let_go(held.union(walk.addresses(saved)))
    retained = walk.live
    if backward is not None:
        nodes += walk.run(backward, "backward", held=held)
    return GraphProfile(tuple(nodes), baseline, retained, walk.live)


class _Walk:
    """What is alive on a walk through graphs, by the addresses of storages."""

    def __init__(self, storages: GraphStorages) -> None:
        self._storages = storages
        self._alive: dict[int, int] = {}
        self.live = 0

    def addresses(self, nodes: Iterable[fx.Node]) -> list[int]:
        return [address for node in nodes for address, _ in self._storages.of(node)]

    def begin(self, graphs: list[fx.GraphModule]) -> frozenset[int]:
        """Make and return the first graph's inputs and the constants of all graphs."""
        given = [node for node in graphs[0].graph.nodes if node.op == "placeholder"]
        held = [node for one in graphs for node in one.graph.nodes if node.op == "get_attr"]
        return frozenset(self._make_all(given + held))

    def run(self, graph: fx.GraphModule, phase: str, held: frozenset[int]) -> Iterator[NodeMemory]:
        """Yield the memory of each node; what is ``held`` outlives the graph."""
        nodes = list(graph.graph.nodes)
        self._make_all(node for node in nodes if node.op == "placeholder")
        returned = frozenset(self.addresses(_outputs(graph)))
        deaths = self._deaths(nodes, held | returned)
        for node in nodes:
            if node.op == "output":
                continue
            before = self.live
            made = self._make_all([node]) if node.op != "placeholder" else []
            sizes = sum(self._alive[address] for address in made)
            peak = max(self.live, before + self._storages.inner_peak(node))
            for address in deaths.get(node, ()):
                self.live -= self._alive.pop(address, 0)
            operator = str(node.target) if node.op != "placeholder" else ""
            yield NodeMemory(phase, node.name, operator, sizes, peak, self.live)
        self.let_go(held | returned)  # of values that nobody reads

    def let_go(self, kept: frozenset[int]) -> None:
        for address in [one for one in self._alive if one not in kept]:
            self.live -= self._alive.pop(address)

    def _make_all(self, nodes: Iterable[fx.Node]) -> list[int]:
        made = []
        for address, nbytes in (storage for node in nodes for storage in self._storages.of(node)):
            if address not in self._alive:
                self._alive[address] = nbytes
                self.live += nbytes
                made.append(address)
        return made

    def _deaths(self, nodes: list[fx.Node], kept: frozenset[int]) -> Mapping[fx.Node, list[int]]:
        """Return after which node each storage is gone: the last that reads a value on it.

        A value that nobody reads stays until the end (``torch.fx.Interpreter`` keeps it).
        """
        last: dict[int, fx.Node] = {}
        unread: set[int] = set()
        for node in nodes:
            if node.op != "output":
                last.update(dict.fromkeys(self.addresses(node.all_input_nodes), node))
                unread.update(() if node.users else self.addresses([node]))
        deaths: dict[fx.Node, list[int]] = {}
        for address, node in last.items():
            if address not in kept and address not in unread:
                deaths.setdefault(node, []).append(address)
        return deaths


def _outputs(graph: fx.GraphModule) -> list[fx.Node]:
    [output] = [node for node in graph.graph.nodes if node.op == "output"]
    returned = output.args[0]
    several = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [one for one in several if isinstance(one, fx.Node)]


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
