"""What functions for operators are handed: the call and its trace, arguments in groups, and outputs
of structured kernels, made before the kernel runs with the geometry of its meta.

A function for an operator takes the arguments of the schema that it uses, by name. ``self`` of a
schema may be called ``input``, as torch's own documentation does. What several schemas have in
common can be taken together: a parameter that is annotated with a named tuple gets that tuple, made
of what its fields name, of arguments and of what a trace hands over besides; a field with a default
may be missing in a schema.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from pytest_torchmem.operators.workspace import Buffer, on_meta
from pytest_torchmem.step import trees
from pytest_torchmem.torch_private import keys
from pytest_torchmem.torch_private.kernels import Ran, recorded, run_composite_implicit


class Trace(Protocol):
    """What a decomposition may ask of the trace that it runs in."""

    def working(self) -> AbstractContextManager[None]:
        """Let tensors be used without being intercepted."""

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the fake GPU."""

    def made_before_step(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage was there before the step."""

    def keep(self, buffer: Buffer, overload: keys.OpOverload) -> None:
        """Book a library's workspace that stays, made by ``overload`` at its first use."""


@dataclass(slots=True, eq=False, repr=False)
class GivenCall:
    """An operator and its arguments as they were given, for what hands all of them on."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    overload: keys.OpOverload


@dataclass(slots=True, eq=False, repr=False)
class CompositeCall(GivenCall):
    """The call of a composite operator, which its path on a device stands in for."""

    trace: Trace

    def __call__(self) -> Any:
        """Run ATen's own composite kernel with the same arguments."""
        return self.of(*self.args, **self.kwargs)

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """Run ATen's own kernel, or for an operator that is not composite the operator itself."""
        if keys.is_composite_implicit(self.overload):
            return run_composite_implicit(self.overload, *args, **kwargs)
        with keys.below_autograd():
            return self.overload(*args, **kwargs)

    def as_on_meta(self) -> Any:
        """Run the operators that ATen's own kernel calls for arguments on ``meta``: what it asks
        whether they are on the CPU, it answers there as it does of a GPU.
        """
        # In inference mode operators come as they are called, composite ones too.
        with self.trace.working(), torch.inference_mode(False):
            beside = trees.replace_tensors((list(self.args), dict(self.kwargs)), on_meta)
            result, every = recorded(self.overload, *beside[0], **beside[1])
        own = [ref(tensor) for tensor in trees.argument_tensors(beside)]
        given = trees.argument_tensors((self.args, self.kwargs))
        meant = {id(one): tensor for one, tensor in zip(own, given, strict=True)}
        for ran in every:
            _run_again(ran, meant)
        returned = trees.replace_tensors(result, lambda tensor: meant[id(ref(tensor))])
        while meant:  # C++ gives back the last first
            meant.popitem()
        return returned


def _run_again(ran: Ran, meant: dict[int, Tensor]) -> None:
    """Run an operator on the tensors that are meant by weak references, by the ids of these."""
    for one in ran.gone:
        meant.pop(id(one), None)
    args, kwargs = trees.replace_leaves((ran.args, ran.kwargs), ref, lambda one: meant[id(one)])
    made = trees.argument_tensors(ran.operator(*args, **kwargs))
    meant.update((id(one), made.pop(0)) for one in trees.argument_leaves(ran.result, ref))


def meta_result(operator: keys.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Return what ``operator`` returns for its arguments on ``meta``."""
    return operator(*trees.replace_tensors(args, on_meta), **trees.replace_tensors(kwargs, on_meta))


def outputs(call: GivenCall) -> Any:
    """Make the outputs of a structured operator."""
    return trees.replace_tensors(meta_result(call.overload, *call.args, **call.kwargs), empty_as)


def empty_as(geometry: Tensor) -> Tensor:
    """Make a tensor with the geometry of one on ``meta``."""
    return torch.empty_strided(geometry.shape, geometry.stride(), dtype=geometry.dtype)


def proxy(out: Tensor, geometry: Tensor) -> Tensor:
    """Return what a structured kernel writes to instead of ``out``: a temporary where the strides
    are not those it sets; maybe_create_proxy in torchgen/dest/register_dispatch_key.py.
    """
    return out if out.stride() == geometry.stride() else empty_as(geometry)


class AttentionArguments(NamedTuple):
    """What attention's kernel depends on; native/transformers/sdp_utils_cpp.h, ``sdp_params``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    enable_gqa: bool = False

    @property
    def is_jagged(self) -> bool:
        """Whether the inputs are jagged, of which neither what is asked of dense tensors nor what
        is asked of strided nested ones is checked here but in torch/nested/_internal/sdpa.py;
        ``has_only_dense_inputs``, ``has_for_nested_inputs``.
        """
        return self.query.is_nested or self.key.is_nested or self.value.is_nested

    @property
    def trains(self) -> bool:
        """Whether a backward will follow; ``input_requires_grad``."""
        inputs = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


class ConvolutionSettings(NamedTuple):
    """Those of ``aten::convolution`` and its backward that are no tensors; ``ConvParams``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int] = (1,)
    transposed: bool = False
    output_padding: Sequence[int] = (0,)
    groups: int = 1


class RecurrentSettings(NamedTuple):
    """Those of ``aten::_cudnn_rnn`` and its backward behind the tensors of the forward."""

    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: Sequence[int]
    dropout_state: Tensor | None

    @property
    def directions(self) -> int:
        """How many directions a sequence is read in."""
        return 2 if self.bidirectional else 1

    @property
    def transposes(self) -> bool:
        """Whether tensors have the batch before the steps; those of packed sequences never have."""
        return self.batch_first and not self.batch_sizes


class LayerSettings(NamedTuple):
    """Those of ``aten::lstm.input`` and its kin behind the states."""

    params: list[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool


#: Parameters that are no arguments of the operator: what a trace hands over besides, and all the
#: arguments that were given, for what is the same for operators of other schemas: those with a
#: position, the tensors among them, or all by name.
BESIDES = frozenset({"machine", "outputs", "call", "nested", "known", "cudnn", "take"})
WHOLES = frozenset({"operands", "tensors", "arguments"})
_EMPTY: Any = inspect.Parameter.empty

_OTHER_NAMES = (("self", "input"), ("grad_output", "grad"))
"""What schemas call an argument, and what functions may; ``_cdist_backward`` since torch 2.15."""
_Getter = Callable[[Sequence[Any], Mapping[str, Any], Mapping[str, Any]], Any]
"""Returns what a parameter gets of a call's arguments, and of what a trace hands over besides."""


class Unbindable(TypeError):
    """A function asks for what an operator does not have."""


class Binding:
    """Calls a function with what it takes of the arguments of one overload."""

    __slots__ = ("_function", "_getters", "_operator", "_position_of")

    def __init__(self, function: Callable[..., Any], overload: keys.OpOverload) -> None:
        """Raise ``Unbindable`` where the function asks for what no overload can give."""
        self._function, self._operator = function, overload
        described = keys.schema(overload).arguments
        self._position_of = {str(argument.name): at for at, argument in enumerate(described)}
        for name, other in _OTHER_NAMES:
            if name in self._position_of:
                self._position_of.setdefault(other, self._position_of[name])
        self._getters = {
            one.name: self._getter(one.name, one.default, _group(function, one.annotation))
            for one in _parameters(function)
        }

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], **besides: Any) -> Any:
        """Call the function for a call of the operator; ``besides`` is what a trace hands over."""
        getters = self._getters.items()
        return self._function(**{name: get(args, kwargs, besides) for name, get in getters})

    def _getter(self, name: str, default: Any, group: type[Any] | None = None) -> _Getter:
        at = self._position_of.get(name)
        if name in BESIDES:
            return lambda args, kwargs, besides: besides[name]
        if name in WHOLES and at is None:
            return self._whole(name)
        if group is not None:
            given = group._field_defaults
            fields = [(one, self._getter(one, given.get(one, _EMPTY))) for one in group._fields]
            return lambda *call: group(**{one: get(*call) for one, get in fields})
        if at is None:
            if default is _EMPTY:
                raise Unbindable(f"{self._operator.name()} has no argument {name!r}")
            return lambda args, kwargs, besides: kwargs.get(name, default)
        argument = keys.schema(self._operator).arguments[at]
        own, has_default = str(argument.name), argument.has_default_value()
        other = argument.default_value if has_default else default
        return lambda args, kwargs, besides: args[at] if at < len(args) else kwargs.get(own, other)

    def _whole(self, name: str) -> _Getter:
        if name == "operands":
            return lambda args, kwargs, besides: list(args)
        if name == "tensors":
            return lambda args, kwargs, besides: [
                given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)
            ]
        names = [str(argument.name) for argument in keys.schema(self._operator).arguments]
        return lambda args, kwargs, besides: {**dict(zip(names, args, strict=False)), **kwargs}


