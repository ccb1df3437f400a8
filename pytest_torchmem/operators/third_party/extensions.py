"""Functions of extensions in CUDA C++ that packages compile when they find a GPU.

They are no operators of torch: pybind11 hands them to Python, and no dispatcher calls them. What
stands for one is a function of torch's operators that allocates and computes the same. The one
here is peft's, which BOFT compiles to make block-diagonal matrices.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def _block_diagonal(input: Tensor) -> list[Tensor]:
    """Return matrices of blocks; peft/tuners/boft/fbd/fbd_cuda_kernel.cu."""
    several, blocks, rows, columns = input.shape
    output = input.new_zeros(several, blocks * rows, blocks * columns)
    _blocks_of(output, input.shape).copy_(input)
    return [output]


def _block_diagonal_backward(grad_output: Tensor, input: Tensor) -> list[Tensor]:
    """Return the blocks of a gradient; peft/tuners/boft/fbd/fbd_cuda_kernel.cu."""
    grad_input = torch.zeros_like(input)
    grad_input.copy_(_blocks_of(grad_output, input.shape))
    return [grad_input]


def _blocks_of(matrices: Tensor, shape: torch.Size) -> Tensor:
    several, blocks, rows, columns = shape
    cut = matrices.view(several, blocks, rows, blocks, columns)
    return cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


_EXTENSIONS: Mapping[str, Mapping[str, Function]] = {
    "fbd_cuda": {"forward": _block_diagonal, "backward": _block_diagonal_backward}
}
"""By the name of the extension, the first argument of ``torch.utils.cpp_extension.load``, and the
names that it gives its functions."""


def extension_function(extension: str, name: str) -> Function | None:
    """Return what stands for a function of an extension, or None if nobody has described it."""
    return _EXTENSIONS.get(extension, {}).get(name)
