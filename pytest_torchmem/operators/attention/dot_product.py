"""Scaled dot-product attention: which implementation takes a call, why matrix products do, and on
CUDA what is done around the kernel; and cuDNN's.

native/transformers/attention.cpp, ``scaled_dot_product_attention``; native/cudnn/MHA.cpp. The order
and the constraints are those of native/transformers/cuda/sdp_utils.cpp (``select_sdp_backend``,
``can_use_cudnn_attention``, ``can_use_flash_attention``, ``can_use_mem_efficient_attention``) and
native/transformers/sdp_utils_cpp.h. The reasons of a refusal come in the order in which these ask,
on the CPU ``use_flash_attention_cpp`` (native/transformers/sdp_utils_cpp.cpp).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from pytest_torchmem.cudnn.questions import AttentionQuestion
from pytest_torchmem.operators.calls import AttentionArguments
from pytest_torchmem.operators.libraries.nvidia import Cudnn, attention_operand
from pytest_torchmem.operators.registry import OperatorKind, operator
from pytest_torchmem.operators.workspace import HALVES, Workspace, dense_bytes, told, unknown
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.settings import attention_priority, must_be_deterministic

MATH, FLASH, EFFICIENT, CUDNN = range(4)
"""``at::SDPBackend``."""
BACKENDS = {"flash": FLASH, "mem_efficient": EFFICIENT, "cudnn": CUDNN}
"""By the names that ``torch.backends.cuda`` asks for them."""
_CUDNN_FIRST = (CUDNN, FLASH, EFFICIENT, MATH)
_DEFAULT_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)
_LARGEST_CUDNN_DIMENSION = 65535
#: From torch 2.14 on one head of keys and values goes with any number of queries', and grouped
#: queries are also taken by memory-efficient attention (pytorch/pytorch#191085).
_BROADCASTS = TORCH_VERSION >= (2, 14)
_DROPS_SIXTEENTHS = TORCH_VERSION >= (2, 12)


def _order(gpu: Gpu) -> tuple[int, ...]:
    """Return the order that ``sdpa_kernel`` set, or the GPU's own; ``priority_order``. sm90 and
    sm100 ask cuDNN first, from cuDNN 9.15.1 on (``check_prefer_cudnn_attention``).
    """
    order = tuple(map(int, attention_priority()))
    prefers_cudnn = (
        gpu.capability[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )
    return _CUDNN_FIRST if order[:4] == _DEFAULT_ORDER and prefers_cudnn else order


def _shapes_fit(call: AttentionArguments, grouped: bool, same_heads: bool = True) -> bool:
    """``check_tensor_shapes``, ``check_batch_size_and_num_heads_dense``, ``check_nonzero_…``."""
    query, key, value = call.query, call.key, call.value
    four = query.dim() == key.dim() == value.dim() == 4
    if not four or call.is_jagged:
        return four
    if not query.size(0) == key.size(0) == value.size(0) or 0 in (query.size(2), key.size(2)):
        return False
    heads, key_heads, value_heads = query.size(1), key.size(1), value.size(1)
    if _BROADCASTS and heads > 0 and key_heads == value_heads == 1:
        return True
    if call.enable_gqa and grouped and 0 not in (key_heads, value_heads):
        alike = key_heads == value_heads if same_heads else heads % value_heads == 0
        return alike and heads % key_heads == 0
    return heads == key_heads == value_heads


def _last_dimension_dense(call: AttentionArguments, ignores_single: bool) -> bool:
    """``check_last_dim_stride_equals_1_dense``."""
    if call.is_jagged:
        return True
    dense = all(tensor.stride(-1) == 1 for tensor in (call.query, call.key, call.value))
    dense = dense or (ignores_single and call.query.size(-1) == 1)
    return dense and (call.attn_mask is None or call.attn_mask.stride(-1) == 1)


def _half(gpu: Gpu, call: AttentionArguments) -> bool:
    """Whether the dtype is one that tensor cores have; ``check_dtypes_low_precision``."""
    if call.query.dtype is torch.bfloat16:
        return gpu.capability >= (8, 0)
    return call.query.dtype is torch.float16


def _flash_takes(gpu: Gpu, call: AttentionArguments) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled() or not _shapes_fit(call, grouped=True):
        return False
    if call.attn_mask is not None or not _half(gpu, call):
        return False
    size, capability = call.query.size(-1), gpu.capability
    # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    large = size > 192 and (size <= 224 or call.dropout_p > 0)
    return (
        size == call.key.size(-1) == call.value.size(-1)
        and size <= 256
        and (8, 0) <= capability <= (12, 1)
        and not (call.trains and small and large)
        and not (call.is_causal and call.query.size(2) != call.key.size(2))
        and _last_dimension_dense(call, ignores_single=True)
    )


def _efficient_takes(gpu: Gpu, call: AttentionArguments) -> bool:
    enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
    if not enabled or not _shapes_fit(call, grouped=_BROADCASTS):
        return False
    size, value_size = call.query.size(-1), call.value.size(-1)
    alignment = _alignment(gpu, call.query.dtype)
    return (
        (5, 0) <= gpu.capability <= (12, 1)
        and (call.query.dtype is torch.float32 or _half(gpu, call))
        and size == call.key.size(-1)
        and 0 not in (size, value_size)
        and not (size % alignment or value_size % alignment)
        and _last_dimension_dense(call, ignores_single=False)
    )


def _cudnn_takes(gpu: Gpu, call: AttentionArguments) -> bool:
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not (call.is_jagged or must_be_deterministic())
        and (8, 0) <= gpu.capability <= (12, 1)
        and _half(gpu, call)
        and _shapes_fit(call, grouped=True, same_heads=False)
        and mask_fits(call)
        and not (_DROPS_SIXTEENTHS and call.dropout_p * 16 != int(call.dropout_p * 16))
        and _last_dimension_dense(call, ignores_single=True)
        and _cudnn_sizes_fit(gpu, call)
    )


def mask_fits(call: AttentionArguments) -> bool:
    """Tell whether fused kernels take a mask of this shape: ``check_attn_mask_shape``."""
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    batch, heads, queries, _ = call.query.shape
    fits = mask.size(-2) in (1, queries) and mask.size(-1) in (1, call.key.size(2))
    if mask.dim() == 4:
        fits = fits and mask.size(0) in (1, batch) and mask.size(1) in (1, heads)
    return fits


def _cudnn_sizes_fit(gpu: Gpu, call: AttentionArguments) -> bool:
    """``check_cudnn_tensor_shapes`` for a cuDNN from 9.15.1 to 9.22."""
    batch, heads, queries, size = call.query.shape
    value_size = call.value.size(3)
    if max(batch, heads) > _LARGEST_CUDNN_DIMENSION:
        return False
    newer = gpu.capability == (9, 0) or gpu.capability[0] == 10
    limit = 192 if newer and (size, value_size) == (192, 128) else 128
    if size > limit or value_size > limit or size % 8 or value_size % 8:
        return False
    return call.key.size(2) != 1 and not (call.dropout_p and queries == 1)


def _alignment(gpu: Gpu, dtype: torch.dtype) -> int:
    """Elements that a head's size has to be a multiple of; ``minimum_gemm_alignment``."""
    if gpu.capability >= (8, 0):
        return 4 if dtype == torch.float32 else 8
    if gpu.capability >= (7, 0) and dtype in HALVES:
        return 8
    return 1


