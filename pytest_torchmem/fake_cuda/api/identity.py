"""Fake cuda in Python: tensors say that they are on ``cuda:0`` while C++ sees the CPU.

What the workers of a ``DataLoader`` load is pinned on the trace's thread. torch pins it on a thread
of the loader's own (torch/utils/data/_utils/pin_memory.py), which a trace knows nothing of: with a
GPU present it would get pinned memory from the real one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from pytest_torchmem.fake_cuda.api.backends import CUDA_VERSION, attention, bindings
from pytest_torchmem.fake_cuda.api.data_parallel import data_parallel, nccl_process_groups
from pytest_torchmem.fake_cuda.api.device import device_numbers, lazy_init
from pytest_torchmem.fake_cuda.api.factories import DefaultType, factories, legacy_types
from pytest_torchmem.fake_cuda.api.fake_tensors import (
    WrapperSubclasses,
    fake_tensors,
    nested_tensors,
)
from pytest_torchmem.fake_cuda.api.generators import Generator, generators
from pytest_torchmem.fake_cuda.api.graphs import graphs_captured
from pytest_torchmem.fake_cuda.api.operators import DispatchModes, guessed_devices, operators
from pytest_torchmem.fake_cuda.api.session import session
from pytest_torchmem.fake_cuda.api.storages import Storages, torchscript_files
from pytest_torchmem.fake_cuda.api.tensor_methods import DeviceMethods, parse_to
from pytest_torchmem.fake_cuda.api.torch_cuda import profilers, torch_cuda
from pytest_torchmem.fake_cuda.launches.libraries import ON_GPU, launching_libraries
from pytest_torchmem.fake_cuda.launches.raw import raw_kernels
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Functions, Layer, instead_of
from pytest_torchmem.step.generators import gpu_generators
from pytest_torchmem.torch_private import patches
from pytest_torchmem.torch_private.devices import bindings_known
from pytest_torchmem.torch_private.modes import made_by
from pytest_torchmem.torch_private.patches import (
    LookedAt,
    Replacements,
    begin_loading,
    next_batch,
    pin_memory,
    replaced,
)


@contextmanager
def cuda_identity(trace: TraceContext, memories: Sequence[DeviceMemory]) -> Iterator[None]:
    """Let every common way of placing and asking for a device work for fake cuda.

    ``memories`` are those of the GPUs, by their indices.
    """
    defaults = [Generator.on_gpu(index) for index in range(len(memories))]
    with (
        LASTING.layer("cuda", _functions) as owners,
        device_numbers(),
        gpu_generators(defaults),
        nccl_process_groups(),
        graphs_captured(),
        session(trace, lambda: torch_cuda(trace, memories, defaults), memories),
        owners.wrappers.noted_in(trace),
        made_by(torch.UntypedStorage, owners.storages.make),
        made_by(torch.Tensor, owners.default_type.make),
        replaced(torch.cuda, default_generators=tuple(defaults)),
        bindings_known(bindings(), trace.off),
        launching_libraries(trace, ON_GPU),
    ):
        yield


class _Owners(NamedTuple):
    """What has to do with more than its replacements."""

    wrappers: WrapperSubclasses
    storages: Storages
    default_type: DefaultType


def _functions(trace: TraceContext) -> Layer[_Owners]:
    storages, loaders, default_type = Storages(trace), DataLoaders(trace), DefaultType()
    modes = DispatchModes(trace)
    wrappers, looked_at = WrapperSubclasses(trace), list[LookedAt]()
    replacements = [
        *DeviceMethods(trace, wrappers).replacements(),
        *storages.replacements(),
        *modes.replacements(),
        *attention(trace),
        *loaders.replacements(),
        *factories(trace, looked_at),
        *fake_tensors(trace),
        *guessed_devices(trace),
        *generators(),
        *legacy_types(trace, default_type),
        *nested_tensors(trace),
        *operators(trace),
        *profilers(trace),
        *data_parallel(trace),
        *_private_functions(trace),
        *lazy_init(trace),
        *torchscript_files(trace),
        *raw_kernels(trace),
        (torch.version, {"cuda": CUDA_VERSION}),
    ]
    begin = (wrappers.begin, loaders.begin, default_type.reset, modes.reset)
    return Layer(replacements, _Owners(wrappers, storages, default_type), begin, looked_at)


def _private_functions(trace: TraceContext) -> Replacements:
    """Replace private functions by which torch's own Python asks for devices."""
    return [
        patches.flatten_weights.unless(trace.off, lambda: True),  # CUDA builds come with cuDNN
        patches.group_tensors.unless(trace.off, _group),
        patches.parse_to.by(parse_to),
    ]


def _group(lists: Any, with_indices: bool = False) -> Any:
    """Group lists of tensors by the device and dtype of the first list's.

    As aten/src/ATen/native/ForeachUtils.h, ``_group_tensors_by_first_tensors_device_and_dtype``,
    does by the devices that C++ sees.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    for position, tensor in enumerate(lists[0]):
        if tensor is None:
            continue
        members, indices = groups.setdefault(
            (tensor.device, tensor.dtype), ([[] for _ in lists], [])
        )
        for member, tensors in zip(members, lists, strict=True):
            if tensors:
                member.append(tensors[position])
        if with_indices:
            indices.append(position)
    return groups


class DataLoaders(Functions):
    """Loaders that are iterated in the trace have no thread of their own to pin on."""

    def __init__(self, trace: TraceContext) -> None:
        super().__init__(trace)
        self._pinning: WeakSet[Any] = WeakSet()

    def begin(self) -> None:
        """Forget the loaders of the trace before."""
        self._pinning.clear()

    @instead_of(begin_loading)
    def begin_loading(self, original: Any, iterator: Any, loader: Any) -> None:
        """Begin to load."""
        if self._trace.off() or not loader.pin_memory:
            original(iterator, loader)
            return
        loader.pin_memory = False
        try:
            original(iterator, loader)
        finally:
            loader.pin_memory = True
        self._pinning.add(iterator)

    @instead_of(next_batch)
    def next_data(self, original: Any, iterator: Any) -> Any:
        """Return the next batch."""
        data = original(iterator)
        return pin_memory(data) if iterator in self._pinning and not self._trace.off() else data
