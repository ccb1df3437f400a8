"""What functions for operators are handed: the call and its trace, and arguments in groups.

Outputs of structured kernels: made before the kernel runs, with the geometry of its meta.

Arguments that stand together in the schemas of several operators.

A function that is registered for such an operator takes them as one parameter, whose annotation is
one of these classes (``binding.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import on_meta
from pytest_torchmem.operators.workspace import Buffer
from pytest_torchmem.step.trees import replace_tensors
from pytest_torchmem.torch_private.dispatch.kernels import run_composite_implicit
from pytest_torchmem.torch_private.dispatch.keys import below_autograd
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, is_composite_implicit


class Trace(Protocol):
    """What a decomposition may ask of the trace that it runs in."""

    def working(self) -> AbstractContextManager[None]:
        """Let tensors be used without being intercepted."""

    def is_on_gpu(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the fake GPU."""

    def made_before_step(self, tensor: Tensor) -> bool:
        """Return whether a tensor's storage was there before the step."""

    def keep(self, buffer: Buffer, overload: OpOverload) -> None:
        """Book a library's workspace that stays, made by ``overload`` at its first use."""


@dataclass(frozen=True, slots=True)
class GivenCall:
    """An operator and its arguments as they were given, for what hands all of them on."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    overload: OpOverload


@dataclass(frozen=True, slots=True)
class CompositeCall(GivenCall):
    """The call of a composite operator, which its path on a device stands in for."""

    trace: Trace

    def __call__(self) -> Any:
        """Run ATen's own composite kernel with the same arguments."""
        return self.of(*self.args, **self.kwargs)

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """Run ATen's own kernel, or for an operator that is not composite the operator itself."""
        if is_composite_implicit(self.overload):
            return run_composite_implicit(self.overload, *args, **kwargs)
        with below_autograd():
            return self.overload(*args, **kwargs)


def meta_result(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Return what ``operator`` returns for its arguments on ``meta``."""
    return operator(*replace_tensors(args, on_meta), **replace_tensors(kwargs, on_meta))


def outputs(call: GivenCall) -> Any:
    """Make the outputs of a structured operator."""
    return replace_tensors(meta_result(call.overload, *call.args, **call.kwargs), empty_as)


def empty_as(geometry: Tensor) -> Tensor:
    """Make a tensor with the geometry of one on ``meta``."""
    return torch.empty_strided(geometry.shape, geometry.stride(), dtype=geometry.dtype)


def proxy(out: Tensor, geometry: Tensor) -> Tensor:
    """Return what a structured kernel writes to instead of ``out``: a temporary where the strides
    are not those it sets; maybe_create_proxy in torchgen/dest/register_dispatch_key.py.
    """
    return out if out.stride() == geometry.stride() else empty_as(geometry)


class Attention(NamedTuple):
    """Those of ``aten::scaled_dot_product_attention`` that its kernel depends on; ``sdp_params`` in
    native/transformers/sdp_utils_cpp.h.
    """

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


class AttentionLayer(NamedTuple):
    """Those of ``aten::_native_multi_head_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim: int
    num_head: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    mask: Tensor | None = None
    need_weights: bool = True
    average_attn_weights: bool = True
    mask_type: int | None = None


class EncoderLayer(NamedTuple):
    """Those of ``aten::_transformer_encoder_layer_fwd``."""

    src: Tensor
    embed_dim: int
    num_heads: int
    qkv_weight: Tensor
    qkv_bias: Tensor
    proj_weight: Tensor
    proj_bias: Tensor
    use_gelu: bool
    norm_first: bool
    eps: float
    norm_weight_1: Tensor
    norm_bias_1: Tensor
    norm_weight_2: Tensor
    norm_bias_2: Tensor
    ffn_weight_1: Tensor
    ffn_bias_1: Tensor
    ffn_weight_2: Tensor
    ffn_bias_2: Tensor
    mask: Tensor | None = None
    mask_type: int | None = None


class ConvolutionSettings(NamedTuple):
    """Those of ``aten::convolution`` and its backward that are no tensors; ``ConvParams``."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
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


GROUPS = {
    group.__name__: group
    for group in (
        Attention,
        AttentionLayer,
        ConvolutionSettings,
        EncoderLayer,
        LayerSettings,
        RecurrentSettings,
    )
}
"""By name: what a function may take as one parameter."""
