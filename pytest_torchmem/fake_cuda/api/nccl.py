"""NCCL, which builds for the CPU come without: ``torch.cuda.nccl`` and its process groups.

A collective of ``torch.distributed`` is an operator and never gets to a backend
(``interception/distributed.py``), so that torch's fake process group can stand for NCCL's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.torch_private.distributed.process_groups import Additions, nccl_groups
from pytest_torchmem.torch_private.patching.patches import added

NCCL_VERSION = (2, 28, 9)
"""The NCCL that torch 2.13's CUDA wheels ask for."""


@contextmanager
def nccl_process_groups() -> Iterator[None]:
    """Have the backend ``"nccl"`` in ``torch.distributed``."""
    with LASTING.layer("nccl", _functions) as additions, added(additions):
        yield


def _functions(trace: TraceContext) -> Layer[Additions]:
    """Return the layer, whose owner is what modules get that do not have it."""
    replacements, additions, looked_at = nccl_groups(trace.off)
    return Layer(replacements, additions, looked_at=looked_at)


def _is_available(tensors: Sequence[Tensor]) -> bool:
    """As torch/cuda/nccl.py, ``is_available``: one dense tensor on each of some GPUs."""
    dense = all(one.is_cuda and not one.is_sparse and one.is_contiguous() for one in tensors)
    return dense and len({one.get_device() for one in tensors}) == len(tensors)


def _all_reduce(inputs: Any, outputs: Any = None, *_: Any, **__: Any) -> None:
    for output, given in zip(inputs if outputs is None else outputs, inputs, strict=True):
        output.copy_(given)


def _reduce(inputs: Any, output: Any = None, root: int = 0, *_: Any, outputs: Any = None) -> None:
    found = output if outputs is None else outputs
    if not isinstance(found, Tensor | None):
        found = found[root]
    (inputs[root] if found is None else found).copy_(inputs[root])


def _broadcast(inputs: Sequence[Tensor], root: int = 0, *_: Any, **__: Any) -> None:
    for tensor in inputs:
        if tensor is not inputs[root]:
            tensor.copy_(inputs[root])


def _all_gather(inputs: Sequence[Tensor], outputs: Sequence[Tensor], *_: Any, **__: Any) -> None:
    for output in outputs:
        for part, given in zip(output.view(-1).chunk(len(inputs)), inputs, strict=True):
            part.copy_(given.view(-1))


def _reduce_scatter(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], *_: Any, **__: Any
) -> None:
    for position, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
        output.view(-1).copy_(given.view(-1).chunk(len(outputs))[position])


NCCL: dict[str, Callable[..., Any]] = {
    "version": lambda: NCCL_VERSION,
    "is_available": _is_available,
    "all_reduce": torch.no_grad()(_all_reduce),
    "reduce": torch.no_grad()(_reduce),
    "broadcast": torch.no_grad()(_broadcast),
    "all_gather": torch.no_grad()(_all_gather),
    "reduce_scatter": torch.no_grad()(_reduce_scatter),
}
"""The functions of ``torch.cuda.nccl``, which takes nothing of the allocator's memory."""
