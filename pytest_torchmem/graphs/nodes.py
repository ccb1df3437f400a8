"""The memory of a module's operators, or of a graph node by node."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx

from pytest_torchmem.profile.node_table import NodeTable, Row
from pytest_torchmem.profile.operator_calls import GRAPH_NODE
from pytest_torchmem.tracing.trace import trace

_META = ("fwd_in", "fwd_tmp", "fwd_out", "bwd_tmp", "bwd_out", "fwd_flops", "bwd_flops")


def node_table(target: Any, *args: Any, **kwargs: Any) -> NodeTable:
    """Trace one training step of ``target``, and return the memory and work of its operators.

    The arguments are those of ``trace``. Of a ``torch.fx.GraphModule`` each row has its ``node``,
    and each node's ``meta`` gets what it needs: ``meta["memory"]`` is its ``Row``, and
    ``fwd_in``, ``fwd_tmp``, ``fwd_out``, ``bwd_tmp``, ``bwd_out`` (bytes), ``fwd_flops``,
    ``bwd_flops`` and ``save_fwd_in`` (whether the backward needs what it read) are its figures.
    Raises what ``trace`` raises.
    """
    if not isinstance(target, fx.GraphModule):
        return trace(target, *args, **kwargs).node_table()
    table = trace(_noting(target), *args, **kwargs).node_table()
    rows = {row.node: row for row in table.by_node()}
    for node in target.graph.nodes:
        row = rows.get(node.name) or Row("forward", "", "", "", node=node.name)
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
