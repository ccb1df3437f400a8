"""Several GPUs in one process: ``torch.nn.DataParallel``, its parts, and NCCL.

Builds for the CPU come without torch/csrc/cuda/comm.cpp, which is followed here, and without NCCL
(``torch.cuda.nccl`` and its process groups). With one GPU a part is the whole, and a sum is that of
one tensor. A collective of ``torch.distributed`` is an operator and never gets to a backend
(``interception/world.py``), so that torch's fake process group can stand for NCCL's.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import parallel
from torch.nn.parallel import comm, scatter_gather

from pytest_torchmem.fake_cuda.api.session import SESSION, FakeGpu, Functions
from pytest_torchmem.interception.context import Layer, TraceContext
from pytest_torchmem.targets.target import as_device
from pytest_torchmem.torch_private import distributed, patches

_CPU = torch.device("cpu")
#: Where ``parallel_apply`` is looked up: two of these modules share their names with a function.
_MODULES: tuple[Any, ...] = (
    import_module("torch.nn.parallel.data_parallel"),
    import_module("torch.nn.parallel.parallel_apply"),
    parallel,
)
_BUFFER = 10_485_760


def data_parallel(trace: TraceContext) -> patches.Replacements:
    """Let ``Scatter`` ask for no stream by a number alone, and replicas run one after another.
    torch runs each on a thread of its own. What a GPU is asked for is the same.
    """
    original: Any = vars(scatter_gather)["Scatter"]
    apply: Any = vars(_MODULES[0])["parallel_apply"]

    class Scatter:
        @staticmethod
        def apply(target_gpus: Any, chunk_sizes: Any, dim: int, input: Tensor) -> Any:
            if trace.off():
                return original.apply(target_gpus, chunk_sizes, dim, input)
            return comm.scatter(input, target_gpus, chunk_sizes, dim)

    def one_by_one(modules: Any, inputs: Any, kwargs_tup: Any = None, devices: Any = None) -> Any:
        if trace.off() or len(modules) == 1:
            return apply(modules, inputs, kwargs_tup, devices)
        outputs = []
        for position, (module, given) in enumerate(zip(modules, inputs, strict=True)):
            of_it = [None if each is None else [each[position]] for each in (kwargs_tup, devices)]
            outputs += apply([module], [given], *of_it)
        return outputs

    return [
        (scatter_gather, {"Scatter": Scatter}),
        *[(module, {"parallel_apply": one_by_one}) for module in _MODULES],
    ]


def _device(named: Any) -> torch.device:
    return SESSION.running.device(as_device(named))


def _broadcast_to(
    gpu: FakeGpu, tensor: Tensor, devices: Any = None, *, out: Sequence[Tensor] | None = None
) -> tuple[Tensor, ...]:
    if out is not None:
        return tuple(one.copy_(tensor) for one in out)
    return tuple(tensor.to(_device(onto)) for onto in devices)


def _broadcast_coalesced(
    gpu: FakeGpu, tensors: Sequence[Tensor], devices: Any, buffer_size: int = _BUFFER
) -> list[list[Tensor]]:
    first, *others = map(_device, devices)
    found = [[tensor.to(first) for tensor in tensors], *[[] for _ in others]]
    for chunk in _chunks(tensors, buffer_size) if others else ():
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        for outputs, onto in zip(found[1:], others, strict=True):
            parts = flat.to(onto).split([tensor.numel() for tensor in chunk])
            outputs += [part.view(tensor.shape) for part, tensor in zip(parts, chunk, strict=True)]
    return found


def _scatter(
    gpu: FakeGpu,
    tensor: Tensor,
    devices: Any = None,
    chunk_sizes: Any = None,
    dim: int = 0,
    streams: Any = None,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    number = len(devices if out is None else out)
    if out is not None:
        chunk_sizes = [one.size(dim) for one in out]
    parts = tensor.chunk(number, dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    if out is not None:
        return tuple(one.copy_(part) for one, part in zip(out, parts, strict=True))
    return tuple(part.to(_device(onto)) for part, onto in zip(parts, devices, strict=False))


def _gather(
    gpu: FakeGpu,
    tensors: Sequence[Tensor],
    dim: int = 0,
    destination: Any = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    named = "cuda" if destination is None else destination
    onto = _CPU if named in (-1, "cpu", _CPU) else _device(named)
    return _joined(tensors, dim, onto, out)


COMMUNICATION: Functions = {
    "broadcast": _broadcast_to,
    "broadcast_coalesced": _broadcast_coalesced,
    "gather": _gather,
    "scatter": _scatter,
}
"""The functions of ``torch.nn.parallel.comm``; torch's own that add go through NCCL's."""


def _joined(tensors: Sequence[Tensor], dim: int, onto: torch.device, out: Tensor | None) -> Tensor:
    """Return tensors of several GPUs in one on ``onto``, or in ``out``."""
    if len(tensors) == 1:
        if out is not None:
            return torch.cat(list(tensors), dim, out=out)
        return torch.cat(list(tensors), dim).to(onto)
    if out is None:
        shape = list(tensors[0].shape)
        shape[dim] = sum(tensor.size(dim) for tensor in tensors)
        out = torch.empty(shape, dtype=tensors[0].dtype, device=onto)
    parts = out.split([tensor.size(dim) for tensor in tensors], dim)
    for part, tensor in zip(parts, tensors, strict=True):
        part.copy_(tensor)
    return out


def _chunks(tensors: Sequence[Tensor], buffer_size: int) -> Iterator[list[Tensor]]:
    """Yield tensors of one type that go together; torch/csrc/utils/tensor_flatten.cpp."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        group = groups.setdefault(tensor.dtype, [])
        group.append(tensor)
        if sum(one.nbytes for one in group) >= buffer_size:
            yield groups.pop(tensor.dtype)
    yield from groups.values()


