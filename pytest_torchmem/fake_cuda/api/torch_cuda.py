"""Fake cuda in Python: tensors say that they are on ``cuda:0`` while C++ sees the CPU.

``torch.cuda`` and its neighbours, module by module, and what a build with CUDA brings.

Nothing here reaches a CUDA context: with a GPU present, it is as initialised after a trace as it
was before. Raw pointers and what only a driver has are refused; profilers of CUDA run, and see
nothing. Builds without CUDA lack functions of ``torch._C`` (torch/csrc/cuda/Module.cpp).
``_cuda_getDeviceCount`` is not replaced: torch takes a build that has it for one with CUDA.

What the workers of a ``DataLoader`` load is pinned on the trace's thread. torch pins it on a thread
of the loader's own (torch/utils/data/_utils/pin_memory.py), which a trace knows nothing of: with a
GPU present it would get pinned memory from the real one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn, cast
from weakref import WeakSet

import torch
import torch.accelerator
import torch.backends.cudnn.rnn
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
from torch.autograd import profiler
from torch.nn.parallel import comm

from pytest_torchmem.allocator.caching import segments
from pytest_torchmem.allocator.device_memory import PoolId, parse_options
from pytest_torchmem.errors import UsageError
from pytest_torchmem.fake_cuda.api import data_parallel, factories, session, streams, tensor_methods
from pytest_torchmem.fake_cuda.api.generators import RANDOM, Generator
from pytest_torchmem.fake_cuda.api.operators import DispatchModes, operators
from pytest_torchmem.fake_cuda.libraries import raw_kernels
from pytest_torchmem.fake_cuda.memory import DeviceMemory
from pytest_torchmem.interception.context import LASTING, Functions, Layer, TraceContext, instead_of
from pytest_torchmem.operators.attention.dot_product import BACKENDS, may_use
from pytest_torchmem.operators.libraries.nvidia import cublas_workspace, cublaslt_workspace
from pytest_torchmem.step.generators import gpu_generators
from pytest_torchmem.torch_private import devices, names, patches
from pytest_torchmem.torch_private.modes import made_by

CUDNN_VERSION = 91900
"""The cuDNN that comes with torch 2.13's CUDA wheels is 9.19 or newer."""

CUDA_VERSION = torch.version.cuda or "13.0"
"""What torch 2.13's CUDA wheels on PyPI are built with; a build with CUDA has its own."""


def _is_acceptable(gpu: session.FakeGpu, tensor: torch.Tensor) -> bool:
    return (
        torch.backends.cudnn.enabled
        and tensor.device.type == "cuda"
        and tensor.dtype in (torch.float16, torch.float32, torch.float64)
    )


CUDNN: session.Functions = {
    "is_available": lambda gpu: True,
    "version": lambda gpu: CUDNN_VERSION,
    "is_acceptable": _is_acceptable,
}

#: ``cudnnRNNMode_t``, which a build without cuDNN does not have.
_RNN_MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}


def _set_size(variable: str) -> NoReturn:
    raise UsageError(
        "torch.backends.cuda: a traced program cannot set the size of a cuBLAS workspace. Set the "
        f"environment variable {variable}, which a trace reads"
    )


def attention(trace: TraceContext) -> patches.Replacements:
    """Let ``torch.backends.cuda.can_use_flash_attention`` and its like answer for the GPU."""
    return [
        patches.can_use_attention[name].unless(
            trace.off, lambda params, debug=False, backend=one: may_use(trace.gpu, backend, params)
        )
        for name, one in BACKENDS.items()
    ]


def bindings() -> dict[str, Callable[..., Any]]:
    """Return them by name, for the GPUs of the trace that is running."""
    cuda, select = torch.cuda, session.SESSION.running.select
    return {
        "_accelerator_getDefaultGenerator": _default_generator,
        "_cuda_exchangeDevice": select,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getCurrentStream": lambda device: _triple(cuda.current_stream(device)),
        "_cuda_getDefaultStream": lambda device: _triple(cuda.default_stream(device)),
        "_cuda_getDevice": lambda: cuda.current_device(),
        "_cuda_isCurrentStreamCapturing": lambda: cuda.is_current_stream_capturing(),
        "_cuda_maybeExchangeDevice": select,
        "_cuda_setDevice": lambda device: cuda.set_device(device),
        "_cuda_setStream": _set_stream,
        "_cuda_synchronize": lambda: None,
    }


