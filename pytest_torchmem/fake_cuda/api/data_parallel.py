"""``torch.nn.DataParallel`` with one GPU, and what it is made of: tensors go there and come back.

On that GPU a part is the whole, and a sum is that of one tensor; torch/csrc/cuda/comm.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import comm, scatter_gather

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import Replacements

_CPU = torch.device("cpu")
_GPU = torch.device("cuda", 0)


def scatter(trace: TraceContext) -> Replacements:
    """Let ``Scatter`` ask for no device by its number alone, which C++ takes for a real one."""
    original: Any = vars(scatter_gather)["Scatter"]

    class Scatter:
        @staticmethod
        def apply(target_gpus: Any, chunk_sizes: Any, dim: int, input: Tensor) -> Any:
            if trace.off():
                return original.apply(target_gpus, chunk_sizes, dim, input)
            return comm.scatter(input, target_gpus, chunk_sizes, dim)

    return [(scatter_gather, {"Scatter": Scatter})]


def _moved(tensor: Tensor, out: Sequence[Tensor] | None) -> Tensor:
    return tensor.to(_GPU) if out is None else out[0].copy_(tensor)


def _scatter(
    tensor: Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    return (_moved(tensor.chunk(1, dim)[0], out),)


def _gather(
    tensors: Sequence[Tensor], dim: int = 0, destination: Any = None, *, out: Tensor | None = None
) -> Tensor:
    if out is not None:
        return torch.cat(list(tensors), dim, out=out)
    return torch.cat(list(tensors), dim).to(_CPU if destination in (-1, "cpu", _CPU) else _GPU)


COMMUNICATION: dict[str, Callable[..., Any]] = {
    "broadcast": lambda tensor, devices=None, *, out=None: (_moved(tensor, out),),
    "broadcast_coalesced": lambda tensors, devices, buffer_size=0: [
        [tensor.to(_GPU) for tensor in tensors]
    ],
    "gather": _gather,
    "reduce_add": lambda inputs, destination=None: inputs[0],
    "reduce_add_coalesced": lambda inputs, destination=None, buffer_size=0: tuple(inputs[0]),
    "scatter": _scatter,
}
"""The functions of ``torch.nn.parallel.comm``."""
