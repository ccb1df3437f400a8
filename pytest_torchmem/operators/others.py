"""Distributions, grids, extremes and optimizers in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import accumulation_type
from pytest_torchmem.operators.meta_functions import like, meta


@meta("aten::_logcumsumexp", "aten::_standard_gamma_grad")
def as_first(input: Tensor, *rest: Any) -> Tensor:
    """Contiguous, like the first argument; native/ReduceOps.cpp, native/Distributions.cpp."""
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@meta("aten::_dirichlet_grad", "aten::_sample_dirichlet", "aten::binomial", "aten::glu_jvp")
def like_first(input: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Like the first argument; native/Distributions.cpp, native/GatedLinearUnit.cpp."""
    return torch.empty_like(input)


@meta("aten::glu_backward_jvp", "aten::_masked_softmax", "aten::_masked_softmax_backward")
def contiguous_like_first(input: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Contiguous, like the first argument; native/GatedLinearUnit.cpp, native/SoftMax.cpp."""
    return like(input)


@meta("aten::_aminmax")
def aminmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """native/ReduceOps.cpp."""
    shape = list(input.shape)
    if dim is None:
        shape = []
    elif keepdim:
        shape[dim] = 1
    else:
        del shape[dim]
    return like(input, shape), like(input, shape)


@meta(
    "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_.tensor_lr",
    "aten::_fused_sgd_",
    "aten::_fused_adagrad_",
)
def in_place(*arguments: Any, **options: Any) -> None:
    """Parameters and states are updated where they are; native/cuda/fused_adam_impl.cu, …"""


@meta("aten::_scaled_dot_product_flash_attention_for_cpu", device="cpu")
def flash_attention_for_cpu(query: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Sums of exponentials in double where the query is, which ``meta`` does not know before torch
    2.13; native/transformers/attention.cpp, _scaled_dot_product_flash_attention_cpu.
    """
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result, logsumexp = operator(query, *rest, **options)
    return result, logsumexp.to(accumulation_type(query.dtype))


@meta("aten::_cummax_helper", "aten::_cummin_helper")
def cumulative_extremum(self: Tensor, values: Tensor, indices: Tensor, dim: int) -> None:
    """What it finds is written to arguments; native/ReduceOps.cpp, cummax_out."""


@meta("aten::cudnn_affine_grid_generator")
def cudnn_affine_grid(theta: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    """native/cudnn/AffineGridGenerator.cpp."""
    return like(theta, (n, h, w, 2))


@meta("aten::cudnn_affine_grid_generator_backward")
def cudnn_affine_grid_backward(grad: Tensor, n: int, c: int, h: int, w: int) -> Tensor:
    """native/cudnn/AffineGridGenerator.cpp."""
    return like(grad, (n, 2, 3))
