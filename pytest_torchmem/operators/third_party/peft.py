"""peft: the extension that BOFT compiles to make block-diagonal matrices."""

from __future__ import annotations

import torch
from torch import Tensor


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


EXTENSIONS = {"fbd_cuda": {"forward": _block_diagonal, "backward": _block_diagonal_backward}}
