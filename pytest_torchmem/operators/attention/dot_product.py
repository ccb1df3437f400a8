"""Scaled dot-product attention on CUDA: what is done around the kernel that takes it, and cuDNN's.

native/transformers/attention.cpp, ``scaled_dot_product_attention``; native/cudnn/MHA.cpp.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.cudnn.questions import AttentionQuestion
from pytest_torchmem.operators.attention.choice import CUDNN, EFFICIENT, FLASH, choose
from pytest_torchmem.operators.calls import AttentionArguments
from pytest_torchmem.operators.geometry import dense_bytes
from pytest_torchmem.operators.libraries.cudnn import Cudnn, attention_operand
from pytest_torchmem.operators.registry import operator
from pytest_torchmem.operators.workspace import Workspace, told, unknown
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.names import TORCH_VERSION

_aten: Any = torch.ops.aten


@operator("aten::scaled_dot_product_attention").path("cuda")
def scaled_dot_product_attention(
    machine: Gpu, attention: AttentionArguments, *, scale: float | None = None
) -> Any:
    """Run the implementation that the GPU would; attention.cpp.

    From torch 2.14 on, operands of three dimensions are one image of four.
    """
    query, key, value, given, dropout, is_causal, grouped = attention
    if TORCH_VERSION >= (2, 14) and query.dim() == key.dim() == value.dim() == 3:
        mask = given.unsqueeze(0) if given is not None and given.dim() == 3 else given
        whole = (query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask)
        found = functional.scaled_dot_product_attention(
            *whole, dropout, is_causal, scale=scale, enable_gqa=grouped
        )
        return found.squeeze(0)
    _validate(query, key, value, given)
    backend = choose(machine, attention)
    mask = _additive(given, query.dtype)
    if backend == CUDNN:
        return _aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, mask, attention.trains, dropout, is_causal, False, scale=scale
        )[0]
    if backend == FLASH:
        size = query.size(-1)
        padded = [_padded(tensor, 8) for tensor in (query, key, value)]
        output = _aten._scaled_dot_product_flash_attention.default(
            *padded, dropout, is_causal, False, scale=size**-0.5 if scale is None else scale
        )[0]
        return output[..., :size] if size % 8 else output
    if backend == EFFICIENT:
        bias = None if mask is None else _bias(mask, query, key)
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, bias, attention.trains, dropout, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout, is_causal, None, scale=scale, enable_gqa=grouped
    )[0]


def _validate(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise for what no implementation takes; ``validate_sdpa_input``."""
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: "
            f"{query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
            f"attn_mask.dtype: {mask.dtype} and  query.dtype: {query.dtype} instead."
        )


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """Return the last dimension padded to a multiple; ``pad_last_dim``."""
    missing = -tensor.size(-1) % multiple
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as what is added to the scores; ``convert_boolean_attn_mask``."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    other = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, other)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as the kernel needs it; ``preprocess_mask``, ``pad_bias``."""
    aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
    if not aligned:
        size = mask.size(-1)
        mask = functional.pad(mask, (0, 8 - size % 8))[..., :size]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


class _Attention(NamedTuple):
    """What cuDNN is asked about, by the names of the schemas' arguments."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | None
    dropout_p: float
    is_causal: bool
    cudnn: Cudnn

    @property
    def statistics(self) -> Tensor:
        """One number for each query."""
        return torch.empty((*self.query.shape[:3], 1), dtype=torch.float32, device="meta")

    def workspace(self, direction: str, *copies: int, **others: Tensor | None) -> Workspace:
        """Return what cuDNN tells, and the copies made before, of an attention with ``others``."""
        query, key, value, bias, dropout, is_causal, cudnn = self
        if query.dim() != 4:
            return unknown(*copies)
        if bias is not None:  # as ``_cudnn_attention_forward`` of attention.cu hands it on
            bias = bias.unsqueeze(1) if bias.dim() == 3 else bias
            heads = bias.shape[1] if bias.dim() == 4 else 1
            bias = bias.expand(query.shape[0], heads, query.shape[2], key.shape[2])
        given = {"query": query, "key": key, "value": value, **others, "bias": bias}
        operands = [
            (name, attention_operand(one)) for name, one in given.items() if one is not None
        ]
        found = cudnn.ask(AttentionQuestion(direction, tuple(operands), is_causal, dropout))
        return unknown(*copies) if found is None else told(*copies, found)


@operator("aten::_scaled_dot_product_cudnn_attention", "aten::_cudnn_attention_forward").workspace(
    "cuda"
)
def cudnn_forward(
    outputs: Sequence[Tensor | None], asked: _Attention, compute_log_sumexp: bool
) -> Workspace:
    """``mha_graph->get_workspace_size()``; native/cudnn/MHA.cpp, ``run_cudnn_SDP_fprop``."""
    if outputs[0] is None:
        return unknown()
    statistics = asked.statistics if compute_log_sumexp else None
    return asked.workspace("forward", output=outputs[0], statistics=statistics)


@operator(
    "aten::_scaled_dot_product_cudnn_attention_backward",
    not_in_key=("philox_seed", "philox_offset"),
).workspace("cuda")
def cudnn_backward(grad_out: Tensor, out: Tensor, asked: _Attention) -> Workspace:
    """A copy of a gradient that lies unlike the output, and cuDNN's; run_cudnn_SDP_bprop."""
    copied = 0 if _strides(grad_out) == _strides(out) else dense_bytes(grad_out)
    operands = {"output": out, "statistics": asked.statistics, "gradient": out}
    return asked.workspace("backward", copied, **operands)


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that decide where elements are; ``same_strides``."""
    return [one for one, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