def _default_generator(device: int | None = None) -> torch.Generator:
    """What ``torch.accelerator.get_rng_state`` asks, and Inductor (torch/_inductor/ir.py)."""
    return torch.cuda.default_generators[torch.cuda.current_device() if device is None else device]


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    cast(Any, torch.cuda).set_stream(streams.Stream(device_index, stream_id=stream_id))


def _triple(stream: Any) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


_CLASSES = tuple(
    (module, name, kind)
    for name, kind, modules in (
        ("Stream", streams.Stream, (torch, torch.cuda, torch.cuda.streams)),
        ("Event", streams.Event, (torch, torch.cuda, torch.cuda.streams)),
        ("ExternalStream", streams.ExternalStream, (torch.cuda, torch.cuda.streams)),
        ("CUDAGraph", streams.CUDAGraph, (torch.cuda, torch.cuda.graphs)),
        ("Graph", streams.Graph, (torch.accelerator,)),
        ("MemPool", streams.MemPool, (torch.cuda, torch.cuda.memory)),
    )
    for module in modules
)


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return what raises ``UsageError`` in the place of ``torch.cuda``'s ``name``."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"torch.cuda.{name}: raw GPU pointers are not available in a trace. Allocate a tensor "
            "of that size, or skip this call while tracing"
        )

    return refuse


_OF_POINTERS = names.listed("""
    caching_allocator_alloc caching_allocator_delete caching_allocator_enable
    change_current_allocator
""")

NVTX: session.Functions = {
    "range_push": lambda gpu, msg: 0,
    "range_pop": lambda gpu: 0,
    "range_start": lambda gpu, msg: 0,
    "range_end": lambda gpu, range_id: None,
    "mark": lambda gpu, msg: None,
}
"""``torch.cuda.nvtx``."""


def profilers(trace: TraceContext) -> patches.Replacements:
    """Let ``torch.profiler`` look at the host alone, and ``emit_nvtx`` do nothing."""
    original: Any = profiler.profile.__init__
    nvtx: Any = profiler.emit_nvtx

    def init(self: Any, enabled: bool = True, **options: Any) -> None:
        if not trace.off() and (options.get("use_cuda") or options.get("use_device") == "cuda"):
            options.pop("use_cuda", None)  # torch 2.15 has it no more
            options |= {"use_device": None, "use_cpu": True}
        original(self, enabled, **options)

    silent = {
        "__enter__": patches.unless(trace.off, lambda self: self, nvtx.__enter__),
        "__exit__": patches.unless(trace.off, lambda *_: None, nvtx.__exit__),
    }
    return [(profiler.profile, {"__init__": init}), (nvtx, silent)]


def _all_segments(gpu: session.FakeGpu, pool: PoolId | None = None) -> list[dict[str, Any]]:
    found = (segments(one.memory.follow(), one.index, pool) for one in session.SESSION.gpus)
    return [segment for of_each in found for segment in of_each]


def _snapshot(
    gpu: session.FakeGpu, device: Any = None, augment_with_fx_traces: bool = False
) -> dict[str, Any]:
    traces: list[list[Any]] = [[] for _ in session.SESSION.gpus]
    return {"segments": _all_segments(gpu), "device_traces": traces, "external_annotations": []}


def _empty_cache(gpu: session.FakeGpu) -> None:
    session.SESSION.running.note_emptied()
    for one in session.SESSION.gpus:
        one.memory.empty_cache()


def _set_fraction(gpu: session.FakeGpu, fraction: Any, device: Any = None) -> None:
    # As torch.cuda.memory.set_per_process_memory_fraction.
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    gpu.memory.set_memory_fraction(fraction)


