"""What a step has that can be changed, found by running it once, and the changes.

Each is a context in which the step runs as if it had been written so. A compiled module or function
is not called: its graph is. Its nodes tell which modules, functions and lines of the program they
are of, so that a change in the program is one of nodes, made before the graph is compiled.
"""

import operator
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.interception.attribution import Attribution, place_among
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.step.trees import Args, Kwargs, tensors_in
from pytest_torchmem.torch_private import module_calls, patches
from pytest_torchmem.torch_private.modes import FunctionMode
from pytest_torchmem.torch_private.tensors import current_graph_task, view_base

Layers: TypeAlias = tuple[str, str]
"""Modules of one kind: their path with ``*`` for numbers, and the name of their class."""

Function: TypeAlias = Callable[..., Any]
_Functions: TypeAlias = frozenset[Function]
Call: TypeAlias = Callable[[Function, nn.Module, Args, Kwargs], Any]
"""Called with torch's own ``Module.__call__``, a module, and what that is called with."""


class _ModuleNames(threading.local):
    """The paths of modules below the outermost one that is called; ``""`` for that itself.

    A module that a checkpoint calls by itself later keeps the path that it had.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.depth = 0


def every_call(how: Callable[[str, int, nn.Module], Call | None]) -> AbstractContextManager[None]:
    """Have calls of modules done by what ``how`` returns, called with their path, depth and the
    module, unless that is ``None``. The outermost module has the path ``""`` and the depth 0.
    """
    names = _ModuleNames()

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not names.depth and self not in names.known:
                for path, one in self.named_modules():
                    names.known.setdefault(one, path)
            other = how(names.known.get(self, ""), names.depth, self)
            names.depth += 1
            try:
                if other is None:
                    return original(self, *args, **kwargs)
                return other(original, self, args, kwargs)
            finally:
                names.depth -= 1

        return call

    return module_calls.ModuleMethods({"__call__": instead})


def _zero_grads(how: Callable[[bool], bool]) -> AbstractContextManager[None]:
    """Have ``zero_grad`` do what ``how`` returns for its ``set_to_none``."""

    def instead(original: Callable[[Any, bool], None]) -> Callable[..., None]:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            original(self, how(set_to_none))

        return zero_grad

    kinds = (Optimizer, nn.Module)
    return patches.replaced_all([(kind, {"zero_grad": instead(kind.zero_grad)}) for kind in kinds])


#: Functions with an argument ``inplace``; modules like ``nn.ReLU`` call them with their own.
WITH_INPLACE: _Functions = frozenset(
    {
        *(F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.elu, F.selu, F.celu, F.rrelu, F.threshold),
        *(F.silu, F.mish, F.hardswish, F.hardsigmoid, F.dropout, F.alpha_dropout),
        *(F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    }
)
#: Functions that have another one which writes over its argument.
IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(owner, name): getattr(torch.Tensor, f"{name}_")
    for owner in (torch, torch.Tensor)
    for name in ("relu", "tanh", "sigmoid")
}
OVERWRITING = frozenset({"tanh", "sigmoid"})
"""Those that no module and no function offers with ``inplace``."""
WIDENING: _Functions = frozenset({Tensor.float, Tensor.double, Tensor.to, Tensor.type})
#: What a tensor goes through between its linear layer and the loss, by the field's programs.
PASSING: _Functions = frozenset(
    {
        *WIDENING,
        *(getattr(Tensor, name) for name in ("view", "reshape", "flatten", "contiguous")),
        *(getattr(Tensor, name) for name in ("__getitem__", "squeeze", "unsqueeze", "narrow")),
        *(torch.flatten, torch.reshape, torch.squeeze, torch.narrow),
    }
)
LINEAR, CROSS_ENTROPY = F.linear, F.cross_entropy


@dataclass
class Observed:
    layers: dict[Layers, list[str]] = field(default_factory=dict)
    """The paths of modules that were called, by which layers they are."""
    kept: dict[str, int] = field(default_factory=dict)
    """The bytes that modules of compiled code make, by path: at most what they keep."""
    buffers: dict[str, int] = field(default_factory=dict)
    """The bytes of wide floating buffers, by their paths with ``*`` for numbers."""
    in_place: dict[str, dict[str, int]] = field(default_factory=dict)
    """Calls that could write over their argument: bytes, by function and line."""
    widened: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Conversions to a wider floating type, by line: that type, and the bytes."""
    losses: dict[str, set[int]] = field(default_factory=dict)
    """The numbers of calls of linear layers before a cross entropy, by the line of the loss."""
    zeroing: bool = False
    """Whether gradients are set to zero rather than to ``None``."""


