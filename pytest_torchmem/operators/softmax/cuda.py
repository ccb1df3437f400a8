"""Softmax and log-softmax; exact, native/cuda/SoftMax.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_torchmem.operators.geometry import contiguous_copy, dense_bytes
from pytest_torchmem.operators.registry import operator


@operator("aten::_softmax", "aten::_log_softmax").workspace("cuda")
def softmax(input: Tensor) -> int:
    """A dense copy of the input; ``host_softmax``."""
    return contiguous_copy(input)


@operator("aten::_softmax_backward_data").workspace("cuda")
def softmax_backward(grad_output: Tensor, output: Tensor) -> tuple[int, ...]:
    """The product of gradient and output, and dense copies; ``softmax_backward_cuda_out``."""
    on_meta = [
        torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta")
        for found in (grad_output, output)
    ]
    product = on_meta[0] * on_meta[1]
    return (dense_bytes(product), contiguous_copy(product), contiguous_copy(output))


@operator("aten::_log_softmax_backward_data").workspace("cuda")
def log_softmax_backward(grad_output: Tensor, output: Tensor) -> tuple[int, ...]:
    """Dense copies of gradient and output; ``host_softmax_backward``."""
    return (contiguous_copy(grad_output), contiguous_copy(output))


@operator("aten::_masked_softmax").workspace("cuda")
def masked_softmax(
    input: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> int:
    """A masked copy where the kernel of its own does not fit; ``masked_softmax_cuda``."""
    size = input.shape[-1 if dim is None else dim] if input.dim() else 1
    last = dim is None or dim % max(1, input.dim()) == input.dim() - 1
    expanded = mask.is_contiguous() and not (mask_type == 0 and mask.dim() < input.dim())
    fits = size <= 1024 and size * input.element_size() <= 4096 and expanded and last
    return 0 if fits else dense_bytes(input)


@operator("aten::_masked_softmax_backward").workspace("cuda")
def masked_softmax_backward(
    grad_output: Tensor, output: Tensor, mask: Tensor, dim: int | None = None
) -> tuple[int, ...]:
    """Dense copies and a product; where no kernel of its own fits, two of them.

    ``masked_softmax_backward_cuda``.
    """
    copies = tuple(map(contiguous_copy, (grad_output, output, mask)))
    size = output.shape[-1 if dim is None else dim] if output.dim() else 1
    last = dim is None or dim % max(1, output.dim()) == output.dim() - 1
    fits = size <= 1024 and size * output.element_size() <= 4096 and last
    return (*copies, dense_bytes(output), 0 if fits else dense_bytes(output))
