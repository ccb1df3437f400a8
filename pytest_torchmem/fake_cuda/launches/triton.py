"""Triton kernels: a launch takes nothing; what the kernel writes is computed, or unknown.

What triton asks of the GPU's driver are its properties, without a CUDA context.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.fake_cuda.launches.triton_values import computed, written_arguments
from pytest_torchmem.fake_cuda.memory import DeviceProperties
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.torch_private.patches import having, replaced_all

_ABSENT: Any = object()


@contextmanager
def triton_refused(trace: TraceContext, module: Any) -> Iterator[None]:
    """Raise an error that says where a kernel can be launched: the fake CPU is not the place."""
    original = module.JITFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if not trace.on_thread():
            return original(kernel, *args, **kwargs)
        raise UnsupportedOperatorError(
            f"{trace.user_line()}: the triton kernel {_name_of(kernel)!r} needs a GPU, and this "
            'trace is on cpu. Trace it on cuda: device="cuda", or devices=("cuda",) in a test'
        )

    with replaced_all([(module.JITFunction, {"run": run})]):
        yield


@contextmanager
def triton_autotuned(trace: TraceContext, module: Any) -> Iterator[None]:
    """Let autotuned kernels run their first configuration; triton/runtime/autotuner.py."""
    tuned = _Autotuned(trace, module.Autotuner.run)
    try:
        with replaced_all([(module.Autotuner, {"run": tuned.run})]):
            yield
    finally:
        tuned.give_back()


@contextmanager
def triton_launches(trace: TraceContext, module: Any, kind: str) -> Iterator[None]:
    """Stand in for ``kernel[grid](...)`` and ``kernel.warmup(...)`` of a kind of kernels:
    ``JITFunction`` of triton/runtime/jit.py, or ``InterpretedFunction``, which TRITON_INTERPRET=1
    runs on the host, where it has no values either.
    """
    kernels = getattr(module, kind)
    original = kernels.run

    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        if not trace.on_thread():
            return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        # An operator's geometry may be found by running its body, launches included, on ``meta``.
        if not trace.inside:
            for hook in getattr(kernel, "pre_run_hooks", ()):
                hook(*args, **kwargs)
            if not warmup:
                launch(trace, kernel, args, kwargs, grid)
        return NotCompiled(trace, kernel)

    with replaced_all([(kernels, {"run": run})]):
        yield


def launch(
    trace: TraceContext, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], grid: Any
) -> None:
    """Compute what a kernel writes, or forget what was there."""
    given = _bound(kernel, args, kwargs)
    sizes = grid(given) if callable(grid) else grid
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return  # driver.c of triton's backend launches nothing then
    for position, (name, value) in enumerate(given.items()):
        for tensor in _tensors(value):
            _check_device(kernel, position, name, tensor)
    if computed(trace, kernel, given, sizes):
        return
    written = written_arguments(kernel)
    trace.values.forget(
        [
            tensor
            for name, value in given.items()
            if written is None or name in written
            for tensor in _tensors(value)
        ]
    )


def _bound(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kernel's arguments by name, with defaults; options of the launch are none.

    Raises ``TypeError``, as triton does, for one that is missing.
    """
    parameters = signature(kernel.fn).parameters
    bound = signature(kernel.fn).bind(
        *args, **{name: value for name, value in kwargs.items() if name in parameters}
    )
    bound.apply_defaults()
    return dict(bound.arguments)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an argument is or holds: tuples, descriptors, reinterpreted ones."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(getattr(value, "base", None), Tensor):
        yield value.base


def _check_device(kernel: Any, position: int, name: str, tensor: Tensor) -> None:
    """Raise what triton raises for memory that a GPU cannot reach (backends/nvidia/driver.c)."""
    if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
        raise ValueError(
            f"Pointer argument (at {position}) cannot be accessed from Triton (cpu tensor?): "
            f"{name} of {_name_of(kernel)} is on {tensor.device}"
        )


def _name_of(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", None) or getattr(kernel, "_fn_name", "the kernel"))


class NotCompiled:
    """What a launch or ``kernel.warmup(...)`` returns: a kernel that can be launched again."""

    def __init__(self, trace: TraceContext, kernel: Any) -> None:
        self._trace = trace
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> "Callable[..., NotCompiled]":
        return lambda *args, **kwargs: self._kernel.run(*args, grid=grid, warmup=False, **kwargs)

    def _init_handles(self) -> None:
        """Load nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedOperatorError(
            f"{self._trace.user_line()}: .{name} of the triton kernel {_name_of(self._kernel)!r} "
            "is not known: a trace does not compile kernels. Skip this line while tracing, or "
            "compile with triton.compile(..., target=...), which needs no GPU"
        )


class _Autotuned:
    """Runs the first configuration of autotuned kernels in one trace."""

    def __init__(self, trace: TraceContext, original: Callable[..., Any]) -> None:
        self._trace = trace
        self._original = original
        self._seen: set[Any] = set()
        """Of which arguments a real run would have compared the configurations already."""
        self._before: dict[int, tuple[Any, Any]] = {}
        """Tuners that ran, with the best configuration that they knew, by ``id``."""

    def run(self, tuner: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the first configuration that is left after pruning, with the hooks of the others.

        A real run compares the configurations at the first launch with arguments of a kind, and
        then calls ``pre_hook`` once more with ``reset_only``.
        """
        if not self._trace.on_thread():
            return self._original(tuner, *args, **kwargs)
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        try:
            configs = tuner.configs
            config = configs[0] if len(configs) == 1 else tuner.prune_configs(kwargs)[0]
            given = {**tuner.nargs, **kwargs, **config.all_kwargs()}
            if len(configs) > 1 and not self._is_known(tuner, kwargs):
                tuner.pre_hook(given, reset_only=True)
            self._before.setdefault(id(tuner), (tuner, vars(tuner).get("best_config", _ABSENT)))
            tuner.best_config = config
            if config.pre_hook is not None:
                config.pre_hook(given)
            return tuner.fn.run(*args, **kwargs, **config.all_kwargs())
        finally:
            tuner.nargs = None

    def _is_known(self, tuner: Any, kwargs: Mapping[str, Any]) -> bool:
        given = {**tuner.nargs, **kwargs}
        given = {name: value for name, value in given.items() if name in tuner.arg_names}
        key = (
            id(tuner),
            tuple(given[name] for name in tuner.keys if name in given),
            tuple(str(value.dtype) for value in given.values() if hasattr(value, "dtype")),
        )
        known = key in self._seen
        self._seen.add(key)
        return known

    def give_back(self) -> None:
        """Let tuners know the best configurations that they knew before."""
        for tuner, best in self._before.values():
            if best is _ABSENT:
                del tuner.best_config
            else:
                tuner.best_config = best


def triton_driver(trace: TraceContext, module: Any) -> AbstractContextManager[None]:
    """Let ``triton.runtime.driver.active`` be that of the trace's GPU; triton/runtime/driver.py."""
    name = "_active" if "_active" in vars(module.driver) else "active"
    return having(module.driver, **{name: Driver(trace)})


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