@contextmanager
def observing(found: Observed) -> Iterator[None]:
    """Find what a step has to change while it runs."""

    def noting(set_to_none: bool) -> bool:
        found.zeroing = found.zeroing or not set_to_none
        return set_to_none

    observer = _Observer(found)
    with _zero_grads(noting), every_call(_noting_modules(found)), FunctionMode(observer.called):
        yield
    observer.forget_unsafe()


def _noting_modules(found: Observed) -> Callable[[str, int, nn.Module], None]:
    """Return what takes note of modules as they are called."""
    seen: WeakSet[nn.Module] = WeakSet()

    def note(path: str, depth: int, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if path:
            layers = fold(path)[0], type(module).__name__
            found.layers.setdefault(layers, []).append(path)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in (torch.float32, torch.float64):
                pattern = fold(f"{path}.{name}" if path else name)[0]
                found.buffers[pattern] = found.buffers.get(pattern, 0) + buffer.nbytes

    return note


class _Observer:
    def __init__(self, found: Observed) -> None:
        self._found = found
        self._line = Attribution().user_line
        self._linears = 0
        self._logits = WeakIdKeyDictionary()
        """The number of the linear layer, by what it returned and what that became."""
        self._overwritten = WeakIdKeyDictionary()
        """Tensors that calls could write over, and which calls."""
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """What functions returned."""
        self._unsafe: set[tuple[str, str]] = set()

    def called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            first = args[0] if args else None
            self._note_reads(args, kwargs)
            if func in WITH_INPLACE or func in IN_PLACE:
                self._note_in_place(func, first, kwargs)
            elif func is LINEAR and current_graph_task() == -1:
                self._linears += 1
                self._logits[result] = self._linears
            elif func is CROSS_ENTROPY:
                if isinstance(first, Tensor) and first in self._logits and first.dim() == 2:
                    self._found.losses.setdefault(self._line(), set()).add(self._logits[first])
            elif func in PASSING and isinstance(first, Tensor):
                number = self._logits.get(first)
                if number is not None and result.dim() and result.shape[-1] == first.shape[-1]:
                    self._logits[result] = number
            self._made[result] = None
            wide = func in WIDENING or kwargs.get("dtype") is not None
            if (
                wide
                and isinstance(first, Tensor)
                and first.is_floating_point()
                and result.is_floating_point()
                and result.dtype.itemsize > first.dtype.itemsize
            ):
                _, nbytes = self._found.widened.get(self._line(), ("", 0))
                about = str(first.dtype).removeprefix("torch."), nbytes + result.nbytes
                self._found.widened[self._line()] = about
        return result

    def _note_in_place(self, func: Any, first: Any, kwargs: dict[str, Any]) -> None:
        if not isinstance(first, Tensor) or kwargs.get("inplace"):
            return
        name, line = func.__name__, self._line()
        if first not in self._made:  # an input, which belongs to others
            self._unsafe.add((name, line))
        lines = self._found.in_place.setdefault(name, {})
        lines[line] = lines.get(line, 0) + first.nbytes
        for tensor in (first, view_base(first)):
            if tensor is not None:
                self._overwritten.setdefault(tensor, set()).add((name, line))

    def _note_reads(self, args: Any, kwargs: dict[str, Any]) -> None:
        """What is read again after a call cannot be written over by that call."""
        if not self._overwritten:
            return
        for one in (*args, *kwargs.values()):
            for tensor in one if isinstance(one, (list, tuple)) else (one,):
                if isinstance(tensor, Tensor):
                    for same in (tensor, view_base(tensor)):
                        if same is not None and same in self._overwritten:
                            self._unsafe |= self._overwritten[same]

    def forget_unsafe(self) -> None:
        """Leave out calls whose argument is needed afterwards."""
        found = self._found.in_place
        for name, line in self._unsafe:
            found[name].pop(line, None)
        for name in [name for name, lines in found.items() if not lines]:
            del found[name]


Entered = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class StepChange:
    """One change of a step: its name, the context to run in, and options of the trace."""

    text: str
    entered: tuple[Entered, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    figure: str = "peak"
    is_free: bool = False
    """Whether it changes neither results nor the number of operations much."""


def joined(changes: Sequence[StepChange]) -> StepChange:
    return StepChange(
        ", and ".join(change.text for change in changes),
        tuple(enter for change in changes for enter in change.entered),
    )


_RECOMPUTED: ContextVar[tuple[nn.Module, ...]] = ContextVar("within checkpoints", default=())


def checkpointed(paths: Collection[str]) -> AbstractContextManager[None]:
    """Have modules recompute their forward, as by ``checkpoint(module, use_reentrant=False)``."""

    def again(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        token = _RECOMPUTED.set((*_RECOMPUTED.get(), module))
        try:
            return module(*args, **kwargs)
        finally:
            _RECOMPUTED.reset(token)

    def call(original: Function, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        if any(one is module for one in _RECOMPUTED.get()) or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        return checkpoint(partial(again, module), *args, use_reentrant=False, **kwargs)

    chosen = frozenset(paths)
    return every_call(lambda path, *_: call if path in chosen else None)


def under_autocast(device: str) -> AbstractContextManager[None]:
    """Have the outermost modules run in bfloat16 by autocast."""

    def call(original: Function, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return original(module, *args, **kwargs)

    return every_call(lambda path, depth, module: None if depth else call)


@contextmanager
def stepping(option: str, value: bool) -> Iterator[None]:
    """Have every optimizer that knows an option (``foreach``, ``fused``) step with it."""
    before: list[tuple[dict[str, Any], Any]] = []

    def choose(optimizer: Optimizer, *call: Any) -> None:
        for group in optimizer.param_groups:
            if option in group and group[option] is not value:
                before.append((group, group[option]))
                group[option] = value

    try:
        with patches.replaced_all([module_calls.step_tables(choose)]):
            yield
    finally:
        for group, found in reversed(before):
            group[option] = found


def set_to_none() -> AbstractContextManager[None]:
    """Have ``zero_grad`` let go of gradients, whatever it is told."""
    return _zero_grads(lambda _: True)


def buffers_narrowed(pattern: str) -> AbstractContextManager[None]:
    """Have modules keep buffers of one pattern in bfloat16, from their first call on."""
    parent, _, name = pattern.rpartition(".")

    def narrow(path: str, depth: int, module: nn.Module) -> None:
        if fold(path)[0] != parent:
            return
        buffer = dict(module.named_buffers(recurse=False)).get(name)
        if buffer is not None and buffer.dtype in (torch.float32, torch.float64):
            setattr(module, name, buffer.to(torch.bfloat16))

    return every_call(narrow)


def overwriting(name: str, lines: Collection[str]) -> FunctionMode:
    """Have calls of one function at some lines write over their argument."""
    user_line = Attribution().user_line

    def called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if (
            getattr(func, "__name__", "") == name
            and (func in WITH_INPLACE or func in IN_PLACE)
            and isinstance(args[0] if args else None, Tensor)
            and not kwargs.get("inplace")
            and user_line() in lines
        ):
            if func in IN_PLACE:
                return IN_PLACE[func](*args, **kwargs)
            kwargs = {**kwargs, "inplace": True}
        return func(*args, **kwargs)

    return FunctionMode(called)


def kept_narrow(line: str) -> FunctionMode:
    """Leave out the conversions to a wider floating type at one line."""
    user_line = Attribution().user_line

    def called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        converts = func in WIDENING
        first = args[0] if args else None
        if (
            (converts or kwargs.get("dtype") is not None)
            and isinstance(first, Tensor)
            and first.is_floating_point()
            and user_line() == line
        ):
            if converts and _asks_for_wider(func, args, kwargs, first):
                return first
            if not converts and kwargs["dtype"].itemsize > first.dtype.itemsize:
                kwargs = {**kwargs, "dtype": first.dtype}
        return func(*args, **kwargs)

    return FunctionMode(called)


_WIDE = {Tensor.float: torch.float32, Tensor.double: torch.float64}


def _asks_for_wider(func: Any, args: Any, kwargs: dict[str, Any], first: Tensor) -> bool:
    """Return whether a conversion asks for a wider floating type, and for nothing else."""
    asked = [_WIDE[func]] if func in _WIDE else [*args[1:], *kwargs.values()]
    types = [one for one in asked if isinstance(one, torch.dtype)]
    types += [one.dtype for one in asked if isinstance(one, Tensor)]
    return len(types) == 1 and types[0].itemsize > first.dtype.itemsize


CHUNKS = 8
_ELEMENTS = 8
"""At least one of the widest type, whatever type they are of."""
HAS_FUSED = hasattr(F, "linear_cross_entropy")
"""Since torch 2.13."""


class _Layer(NamedTuple):
    """A linear layer that is not computed until the loss."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def losses_together(numbers: Collection[int], fused: bool) -> FunctionMode:
    """Have linear layers and the cross entropy of their output computed together."""
    return FunctionMode(_Losses(numbers, fused).called)


class _Losses:
    """What the program has in between is a number, expanded to the shape of the logits."""

    def __init__(self, numbers: Collection[int], fused: bool) -> None:
        self._numbers, self._fused = frozenset(numbers), fused
        self._linears = 0
        self._layers = WeakIdKeyDictionary()

    def called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else None
        if func is LINEAR and current_graph_task() == -1:
            self._linears += 1
            if self._linears in self._numbers:
                return self._put_off(*args, **kwargs)
        if not isinstance(first, Tensor) or first not in self._layers:
            return func(*args, **kwargs)
        layer = self._layers[first]
        if func is CROSS_ENTROPY:
            return self._loss(layer, *args, **kwargs)
        if func not in PASSING:
            return func(*args, **kwargs)
        # Without memory of the logits' size: what it became is asked of a tensor on meta.
        others = (one.to("meta") if isinstance(one, Tensor) else one for one in args[1:])
        shape = func(first.to("meta"), *others, **kwargs)
        stand_in = _stand_in(layer.hidden, shape.dtype, shape.shape)
        self._layers[stand_in] = layer
        return stand_in

    def _put_off(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype = hidden.dtype
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        stand_in = _stand_in(hidden, dtype, (*hidden.shape[:-1], weight.shape[0]))
        self._layers[stand_in] = _Layer(hidden, weight, bias)
        return stand_in

    def _loss(self, layer: _Layer, logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        rows = layer.hidden.reshape(-1, layer.hidden.shape[-1])[: len(logits)]
        if self._fused:
            for old in ("size_average", "reduce"):
                options.pop(old, None)
            return F.linear_cross_entropy(
                rows,
                layer.weight,
                target,
                linear_bias=layer.bias,
                options=nn.LinearCrossEntropyOptions(),
                **options,
            )
        options["reduction"] = "sum"

        def part(some: Tensor, wanted: Tensor) -> Tensor:
            found = F.linear(some, layer.weight, layer.bias).to(logits.dtype)
            return F.cross_entropy(found, wanted, **options)

        parts = [
            checkpoint(part, some, wanted, use_reentrant=False)
            for some, wanted in zip(rows.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        ]
        return torch.stack(parts).sum() / len(rows)


def _stand_in(like: Tensor, dtype: torch.dtype, shape: Any) -> Tensor:
    """Return a tensor of a shape and type without memory of its own, on that of another."""
    like = like.detach()
    if like.numel() < _ELEMENTS or not like.is_contiguous():
        return like.new_empty((), dtype=dtype).expand(shape)
    return like.view(-1)[:_ELEMENTS].view(dtype)[0].expand(shape)


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
def observing_graphs(found: Observed) -> Iterator[None]:
    """Find what the graphs of a step have to change: modules to checkpoint, and losses."""
    known: dict[str, list[str]] = {}
    divided: set[str] = set()

    def observe(graph: fx.GraphModule) -> None:
        here: dict[str, list[str]] = {}
        for node in graph.graph.nodes:
            nbytes = sum(one.nbytes for one in tensors_in(node.meta.get("example_value")))
            for path, kind in {path: kind for _, path, kind in _modules_of(node) if path}.items():
                if path not in known and path not in here:
                    found.layers.setdefault((fold(path)[0], kind), []).append(path)
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


def graphs_checkpointed(paths: Collection[str]) -> AbstractContextManager[None]:
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
            alone = _called(graph, _zeros, hidden, shown.dtype, [*shown.shape])
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


def _zeros(hidden: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return hidden.new_zeros((), dtype=dtype).expand(shape)
