"""The operators of ``fully_shard``: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.operators.registry import DEVICES, operator
from pytest_torchmem.profile.timeline import Kind

_aten: Any = torch.ops.aten


def describe() -> None:
    """Make the records of ``fsdp``'s operators, which are there when it is imported."""
    operator(
        "fsdp::all_gather_copy_in",
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