NCCL_VERSION = (2, 28, 9)
"""The NCCL that torch 2.13's CUDA wheels ask for."""


def nccl_process_groups(trace: TraceContext) -> Layer[None]:
    """Have the backend ``"nccl"`` in ``torch.distributed``."""
    replacements, looked_at = distributed.nccl_groups(trace.off)
    return Layer(replacements, None, looked_at=looked_at)


def _is_available(gpu: FakeGpu, tensors: Sequence[Tensor]) -> bool:
    """As torch/cuda/nccl.py, ``is_available``: one dense tensor on each of some GPUs."""
    dense = all(one.is_cuda and not one.is_sparse and one.is_contiguous() for one in tensors)
    return dense and len({one.get_device() for one in tensors}) == len(tensors)


def _all_reduce(gpu: FakeGpu, inputs: Any, outputs: Any = None, *_: Any, **__: Any) -> None:
    for output, given in zip(inputs if outputs is None else outputs, inputs, strict=True):
        output.copy_(given)


def _reduce(
    gpu: FakeGpu, inputs: Any, output: Any = None, root: int = 0, *_: Any, outputs: Any = None
) -> None:
    found = output if outputs is None else outputs
    if not isinstance(found, Tensor | None):
        found = found[root]
    (inputs[root] if found is None else found).copy_(inputs[root])


def _broadcast(gpu: FakeGpu, inputs: Sequence[Tensor], root: int = 0, *_: Any, **__: Any) -> None:
    for tensor in inputs:
        if tensor is not inputs[root]:
            tensor.copy_(inputs[root])


def _all_gather(
    gpu: FakeGpu, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *_: Any, **__: Any
) -> None:
    for output in outputs:
        for part, given in zip(output.view(-1).chunk(len(inputs)), inputs, strict=True):
            part.copy_(given.view(-1))


def _reduce_scatter(
    gpu: FakeGpu, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *_: Any, **__: Any
) -> None:
    for position, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
        output.view(-1).copy_(given.view(-1).chunk(len(outputs))[position])


NCCL: Functions = {
    "version": lambda gpu: NCCL_VERSION,
    "is_available": _is_available,
    "all_reduce": torch.no_grad()(_all_reduce),
    "reduce": torch.no_grad()(_reduce),
    "broadcast": torch.no_grad()(_broadcast),
    "all_gather": torch.no_grad()(_all_gather),
    "reduce_scatter": torch.no_grad()(_reduce_scatter),
}
"""The functions of ``torch.cuda.nccl``, which takes nothing of the allocator's memory."""
