"""Batch and layer normalization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import suggested_format
from pytest_torchmem.operators.meta_functions import (
    META_FUNCTIONS,
    MetaFunction,
    laid_out,
    like,
    meta,
)


def _batch_norm(operator: Any) -> MetaFunction:
    def batch_norm(input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        results = operator(input, *arguments)
        training = next(argument for argument in arguments if isinstance(argument, bool))
        if training:
            return tuple(results)
        return (results[0], like(results[1], (0,)), like(results[2], (0,)), *results[3:])

    batch_norm.__doc__ = "No statistics are saved in evaluation; native/Normalization.cpp."
    return batch_norm


meta("aten::native_batch_norm")(_batch_norm(torch.ops.aten.native_batch_norm.default))
meta("aten::_native_batch_norm_legit")(_batch_norm(torch.ops.aten._native_batch_norm_legit.default))
meta("aten::_native_batch_norm_legit.no_stats")(
    _batch_norm(torch.ops.aten._native_batch_norm_legit.no_stats)
)


def _first_type(input: Tensor, *parameters: Any) -> torch.dtype:
    """The type of the first parameter there is, else of the input: what the CPU saves is in it."""
    tensors = (parameter for parameter in parameters if isinstance(parameter, Tensor))
    found: torch.dtype = next(tensors, input).dtype
    return found


@meta("aten::native_layer_norm", device="cpu")
def layer_norm_cpu(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics in the type of the parameters, not in float; native/layer_norm.cpp,
    layer_norm_cpu.
    """
    dtype = _first_type(input, weight, bias)
    result, mean, rstd = torch.ops.aten.native_layer_norm(
        input, normalized_shape, weight, bias, eps
    )
    return result, mean.to(dtype), rstd.to(dtype)


@meta("aten::native_layer_norm_backward")
def layer_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Contiguous whatever the layout of the input; native/layer_norm.cpp, layer_norm_backward_cpu,
    and native/cuda/layer_norm_kernel.cu, layer_norm_backward_cuda.
    """
    return tuple(
        like(tensor) if wanted and tensor is not None else None
        for tensor, wanted in zip((input, weight, bias), output_mask, strict=True)
    )


def _batch_norm_cpu(function: MetaFunction) -> MetaFunction:
    def batch_norm(input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        dtype = _first_type(input, *arguments)
        result, mean, variance, *rest = function(input, *arguments)
        result = laid_out(result, suggested_format(input))
        return result, mean.to(dtype), variance.to(dtype), *rest

    batch_norm.__doc__ = (
        "Contiguous or channels-last, statistics in the type of the parameters; "
        "native/Normalization.cpp, batch_norm_cpu."
    )
    return batch_norm


for _name in (
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit.no_stats",
):
    meta(_name, device="cpu")(_batch_norm_cpu(META_FUNCTIONS[_name]))


def _batch_norm_backward_cpu(operator: Any) -> MetaFunction:
    def batch_norm_backward(
        grad_out: Tensor, input: Tensor, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        gradient, *parameters = operator(grad_out, input, *rest)
        if gradient is not None:
            gradient = laid_out(input, suggested_format(input))
        return gradient, *parameters

    batch_norm_backward.__doc__ = "The input's layout, whatever the gradient's."
    return batch_norm_backward


for _name in ("native_batch_norm_backward", "batch_norm_backward"):
    meta(f"aten::{_name}", device="cpu")(
        _batch_norm_backward_cpu(getattr(torch.ops.aten, _name).default)
    )

meta("aten::_batch_norm_with_update", device="cpu")(
    _batch_norm_cpu(torch.ops.aten._batch_norm_with_update.default)
)


@meta("aten::batch_norm_stats", "aten::batch_norm_update_stats")
def batch_norm_statistics(input: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu: float for 16-bit inputs."""
    dtype = torch.float32 if input.dtype.itemsize == 2 else input.dtype
    shape = (input.shape[1],)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


@meta("aten::batch_norm_elemt")
def batch_norm_apply(input: Tensor, *rest: Any) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)


@meta("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts")
def batch_norm_gather(input: Tensor, mean: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu."""
    return like(mean, mean.shape[1:]), like(mean, mean.shape[1:])


@meta("aten::batch_norm_backward_reduce")
def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """native/cuda/Normalization.cu."""
    parameter = mean if weight is None else weight
    return (
        like(mean) if input_g else None,
        like(mean) if input_g else None,
        like(parameter) if weight_g else None,
        like(parameter) if bias_g else None,
    )


@meta("aten::batch_norm_backward_elemt")
def batch_norm_backward_apply(grad_out: Tensor, input: Tensor, *rest: Any) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)
