"""``torch.cuda`` and its neighbours in a trace, module by module.

Nothing here reaches a CUDA context: with a GPU present, it is as initialised after a trace as it
was before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
from torch.nn.parallel import comm

from pytest_torchmem.fake_cuda.api import backends, data_parallel, device, profilers
from pytest_torchmem.fake_cuda.api.generators import Generator, random_functions
from pytest_torchmem.fake_cuda.api.graphs import (
    CUDAGraph,
    Graph,
    MemPool,
    graph_functions,
    pool_functions,
)
from pytest_torchmem.fake_cuda.api.memory import memory_functions
from pytest_torchmem.fake_cuda.api.nccl import NCCL
from pytest_torchmem.fake_cuda.api.session import Api
from pytest_torchmem.fake_cuda.api.streams import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    stream_functions,
)
from pytest_torchmem.fake_cuda.api.unsupported import UNSUPPORTED
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext

_CUDA = (
    torch.cuda,
    torch.cuda.graphs,
    torch.cuda.memory,
    torch.cuda.random,
    torch.cuda.streams,
)
_ACCELERATOR = (torch.accelerator, torch.accelerator.memory)


def torch_cuda(
    trace: TraceContext, memories: Sequence[DeviceMemory], generators: Sequence[Generator]
) -> list[Api]:
    """Return what the modules have about each GPU, with its memory and its default generator."""
    return [_about(trace, index, memories, generators) for index in range(len(memories))]


def _about(
    trace: TraceContext,
    index: int,
    memories: Sequence[DeviceMemory],
    generators: Sequence[Generator],
) -> Api:
    memory = memories[index]
    gpu = memory.gpu
    of_memory = memory_functions(memory, memories)
    of_streams = stream_functions(index)
    cuda = {
        **device.device_functions(trace, gpu, index),
        **device.runtime_functions(memory),
        **of_streams,
        **graph_functions(index),
        **pool_functions(memories),
        **UNSUPPORTED,
        **random_functions(generators[index], generators),
        **of_memory,
    }
    accelerator = {**of_streams, **device.accelerator_functions(trace, index, of_memory)}
    return Api(
        (
            *[(module, cuda) for module in _CUDA],
            *[(module, accelerator) for module in _ACCELERATOR],
            (torch.backends.cudnn, backends.CUDNN),
            (torch.backends.cudnn.rnn, backends.CUDNN_RNN),
            (torch.backends.cuda, {**backends.BUILT, **backends.blas(gpu)}),
            (torch.cuda.nccl, NCCL),
            (torch.cuda.nvtx, profilers.NVTX),
            (torch.cuda.profiler, profilers.CUDA_PROFILER),
            (comm, data_parallel.communication(trace)),
        ),
        _CLASSES,
    )


_CLASSES = tuple(
    (module, name, kind)
    for name, kind, modules in (
        ("Stream", Stream, (torch, torch.cuda, torch.cuda.streams)),
        ("Event", Event, (torch, torch.cuda, torch.cuda.streams)),
        ("StreamContext", StreamContext, (torch.cuda,)),
        ("ExternalStream", ExternalStream, (torch.cuda, torch.cuda.streams)),
        ("CUDAGraph", CUDAGraph, (torch.cuda, torch.cuda.graphs)),
        ("Graph", Graph, (torch.accelerator,)),
        ("MemPool", MemPool, (torch.cuda, torch.cuda.memory)),
    )
    for module in modules
)
