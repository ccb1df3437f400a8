"""Changes of what a step compiles, made to the graphs of Dynamo before they are compiled.

A compiled module or function is not called: its graph is. Its nodes tell which modules, functions
and lines of the program they are of, so that a change in the program is one of nodes.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from pytest_torchmem.advice.changes import CHUNKS, CROSS_ENTROPY, LINEAR, PASSING, Layers, Observed
from pytest_torchmem.interception.attribution import place_among
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.step.trees import tensors_in

GraphChange = Callable[[fx.GraphModule], None]
_CHANGES: ContextVar[tuple[GraphChange, ...]] = ContextVar("changes of graphs", default=())
_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)
_ROOT = re.compile(r"^.*(?:\]|\bcell_contents)\.?")
"""Where Dynamo found the outermost module: a variable, an item, a closure."""
_CALLS = ("call_function", "call_method", "call_module")
_NUMBERS = count(1 << 32)
"""Of checkpoints; those that Dynamo writes down itself have numbers from 0 on."""
_PASSING_METHODS = frozenset(one.__name__ for one in PASSING)


def change_graph(graph: fx.GraphModule) -> None:
    for change in _CHANGES.get():
        change(graph)


@contextmanager
def graphs_changed(change: GraphChange) -> Iterator[None]:
    """Have a change made to each graph of Dynamo before it is compiled."""
    token = _CHANGES.set((*_CHANGES.get(), change))
    try:
        yield
    finally:
        _CHANGES.reset(token)


@contextmanager
def observing(found: Observed) -> Iterator[None]:
    """Find what the graphs of a step have to change: modules to checkpoint, and losses."""
    known: dict[str, list[str]] = {}
    divided: set[str] = set()

    def observe(graph: fx.GraphModule) -> None:
        here: dict[str, list[str]] = {}
        for node in graph.graph.nodes:
            nbytes = sum(one.nbytes for one in tensors_in(node.meta.get("example_value")))
            for path, kind in {path: kind for _, path, kind in _modules_of(node) if path}.items():
                if path not in known and path not in here:
                    layers: Layers = fold(path)[0], kind
                    found.layers.setdefault(layers, []).append(path)
                here.setdefault(path, []).append(str(node.target))
                found.kept[path] = found.kept.get(path, 0) + nbytes
            if node.target is CROSS_ENTROPY and _linear_before(node) is not None:
                found.losses.setdefault(_line_of(node), set())
        # Of a module that a graph ends in the middle of, a checkpoint would end the graph before.
        divided.update(path for path in here if known.get(path, here[path]) != here[path])
        known.update(here)

    with graphs_changed(observe):
        yield
    for layers in [*found.layers]:
        found.layers[layers] = [path for path in found.layers[layers] if path not in divided]
        if not found.layers[layers]:
            del found.layers[layers]


def _modules_of(node: fx.Node) -> Iterator[tuple[str, str, str]]:
    """Yield the modules that a node is of, outermost first: their call, path and class."""
    if node.op in _CALLS:
        for call, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            name = kind if isinstance(kind, str) else kind.__name__
            yield call, _ROOT.sub("", path), name.rpartition(".")[2]


def _line_of(node: fx.Node) -> str:
    frames = _FRAME.findall(node.stack_trace or "")
    return place_among([(file, int(line)) for file, line in frames])


def checkpointed(paths: Collection[str]) -> AbstractContextManager[None]:
    """Have calls of modules computed again in the backward, as Dynamo writes down checkpoints.

    torch/_higher_order_ops/wrap.py, ``tag_activation_checkpoint``: nodes have a tag, and a number
    that those of one checkpoint have in common, and the partitioner of AOTAutograd goes by both.
    """
    chosen = frozenset(paths)

    def tag(graph: fx.GraphModule) -> None:
        known: dict[str, int] = {}
        for node in graph.graph.nodes:
            calls = [call for call, path, _ in _modules_of(node) if path in chosen]
            if calls:
                _tag(node, known.setdefault(calls[0], next(_NUMBERS)))

    return graphs_changed(tag)


def _tag(node: fx.Node, number: int) -> None:
    node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node.meta["ac_graph_id"] = number


def chunked_loss(line: str) -> AbstractContextManager[None]:
    """Have the cross entropy at a line computed with its linear layer, in chunks of rows.

    A loss that is fused with it would end the graph: Dynamo does not follow it.
    """

    def change(graph: fx.GraphModule) -> None:
        for node in [*graph.graph.nodes]:
            if node.target is CROSS_ENTROPY and _line_of(node) == line:
                linear = _linear_before(node)
                if linear is not None:
                    _without_logits(graph.graph, node, linear)
        graph.recompile()

    return graphs_changed(change)


def _linear_before(loss: fx.Node) -> fx.Node | None:
    """Return the linear layer whose output a loss is given, in another form at most."""
    node = loss.args[0] if loss.args else loss.kwargs.get("input")
    logits = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        return None
    while isinstance(node, fx.Node) and node.target is not LINEAR:
        passing = _PASSING_METHODS if node.op == "call_method" else {*PASSING, operator.getitem}
        node = node.args[0] if node.target in passing and node.args else None
    return node if isinstance(node, fx.Node) else None


def _without_logits(graph: fx.Graph, loss: fx.Node, linear: fx.Node) -> None:
    """Compute a loss of what its linear layer is given; who else reads the logits gets a number."""
    hidden, *layer = linear.args
    options = dict(zip(("input", "target"), loss.args, strict=False)) | loss.kwargs
    logits, target = options.pop("input"), options.pop("target")
    number = _example(logits).shape[0]
    with graph.inserting_before(loss):
        rows = _called(graph, _rows, hidden, number)
        some, wanted = (_called(graph, Tensor.chunk, one, CHUNKS) for one in (rows, target))
        parts = []
        for place in range(len(_example(some))):
            given = [_called(graph, operator.getitem, one, place) for one in (some, wanted)]
            part = _called(graph, _loss_of, *given, *layer, **linear.kwargs, **options)
            _tag(part, next(_NUMBERS))
            parts.append(part)
        loss.replace_all_uses_with(_called(graph, _mean, parts, number))
    graph.erase_node(loss)
    graph.eliminate_dead_code()
    if linear.users:
        shown = _example(linear)
        with graph.inserting_before(linear):
            alone = _called(graph, _stand_in, hidden, shown.dtype, [*shown.shape])
        linear.replace_all_uses_with(alone)
        graph.erase_node(linear)


def _example(value: Any) -> Any:
    return value.meta["example_value"] if isinstance(value, fx.Node) else value


def _called(graph: fx.Graph, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call to a graph, with what it gives of fake tensors, as Dynamo does."""
    node = graph.call_function(function, args, kwargs)
    given, by_name = fx.node.map_arg((args, kwargs), _example)
    first = next(tensors_in(given))
    with cast(Any, first).fake_mode:
        node.meta["example_value"] = function(*given, **by_name)
    return node


def _rows(hidden: Tensor, number: int) -> Tensor:
    rows = hidden.reshape(-1, hidden.shape[-1])
    return rows if len(rows) == number else rows[:number]


def _loss_of(
    rows: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return F.cross_entropy(F.linear(rows, weight, bias), target, **{**options, "reduction": "sum"})


def _mean(parts: list[Tensor], number: int) -> Tensor:
    return torch.stack(parts).sum() / number


def _stand_in(hidden: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return hidden.new_zeros((), dtype=dtype).expand(shape)
