"""What triton asks of the driver of the GPU: its properties, without a CUDA context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.fake_cuda.device_properties import DeviceProperties
from pytest_torchmem.interception.context import TraceContext


@contextmanager
def triton_driver(trace: TraceContext, module: Any) -> Iterator[None]:
    """Let ``triton.runtime.driver.active`` be that of the trace's GPU; triton/runtime/driver.py."""
    config = module.driver
    name = "_active" if "_active" in vars(config) else "active"
    before = vars(config)[name]
    setattr(config, name, Driver(trace))
    try:
        yield
    finally:
        setattr(config, name, before)


class Driver:
    """The driver of a GPU that is not there; triton/backends/nvidia/driver.py, ``CudaDriver``."""

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace
        self.utils = SimpleNamespace(get_device_properties=partial(_properties, trace))

    def get_current_target(self) -> Any:
        """Return what kernels are compiled for."""
        major, minor = self._trace.gpu.capability
        return import_module("triton.backends.compiler").GPUTarget("cuda", major * 10 + minor, 32)

    def get_current_device(self) -> int:
        """Return the index of the GPU."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one."""

    def get_current_stream(self, device: int = 0) -> int:
        """Return the default stream."""
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        """Return the compute capability."""
        return self._trace.gpu.capability

    def get_active_torch_device(self) -> torch.device:
        """Return the GPU as torch names it."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """Return torch's module for it."""
        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmark: it runs a function once, in which nothing takes time."""

        def benchmark(function: Callable[[], Any], *, quantiles: Any = None, **_: Any) -> Any:
            function()
            return 1.0 if quantiles is None else [1.0] * len(quantiles)

        return benchmark

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        """Return what is cleared between two runs: 256 MiB, as for every GPU."""
        return torch.empty(256 * 1024 * 1024 // 4, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        """Clear it."""
        cache.zero_()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperatorError(
            f"{self._trace.user_line()}: triton's driver cannot be asked for {name} in a trace: "
            "no kernel is compiled or loaded. Skip this line while tracing"
        )


def _properties(trace: TraceContext, device: int = 0) -> dict[str, int]:
    known = DeviceProperties(trace.gpu)
    properties = {
        "multiprocessor_count": known.multi_processor_count,
        "warpSize": known.warp_size,
        "max_num_regs": known.regs_per_multiprocessor,
    }
    shared = getattr(known, "shared_memory_per_block_optin", None)
    return properties if shared is None else {**properties, "max_shared_mem": shared}