def _fraction(gpu: session.FakeGpu, device: Any = None) -> float:
    allowed = gpu.memory.allocator.allowed
    return 1.0 if allowed is None else allowed / gpu.model.memory


MEMORY: session.Functions = {
    "reset_peak_memory_stats": lambda gpu, device=None: (
        gpu.memory.follow().statistics.reset_peaks()
    ),
    "memory_stats": lambda gpu, device=None: OrderedDict(gpu.memory.statistics()),
    "memory_stats_as_nested_dict": lambda gpu, device=None: _nested(gpu.memory.statistics()),
    "memory_snapshot": lambda gpu, mempool_id=None, include_traces=True: _all_segments(
        gpu, mempool_id
    ),
    "_snapshot": _snapshot,
    "_record_memory_history": lambda gpu, *args, **kwargs: None,
    "mem_get_info": lambda gpu, device=None: gpu.memory.free_and_total(),
    "device_memory_used": lambda gpu, device=None: (
        gpu.model.memory - gpu.memory.free_and_total()[0]
    ),
    "reset_accumulated_memory_stats": lambda gpu, device=None: (
        gpu.memory.follow().statistics.reset_totals()
    ),
    "empty_cache": _empty_cache,
    "set_per_process_memory_fraction": _set_fraction,
    "get_per_process_memory_fraction": _fraction,
    "_set_allocator_settings": lambda gpu, env: gpu.memory.set_options(
        parse_options(env, gpu.memory.allocator.options)
    ),
    "get_allocator_backend": lambda gpu: "native",
    "host_memory_stats": lambda gpu: {},
    "host_memory_stats_as_nested_dict": lambda gpu: {},
    "reset_accumulated_host_memory_stats": lambda gpu: None,
    "reset_peak_host_memory_stats": lambda gpu: None,
}
"""The functions about a GPU's memory; all of them tell of one replay, snapshots of all GPUs. Those
that give one figure are torch's own, which asks ``memory_stats``."""


def _nested(statistics: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in statistics.items():
        *outer, last = name.split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return nested


_CUDA: session.Functions = {
    **session.DEVICE,
    **streams.STREAMS,
    **streams.POOLS,
    **{name: _refused(name) for name in _OF_POINTERS},
    **RANDOM,
    **MEMORY,
}
_BUILT: session.Functions = {
    **dict.fromkeys(("is_built", "is_flash_attention_available"), lambda gpu: True),
    "cublas_workspace_size": lambda gpu, size=None: (
        cublas_workspace(gpu.model) if size is None else _set_size("CUBLAS_WORKSPACE_CONFIG")
    ),
    "cublaslt_workspace_size": lambda gpu, size=None: (
        cublaslt_workspace(gpu.model) if size is None else _set_size("CUBLASLT_WORKSPACE_SIZE")
    ),
}
_ACCELERATOR: session.Functions = {
    **streams.STREAMS,
    **{name: MEMORY[name] for name in MEMORY if not name.startswith("_")},
    "get_memory_info": MEMORY["mem_get_info"],
    **session.ACCELERATOR,
}
API = session.Api(
    (
        *((module, _CUDA) for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory)),
        *((module, _CUDA) for module in (torch.cuda.random, torch.cuda.streams)),
        *((module, _ACCELERATOR) for module in (torch.accelerator, torch.accelerator.memory)),
        (torch.backends.cudnn, CUDNN),
        (torch.backends.cudnn.rnn, {"get_cudnn_mode": lambda gpu, mode: _RNN_MODES[mode]}),
        (torch.backends.cuda, _BUILT),
        (torch.cuda.nccl, data_parallel.NCCL),
        (torch.cuda.nvtx, NVTX),
        (torch.cuda.profiler, dict.fromkeys(("start", "stop"), session.nothing)),
        (comm, data_parallel.COMMUNICATION),
    ),
    _CLASSES,
)


