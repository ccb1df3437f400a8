"""Batch and layer normalization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import laid_out, like, suggested_format
from pytest_torchmem.operators.registry import operator

_aten: Any = torch.ops.aten


def _in_evaluation(overload: Any) -> Callable[[Mapping[str, Any]], tuple[Tensor, ...]]:
    def batch_norm(arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        results = overload(**arguments)
        if arguments["training"]:
            return tuple(results)
        return (results[0], like(results[1], (0,)), like(results[2], (0,)), *results[3:])

    batch_norm.__doc__ = "No statistics are saved in evaluation; native/Normalization.cpp."
    return batch_norm


def _first_type(input: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The type of the first parameter there is, else of the input: what the CPU saves is in it."""
    return next((tensor for tensor in parameters if tensor is not None), input).dtype


def _on_cpu(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    def batch_norm(tensors: list[Tensor], arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
        dtype = _first_type(*tensors)
        result, mean, variance, *rest = function(arguments)
        result = laid_out(result, suggested_format(tensors[0]))
        return result, mean.to(dtype), variance.to(dtype), *rest

    batch_norm.__doc__ = (
        "Contiguous or channels-last, statistics in the type of the parameters; "
        "native/Normalization.cpp, batch_norm_cpu."
    )
    return batch_norm


for _name, _overload in (
    ("aten::native_batch_norm", _aten.native_batch_norm.default),
    ("aten::_native_batch_norm_legit", _aten._native_batch_norm_legit.default),
    ("aten::_native_batch_norm_legit.no_stats", _aten._native_batch_norm_legit.no_stats),
):
    operator(_name).meta("cpu")(_on_cpu(_in_evaluation(_overload)))

operator("aten::_batch_norm_with_update").meta("cpu")(
    _on_cpu(lambda arguments: _aten._batch_norm_with_update.default(**arguments))
)


@operator("aten::native_layer_norm").meta("cpu")
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


@operator("aten::native_layer_norm_backward").meta()
def layer_norm_backward(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Contiguous whatever the layout of the input; native/layer_norm.cpp, layer_norm_backward_cpu,
    and native/cuda/layer_norm_kernel.cu, layer_norm_backward_cuda.
    """
    return tuple(
        like(tensor) if wanted and tensor is not None else None
        for tensor, wanted in zip((input, weight, bias), output_mask, strict=True)
    )


def _backward_on_cpu(overload: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    def batch_norm_backward(
        input: Tensor, arguments: Mapping[str, Any]
    ) -> tuple[Tensor | None, ...]:
        gradient, *parameters = overload(**arguments)
        if gradient is not None:
            gradient = laid_out(input, suggested_format(input))
        return gradient, *parameters

    batch_norm_backward.__doc__ = "The input's layout, whatever the gradient's."
    return batch_norm_backward


for _name in ("native_batch_norm_backward", "batch_norm_backward"):
    operator(f"aten::{_name}").meta("cpu")(_backward_on_cpu(getattr(_aten, _name).default))


@operator("aten::batch_norm_stats", "aten::batch_norm_update_stats").meta()
def batch_norm_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu: float for 16-bit inputs."""
    dtype = torch.float32 if input.dtype.itemsize == 2 else input.dtype
    shape = (input.shape[1],)
    return input.new_empty(shape, dtype=dtype), input.new_empty(shape, dtype=dtype)


@operator("aten::batch_norm_elemt").meta()
def batch_norm_apply(input: Tensor) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)


@operator("aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts").meta()
def batch_norm_gather(mean: Tensor) -> tuple[Tensor, Tensor]:
    """native/cuda/Normalization.cu."""
    return like(mean, mean.shape[1:]), like(mean, mean.shape[1:])


@operator("aten::batch_norm_backward_reduce").meta()
def batch_norm_backward_reduce(
    mean: Tensor, weight: Tensor | None, input_g: bool, weight_g: bool, bias_g: bool
) -> tuple[Tensor | None, ...]:
    """native/cuda/Normalization.cu."""
    parameter = mean if weight is None else weight
    return (
        like(mean) if input_g else None,
        like(mean) if input_g else None,
        like(parameter) if weight_g else None,
        like(parameter) if bias_g else None,
    )


@operator("aten::batch_norm_backward_elemt").meta()
def batch_norm_backward_apply(input: Tensor) -> Tensor:
    """native/cuda/Normalization.cu."""
    return torch.empty_like(input)