class InOrder:
    """Calls a function of a user with all arguments in their order, behind what ``leads``."""

    __slots__ = ("_function", "_leads", "_outputs")

    def __init__(
        self, function: Callable[..., Any], overload: keys.OpOverload, leads: Sequence[str]
    ) -> None:
        self._function = function
        self._leads = tuple(leads)
        # ``out=`` is where the outputs are, not another argument.
        self._outputs = frozenset(
            str(argument.name) for argument in keys.schema(overload).arguments if argument.is_out
        )

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], **besides: Any) -> Any:
        """Call the function for a call of the operator; ``besides`` is what a trace hands over."""
        given = {name: value for name, value in kwargs.items() if name not in self._outputs}
        return self._function(*[besides[name] for name in self._leads], *args, **given)


Bound = Binding | InOrder


def _group(function: Callable[..., Any], annotation: Any) -> type[Any] | None:
    """Return the named tuple that a parameter is annotated with, perhaps by its name; None for
    other annotations.
    """
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    found = getattr(function, "__globals__", {}).get(name)
    is_group = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    return found if is_group else None


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """Return a function's parameters; raises ``Unbindable`` for ``*args`` and ``**kwargs``."""
    parameters = list(inspect.signature(function).parameters.values())
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise Unbindable(f"{function.__qualname__} takes {one}: name what it uses")
    return parameters
