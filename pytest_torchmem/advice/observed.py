"""What a step has that can be changed, found by running it once, and its modules by their paths."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.torch_private.modes import FunctionMode
from pytest_torchmem.torch_private.module_calls import module_calls
from pytest_torchmem.torch_private.patches import replaced
from pytest_torchmem.torch_private.tensors import current_graph_task, view_base

Layers: TypeAlias = tuple[str, str]
"""Modules of one kind: their path with ``*`` for numbers, and the name of their class."""

Function: TypeAlias = Callable[..., Any]
_Functions: TypeAlias = frozenset[Function]
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[Function, nn.Module, Args, Kwargs], Any]
"""Called with torch's own ``Module.__call__``, a module, and what that is called with."""


class ModuleNames(threading.local):
    """The paths of modules below the outermost one that is called; ``""`` for that itself.

    A module that a checkpoint calls by itself later keeps the path that it had.
    """

    def __init__(self) -> None:
        self.known: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.depth = 0

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[str]:
        """Be in a call of a module, whose path is given."""
        if not self.depth and module not in self.known:
            for path, one in module.named_modules():
                self.known.setdefault(one, path)
        self.depth += 1
        try:
            yield self.known.get(module, "")
        finally:
            self.depth -= 1


@contextmanager
def every_call(how: Callable[[str, int], Call | None]) -> Iterator[None]:
    """Have calls of modules done by what ``how(path, depth)`` returns, unless that is ``None``.

    The outermost module has the path ``""`` and the depth 0.
    """
    names = ModuleNames()

    def instead(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with names.within(self) as path:
                other = how(path, names.depth - 1)
                if other is None:
                    return original(self, *args, **kwargs)
                return other(original, self, args, kwargs)

        return call

    with module_calls(instead):
        yield


def layers_of(path: str, module: nn.Module) -> Layers:
    """Return which layers a module is one of."""
    return fold(path)[0], type(module).__name__


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
    """What there is to change."""

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
    zero = {kind: kind.zero_grad for kind in (Optimizer, nn.Module)}

    def noting(kind: Any) -> Callable[..., None]:
        def zero_grad(self: Any, set_to_none: bool = True) -> None:
            found.zeroing = found.zeroing or not set_to_none
            zero[kind](self, set_to_none)

        return zero_grad

    mode = _Observer(found)
    with ExitStack() as stack:
        for kind in zero:
            stack.enter_context(replaced(kind, zero_grad=noting(kind)))
        stack.enter_context(every_call(_Modules(found).how))
        stack.enter_context(mode)
        yield
    mode.forget_unsafe()


class _Modules:
    """Notes modules as they are called."""

    def __init__(self, found: Observed) -> None:
        self._found = found
        self._seen: WeakSet[nn.Module] = WeakSet()

    def how(self, path: str, depth: int) -> Call | None:
        def call(original: Function, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
            if module not in self._seen:
                self._seen.add(module)
                if path:
                    self._found.layers.setdefault(layers_of(path, module), []).append(path)
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.dtype in (torch.float32, torch.float64):
                        pattern = fold(f"{path}.{name}" if path else name)[0]
                        nbytes = self._found.buffers.get(pattern, 0) + buffer.nbytes
                        self._found.buffers[pattern] = nbytes
            return original(module, *args, **kwargs)

        return call


class _Observer(FunctionMode):
    """Looks at the functions of torch that a program calls."""

    def __init__(self, found: Observed) -> None:
        super().__init__()
        self._found = found
        self._attribution = Attribution()
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

    def _line(self) -> str:
        return self._attribution.user_line()

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
