"""``torch.cuda`` and its neighbours in a trace, module by module.

Nothing here reaches a CUDA context: with a GPU present, it is as initialised after a trace as it
was before.
"""

from __future__ import annotations

import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nvtx
import torch.cuda.profiler
from torch.nn.parallel import comm

from pytest_torchmem.fake_cuda.api import backends, data_parallel, device, profilers
from pytest_torchmem.fake_cuda.api.generators import Generator, random_functions
from pytest_torchmem.fake_cuda.api.memory import memory_functions
from pytest_torchmem.fake_cuda.api.session import Api
from pytest_torchmem.fake_cuda.api.streams import (
    STREAM_FUNCTIONS,
    Event,
    ExternalStream,
    Stream,
    StreamContext,
)
from pytest_torchmem.fake_cuda.api.unsupported import UNSUPPORTED, CUDAGraph, MemPool
from pytest_torchmem.fake_cuda.memory import DeviceMemory

_CUDA = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
_ACCELERATOR = (torch.accelerator, torch.accelerator.memory)


def torch_cuda(memory: DeviceMemory, generator: Generator) -> Api:
    """Return what the modules have for the GPU of ``memory`` and its default ``generator``."""
    gpu = memory.gpu
    of_memory = memory_functions(memory)
    cuda = {
        **device.device_functions(gpu),
        **device.runtime_functions(memory),
        **STREAM_FUNCTIONS,
        **UNSUPPORTED,
        **random_functions(generator),
        **of_memory,
    }
    accelerator = {**STREAM_FUNCTIONS, **device.accelerator_functions(gpu, of_memory)}
    return Api(
        (
            *[(module, cuda) for module in _CUDA],
            *[(module, accelerator) for module in _ACCELERATOR],
            (torch.backends.cudnn, backends.CUDNN),
            (torch.backends.cudnn.rnn, backends.CUDNN_RNN),
            (torch.backends.cuda, {**backends.BUILT, **backends.blas(gpu)}),
            (torch.cuda.nvtx, profilers.NVTX),
            (torch.cuda.profiler, profilers.CUDA_PROFILER),
            (comm, data_parallel.COMMUNICATION),
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
        ("Graph", CUDAGraph, (torch.accelerator,)),
        ("MemPool", MemPool, (torch.cuda, torch.cuda.memory)),
    )
    for module in modules
)