_TAKES: dict[int, Callable[[Gpu, AttentionArguments], bool]] = {
    CUDNN: _cudnn_takes,
    FLASH: _flash_takes,
    EFFICIENT: _efficient_takes,
    MATH: lambda *_: torch.backends.cuda.math_sdp_enabled(),
}


def may_use(gpu: Gpu, backend: int, params: Any) -> bool:
    """Return whether an implementation takes a call; ``torch.backends.cuda.can_use_…``."""
    asked = (params.query, params.key, params.value, params.attn_mask, params.dropout)
    return _TAKES[backend](gpu, AttentionArguments(*asked, params.is_causal, params.enable_gqa))


def choose(gpu: Gpu, call: AttentionArguments, without: Sequence[int] = ()) -> int:
    """Return the first implementation in order that takes the call; ``select_sdp_backend``."""
    for backend in _order(gpu):
        if backend in _TAKES and backend not in without and _TAKES[backend](gpu, call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def choose_nested(gpu: Gpu, dtype: torch.dtype, size: int, lengths: Sequence[int]) -> int:
    """Return the choice for one nested tensor that is query, key and value, in inference.

    ``check_for_seq_len_0_nested_tensor`` stands in the place of what is asked of dense shapes,
    flash attention takes no head size that it would have to pad
    (``check_head_dim_size_flash_nested``), and cuDNN no nested tensor
    (``check_for_nested_inputs``).
    """
    if 0 in lengths:
        return MATH
    stand_in = torch.empty((len(lengths), 1, max(lengths), size), dtype=dtype, device="meta")
    call = AttentionArguments(stand_in, stand_in, stand_in)
    return choose(gpu, call, without=(CUDNN, FLASH) if size % 8 else (CUDNN,))


# It depends on geometry and settings alone, and C++ composites ask for it.
@operator("aten::_fused_sdp_choice", kind=OperatorKind.NATIVE).path("cuda")
def fused_sdp_choice(machine: Gpu, attention: AttentionArguments) -> int:
    """Return the choice alone; ``_fused_sdp_choice_cuda``."""
    return choose(machine, attention)


_LARGEST_HEAD = 256


def why_not_fused(call: AttentionArguments, device: str) -> str:
    """Return the first constraint of a fused kernel that a call does not keep, "" for none."""
    query, key, value, mask = call[:4]
    named = zip(("query", "key", "value", "attn_mask"), call[:4], strict=True)
    shape = [] if mask is None else list(mask.shape)
    dtype = str(query.dtype).removeprefix("torch.")
    for holds, reason in (
        (_disabled(device), "fused kernels are switched off"),
        (device == "cpu" and call.dropout_p > 0, f"dropout_p is {call.dropout_p}"),
        (
            not query.dim() == key.dim() == value.dim() == 4,
            f"query has {query.dim()} dimensions, and 4 are needed",
        ),
        (query.dtype is torch.float64 and device == "cuda", "the dtype is float64"),
        (
            not call.enable_gqa and query.dim() == key.dim() == 4 and query.size(1) != key.size(1),
            "query and key have different heads without enable_gqa",
        ),
        (0 in (*query.shape, *key.shape), "a sequence is empty"),
        (
            not query.size(-1) == key.size(-1) == value.size(-1),
            f"heads of query and value have sizes {query.size(-1)} and {value.size(-1)}",
        ),
        (device == "cuda" and query.size(-1) > _LARGEST_HEAD, f"heads have size {query.size(-1)}"),
        *((one.stride(-1) != 1, f"{name} is not contiguous in its last dimension, of stride "
           f"{one.stride(-1)}") for name, one in named if one is not None),
        (mask is not None and mask.requires_grad, "attn_mask requires grad"),
        (device == "cpu" and not mask_fits(call), f"attn_mask has shape {shape}"),
        (
            device == "cuda" and mask is not None,
            "enable_gqa and attn_mask are given" if call.enable_gqa else "attn_mask is given",
        ),
        (device == "cuda" and query.dtype not in HALVES, f"the dtype is {dtype}"),
    ):  # fmt: skip
        if holds:
            has_mask = device == "cuda" and reason.startswith("attn_mask is not ")
            return reason.replace("is not", "is given, and not") if has_mask else reason
    return ""


def _disabled(device: str) -> bool:
    backends = torch.backends.cuda  # the same switches hold on the CPU
    fused = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
    return not fused[0] if device == "cpu" else not any(fused)


_aten: Any = torch.ops.aten


@operator("aten::scaled_dot_product_attention").path("cuda")
def scaled_dot_product_attention(
    machine: Gpu, attention: AttentionArguments, *, scale: float | None = None
) -> Any:
    """Run the implementation that the GPU would; attention.cpp. From torch 2.14 on, operands of
    three dimensions are one image of four.
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
        mask = None if mask is None else _bias(mask, query, key)
        return _aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, attention.trains, dropout, is_causal, scale=scale
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


@operator("aten::_scaled_dot_product_cudnn_attention").meta("cuda")
def cudnn_outputs(compute_log_sumexp: bool, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Statistics only where a backward needs them, where ``meta`` always makes them;
    native/cudnn/MHA.cpp, ``run_cudnn_SDP_fprop``.
    """
    output, statistics, *rest = _aten._scaled_dot_product_cudnn_attention.default(**arguments)
    return output, statistics if compute_log_sumexp else None, *rest


@operator("_scaled_dot_product_cudnn_attention _cudnn_attention_forward").workspace("cuda")
def cudnn_forward(
    outputs: Sequence[Tensor | None], asked: _Attention, compute_log_sumexp: bool
) -> Workspace:
    """``mha_graph->get_workspace_size()``; native/cudnn/MHA.cpp, ``run_cudnn_SDP_fprop``."""
    if outputs[0] is None:
        return unknown()
    statistics = asked.statistics if compute_log_sumexp else None
    return asked.workspace("forward", output=outputs[0], statistics=statistics)


@operator(
    "_scaled_dot_product_cudnn_attention_backward", not_in_key=("philox_seed", "philox_offset")
).workspace("cuda")
def cudnn_backward(grad_out: Tensor, out: Tensor, asked: _Attention) -> Workspace:
    """A copy of a gradient that lies unlike the output, and cuDNN's; run_cudnn_SDP_bprop."""
    copied = 0 if _strides(grad_out) == _strides(out) else dense_bytes(grad_out)
    operands = {"output": out, "statistics": asked.statistics, "gradient": out}
    return asked.workspace("backward", copied, **operands)


def _strides(tensor: Tensor) -> list[int]:
    """Return the strides that decide where elements are; ``same_strides``."""
    return [one for one, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
