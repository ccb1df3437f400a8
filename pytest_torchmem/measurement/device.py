"""The one place that calls ``torch.cuda``: what a measurement asks of a real GPU.

Tests put another in the place of ``Device``, so that all else can be tried without a GPU. Nothing
here runs unless a measurement was asked for: ``torch.cuda.is_available`` counts devices, and most
of the rest makes a CUDA context.
"""

import ctypes
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from pytest_torchmem.journal.journal import what_stands
from pytest_torchmem.targets.gpus import Gpu, find_gpu, gpu_names
from pytest_torchmem.torch_private import devices

_HISTORY = 4_000_000
"""Requests and releases kept; what one step makes is three to four orders below."""
_SIZE = re.compile("Size|Nnz|Estimation|MakePlan")
"""In the names of library functions that tell how much memory their library takes."""
_MEMORY_SPREAD = 0.06
"""What a driver keeps for itself of a GPU's memory, and the data sheet counts."""


class Device:
    """The current CUDA device of this process, whose caching allocator counts."""

    out_of_memory: type[BaseException] = torch.OutOfMemoryError

    @property
    def torch_device(self) -> torch.device:
        """The device that is current when it is first asked for a tensor."""
        return torch.device("cuda", torch.cuda.current_device())

    def why_not(self) -> str:
        """Return why nothing can be measured, "" where it can; makes no CUDA context."""
        if what_stands() is not None:
            return "the GPU that the program sees here is a fake one"
        if not torch.backends.cuda.is_built():
            return "this build of torch has no CUDA"
        if torch.version.hip is not None:
            return "this build of torch is for ROCm, which is not supported"
        if not devices.has_gpu():
            return "there is no CUDA device here"
        return ""

    def gpu(self) -> Gpu:
        """Return the driver's description of the GPU, under the catalogue's name if it has one.
        Makes a CUDA context.
        """
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return known_gpu(
            Gpu(
                name_of(found.name),
                found.name,
                (found.major, found.minor),
                found.total_memory,
                found.multi_processor_count,
                found.max_threads_per_multi_processor,
            )
        )

    @property
    def is_stand_in(self) -> bool:
        """Whether torch's CUDA code runs on the stand-in, where kernels compute nothing."""
        return "STAND_IN_NAME" in os.environ

    def take_untold(self) -> tuple[str, ...]:
        """Return what the stand-in could not tell since this was last asked. That is "values" where
        the program read some of the GPU's, and the names of functions by which libraries tell sizes
        (notes.c).
        """
        if not self.is_stand_in:
            return ()
        text = ctypes.create_string_buffer(1 << 18)
        ctypes.CDLL(None).stand_in_take_notes(text, len(text))
        names = (line.split()[0] for line in text.value.decode().splitlines())
        return tuple(name for name in names if name == "values" or _SIZE.search(name))

    def cudnn(self) -> str:
        """Return cuDNN's version, such as "9.19.0"; "" for a torch without it."""
        return version_of_cudnn(torch.backends.cudnn.version())

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(torch.cuda.current_device())

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have a GPU alone: the workers of a run with pytest-xdist share the GPUs of a machine, and
        of those that have the same, one measures at a time.
        """
        worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
        if not worker.isdecimal():
            yield
            return
        from filelock import FileLock

        index = int(worker) % torch.cuda.device_count()
        user = getattr(os, "getuid", int)()  # on Windows each user has a folder of their own
        path = Path(tempfile.gettempdir(), f"torchmem-{user}-gpu-{index}.lock")
        with torch.cuda.device(index), FileLock(path):
            yield

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the GPU, other processes' memory included."""
        free, total = torch.cuda.mem_get_info()
        return free, total

    def statistics(self) -> Mapping[str, int]:
        """Return what ``torch.cuda.memory_stats`` gives: this process' bytes alone."""
        return torch.cuda.memory_stats()

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give back what is reserved and not used, libraries' workspaces included.

        cuBLAS's workspaces are tensors that the handles keep (aten/src/ATen/cuda/
        CublasHandlePool.cpp, ``clearCublasWorkspaces``); a step that begins without them takes
        them anew, as it does in a fresh process.
        """
        torch.cuda.synchronize()
        devices.clear_cublas_workspaces()
        torch.cuda.empty_cache()

    def generator_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def start_history(self) -> None:
        """Write down every request and release from now on, without stacks."""
        devices.record_memory_history("all", context=None, max_entries=_HISTORY, clear_history=True)

    def stop_history(self) -> Sequence[Mapping[str, Any]]:
        """Stop, and return the entries of this device's trace in order, if there are any."""
        traces = devices.memory_snapshot()["device_traces"]
        devices.record_memory_history(None)
        index = torch.cuda.current_device()
        return list(traces[index]) if index < len(traces) else ()


def cuda_device() -> Device:
    """Return the GPU to measure on; tests put another in its place."""
    return Device()


def name_of(product: str) -> str:
    """Return a product's name as the catalogue writes them: ``"rtx-4080"``, ``"h100-pcie"``."""
    words = product.lower().replace("/", "-").split()
    left_out = ("nvidia", "tesla", "geforce", "quadro")
    return "-".join(word for word in words if word not in left_out) or "gpu"


def version_of_cudnn(number: int | None) -> str:
    """Return the version that ``cudnnGetVersion`` gives as one number: 91900 is ``"9.19.0"``. Up to
    version 8 the major one counts thousands (cudnn_version.h, ``CUDNN_VERSION``).
    """
    if not number:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def known_gpu(found: Gpu) -> Gpu:
    """Return ``found`` under the catalogue's name, if the catalogue has the GPU.

    It is one where everything agrees that changes what kernels take: compute capability and
    multiprocessors. The memory tells variants apart (A100 of 40 and of 80 GB), and of those that
    are left, the name of the product, then the nearest memory (H100 NVL and GH200).
    """
    alike = [
        known
        for known in map(find_gpu, gpu_names())
        if known.capability == found.capability
        and known.multiprocessors == found.multiprocessors
        and known.threads_per_multiprocessor == found.threads_per_multiprocessor
        and abs(known.memory - found.memory) <= _MEMORY_SPREAD * known.memory
    ]
    return min(
        alike,
        key=lambda known: (known.product != found.product, abs(known.memory - found.memory)),
        default=found,
    )