@contextmanager
def cuda_identity(trace: TraceContext, memories: Sequence[DeviceMemory]) -> Iterator[None]:
    """Let common ways of placing and asking for a device work on GPUs with these ``memories``."""
    defaults = [Generator.on_gpu(index) for index in range(len(memories))]
    of_each = enumerate(zip(memories, defaults, strict=True))
    gpus = [session.FakeGpu(index, *of_it) for index, of_it in of_each]
    with (
        LASTING.layer("cuda", _functions) as owners,
        LASTING.layer("device numbers", session.device_numbers) as device,
        made_by(torch.device, device),
        gpu_generators(defaults),
        LASTING.layer("nccl", data_parallel.nccl_process_groups),
        # As in a new process: ``torch.cuda.graph`` has no stream of its own yet.
        patches.replaced(torch.cuda.graphs.graph, default_capture_stream=None),
        devices.host_cache_known(),
        patches.having(session.SESSION, trace=trace, gpus=gpus),
        LASTING.layer("torch.cuda", partial(session.api_functions, API)),
        made_by(torch.UntypedStorage, owners.storages.make),
        made_by(torch.Tensor, owners.default_type.make),
        patches.replaced(torch.cuda, default_generators=tuple(defaults)),
        devices.bindings_known(bindings(), trace.off),
    ):
        trace.noted_contents.append(owners.wrappers.devices)
        yield


class _Owners(NamedTuple):
    """What has to do with more than its replacements."""

    wrappers: factories.WrapperSubclasses
    storages: tensor_methods.Storages
    default_type: factories.DefaultType


def _functions(trace: TraceContext) -> Layer[_Owners]:
    storages, loaders = tensor_methods.Storages(trace), DataLoaders(trace)
    default_type, modes = factories.DefaultType(), DispatchModes(trace)
    wrappers, looked_at = factories.WrapperSubclasses(trace), list[patches.LookedAt]()
    replacements = [
        *tensor_methods.DeviceMethods(trace, wrappers).replacements(),
        *wrappers.replacements(),
        *storages.replacements(),
        *modes.replacements(),
        *attention(trace),
        *loaders.replacements(),
        *factories.factories(trace, looked_at),
        *factories.fake_tensors(trace),
        (torch, {"Generator": Generator}),
        *factories.legacy_types(trace, default_type),
        *factories.nested_tensors(trace),
        *operators(trace),
        *profilers(trace),
        *data_parallel.data_parallel(trace),
        # Private functions by which torch's own Python asks for devices.
        patches.flatten_weights.unless(trace.off, lambda: True),  # CUDA builds come with cuDNN
        patches.group_tensors.unless(trace.off, _group),
        patches.parse_to.by(tensor_methods.parse_to),
        *session.lazy_init(trace),
        *tensor_methods.ScriptFiles(trace).replacements(),
        *raw_kernels(trace),
        (torch.version, {"cuda": CUDA_VERSION}),
    ]
    begin = (wrappers.begin, loaders.begin, default_type.reset, modes.reset)
    return Layer(replacements, _Owners(wrappers, storages, default_type), begin, looked_at)


def _group(lists: Any, with_indices: bool = False) -> Any:
    """Group lists of tensors by the device and dtype of the first list's.

    As aten/src/ATen/native/ForeachUtils.h, ``_group_tensors_by_first_tensors_device_and_dtype``,
    does by the devices that C++ sees.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    for position, tensor in enumerate(lists[0]):
        if tensor is None:
            continue
        key = tensor.device, tensor.dtype
        members, indices = groups.setdefault(key, ([[] for _ in lists], []))
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

    @instead_of(patches.begin_loading)
    def begin_loading(self, original: Any, iterator: Any, loader: Any) -> None:
        if self._trace.off() or not loader.pin_memory:
            original(iterator, loader)
            return
        with patches.having(loader, pin_memory=False):
            original(iterator, loader)
        self._pinning.add(iterator)

    @instead_of(patches.next_batch)
    def next_data(self, original: Any, iterator: Any) -> Any:
        data = original(iterator)
        pins = iterator in self._pinning and not self._trace.off()
        return patches.pin_memory(data) if pins else data
