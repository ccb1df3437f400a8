"""The operators of ``fully_shard``, and lists of tensors that are copied into one, or one into a
list: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, native/cuda/TensorShape.cu.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.calls import GivenCall
from pytest_torchmem.operators.registry import DEVICES, operator
from pytest_torchmem.operators.workspace import is_dense
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.kernels import run_composite_explicit

_BLOCK, _BYTES_PER_THREAD, _INTEGER = 128, 16, 8


@operator(
    "aten::split_with_sizes_copy.out",
    source="native/cuda/TensorShape.cu, split_with_sizes_copy_out_cuda",
    kernel_on=frozenset({"cuda"}),
).workspace("cuda")
def split(machine: Gpu, self: Tensor, split_sizes: Sequence[int], dim: int, out: Any) -> int:
    """Addresses, sizes and blocks of the splits as one tensor of integers; ``pack_vecs``."""
    if not is_dense(self) or not all(is_dense(one) and one.dtype is self.dtype for one in out):
        return 0
    dim %= self.dim()
    chunks = math.prod(self.shape[:dim])
    sizes = [size * self.stride(dim) * self.element_size() for size in split_sizes]
    tile = _BLOCK * _BYTES_PER_THREAD
    blocks = sum(-(-size // tile) for size in sizes)
    most = machine.multiprocessors * machine.threads_per_multiprocessor // _BLOCK * 2
    factor = -(-blocks * chunks // most)
    per_block = min(math.ceil(math.sqrt(factor)), chunks)
    iterations = -(-factor // max(per_block, 1))
    launched = sum(-(-size // (tile * max(iterations, 1))) for size in sizes)
    return (3 * len(sizes) + launched + len(sizes) + 1) * _INTEGER


@operator(
    "aten::_chunk_cat.out",
    source="native/cuda/TensorShape.cu, _chunk_cat_out_cuda",
    kernel_on=frozenset({"cuda"}),
).workspace("cuda")
def concatenate(tensors: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor) -> int:
    """Addresses, sizes and blocks of the chunks; ``get_chunk_cat_metadata``.

    What is not contiguous, or is to be converted otherwise than from bfloat16 to float32, is
    padded and concatenated as on the CPU (native/TensorShape.cpp, ``_pad_chunk``).
    """
    first = tensors[0]
    converts = first.dtype is torch.bfloat16 and out.dtype is torch.float32
    if not all(one.is_contiguous() for one in tensors) or not (
        converts or first.dtype is out.dtype
    ):
        return sum(_padded(one, dim, num_chunks) for one in tensors)
    blocks = 0
    for one in tensors:
        rows = -(-one.shape[dim] // num_chunks)
        nbytes = rows * math.prod(one.shape[dim + 1 :]) * out.element_size()
        blocks += -(-nbytes // (_BLOCK * _BYTES_PER_THREAD))
    return (6 * len(tensors) + 2 + blocks) * _INTEGER


@operator("_chunk_cat", source="native/cuda/TensorShape.cu, _chunk_cat_cuda").decomposition("cuda")
def concatenated(call: GivenCall, tensors: Sequence[Tensor], dim: int, num_chunks: int) -> Tensor:
    """One kernel where all are contiguous, else padded tensors that are concatenated."""
    if not all(one.is_contiguous() for one in tensors):
        made: Tensor = run_composite_explicit(call.overload, *call.args, **call.kwargs)
        return made
    first = tensors[0]
    dim %= first.dim()
    rows = (-(-one.shape[dim] // num_chunks) for one in tensors)
    width = sum(row * one.shape[dim + 1 :].numel() for row, one in zip(rows, tensors, strict=True))
    out = first.new_empty((*first.shape[:dim], num_chunks, width))
    first.new_empty(concatenate(tensors, dim, num_chunks, out), dtype=torch.uint8)
    return out


def _padded(tensor: Tensor, dim: int, num_chunks: int) -> int:
    rows = -(-tensor.shape[dim] // num_chunks) * num_chunks
    others = math.prod((*tensor.shape[:dim], *tensor.shape[dim + 1 :]))
    return 0 if rows == tensor.shape[dim] else rows * others * tensor.element_size()


_aten: Any = torch.ops.aten


def describe() -> None:
    """Make the records of ``fsdp``'s operators, which are there when it is imported."""
    operator(
        "fsdp::all_gather_copy_in",
        also_writes=("all_gather_output",),
        takes_nothing=frozenset(DEVICES),
        holds={"all_gather_output": Kind.COMMUNICATION},
    )
    split = operator("fsdp::split_with_sizes_copy", holds={"out": Kind.UNSHARDED})
    split.decomposition()(_split)
    concatenated = operator("fsdp::chunk_cat", holds={"out": Kind.COMMUNICATION})
    concatenated.decomposition()(_concatenate)


def _split(
    all_gather_output: Tensor, all_gather_input_split_sizes: Sequence[int], dim: int, out: Any
) -> None:
    """The kernel of ATen; native/cuda/TensorShape.cu, ``split_with_sizes_copy_out_cuda``."""
    _aten.split_with_sizes_copy.out(all_gather_output, all_gather_input_split_sizes, dim, out=out)


def _concatenate(tensors: Any, dim: int, num_chunks: int, out: Tensor) -> None:
    """The kernel of ATen; native/cuda/TensorShape.cu, ``_chunk_cat_out_cuda``."""
    _aten._chunk_cat.out(tensors, dim, num_chunks, out=out)
