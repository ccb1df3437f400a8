"""The memory of graphs, read from them: which storages there are, and how long they live.

Nothing is run. Each node of a graph that AOTAutograd made has fake tensors (``meta["val"]``), which
tell the storages of real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from pytest_torchmem.errors import UsageError
from pytest_torchmem.graphs.storages import Storages


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
        """Return the peak of the forward."""
        return max((n.peak for n in self.nodes if n.phase == "forward"), default=self.baseline)

    @property
    def backward_peak(self) -> int | None:
        """Return the peak of the backward, or ``None`` without one."""
        peaks = [n.peak for n in self.nodes if n.phase == "backward"]
        return max(peaks) if peaks else None

    @property
    def peak(self) -> int:
        """Return the highest peak."""
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
        _refuse_unless_graph(graph)
    walk = _Walk(Storages(graphs))
    inputs = walk.begin(graphs)
    baseline = walk.live
    nodes = list(walk.run(forward, "forward", held=inputs))
    own = _returned_to_program(forward, backward)[mutated:]
    held = inputs.union(walk.addresses(own))
    if backward is not None:
        walk.let_go(held.union(walk.addresses(_saved(forward, backward))))
    else:
        walk.let_go(held)
    retained = walk.live
    if backward is not None:
        nodes += walk.run(backward, "backward", held=held)
    return GraphProfile(tuple(nodes), baseline, retained, walk.live)


class _Walk:
    """What is alive on a walk through graphs, by the addresses of storages."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._alive: dict[int, int] = {}
        self.live = 0

    def addresses(self, nodes: Iterable[fx.Node]) -> list[int]:
        """Return the addresses of the storages of nodes' results."""
        return [address for node in nodes for address, _ in self._storages.of(node)]

    def begin(self, graphs: list[fx.GraphModule]) -> frozenset[int]:
        """Make what the first of some graphs is given and what all of them hold, and return it."""
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
        """Free all but what is ``kept``."""
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


def _refuse_unless_graph(graph: Any) -> None:
    found = getattr(graph, "graph", None)
    if not isinstance(found, fx.Graph):
        raise UsageError(
            f"expected a torch.fx.GraphModule, not {type(graph).__name__}: pass graphs of "
            'AOTAutograd, such as trace(model, x, mode="aot").graphs'
        )
    if not found.find_nodes(op="output"):
        raise UsageError("the graph has no output node: what it returns is not known")


def _outputs(graph: fx.GraphModule) -> list[fx.Node]:
    [output] = [node for node in graph.graph.nodes if node.op == "output"]
    returned = output.args[0]
    several = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [one for one in several if isinstance(one, fx.Node)]


def _saved_names(backward: fx.GraphModule | None) -> frozenset[str]:
    """Return the names of what the forward returns for the backward: there they are the same."""
    nodes = backward.graph.nodes if backward is not None else ()
    return frozenset(node.name for node in nodes if node.op == "placeholder")


def _saved(forward: fx.GraphModule, backward: fx.GraphModule) -> list[fx.Node]:
    names = _saved_names(backward)
    return [node for node in _outputs(forward) if node.name in names]


def _returned_to_program(forward: fx.GraphModule, backward: fx.GraphModule | None) -> list[fx.Node]:
    """Return the outputs before those for the backward, which come last."""
    outputs, names = _outputs(forward), _saved_names(backward)
    last = len(names.intersection(node.name for node in outputs))
    return outputs[: len(outputs) - last]
