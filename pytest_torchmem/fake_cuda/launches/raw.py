"""Kernels in CUDA C++ that a program compiles itself, and addresses on the GPU for other packages.

Neither is a torch operator: what such a kernel allocates and returns is known to its author alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.geometry import on_meta
from pytest_torchmem.operators.third_party.extensions import extension_function
from pytest_torchmem.torch_private.patches import Replacements, call_jitted, replaced_all

_DESCRIBE = (
    "Put the call into a function decorated with @torch.library.custom_op and describe its outputs "
    "with @<function>.register_fake: the trace then counts the outputs without running the kernel"
)


def raw_kernels(trace: TraceContext) -> Replacements:
    """Replace what hands tensors to kernels that torch compiles, or to other packages."""
    interface: Any = vars(Tensor)["__cuda_array_interface__"]

    def cuda_array_interface(tensor: Tensor) -> Any:
        """Refuse the address that cupy, numba and others ask a tensor on the GPU for."""
        if trace.is_on_gpu(tensor):
            raise UnsupportedOperatorError(
                f"{trace.user_line()}: another package (cupy, numba, ...) asks for the address of "
                f"a tensor on the GPU, which has none in a trace. {_DESCRIBE}"
            )
        return interface.__get__(tensor)

    return [
        (Tensor, {"__cuda_array_interface__": property(cuda_array_interface)}),
        call_jitted.unless(trace.off, partial(_jitted, trace)),
    ]


def _jitted(trace: TraceContext, function: Any, *tensors: Tensor, **_: Any) -> Any:
    """Make the outputs of ``torch.cuda.jiterator``'s pointwise kernels (cuda/jiterator.py)."""
    with trace.working():
        geometry = reduce(torch.add, map(on_meta, tensors)) if len(tensors) > 1 else None
        geometry = on_meta(tensors[0]).clone() if geometry is None else geometry
    outputs = tuple(
        torch.empty_strided(
            geometry.shape, geometry.stride(), dtype=geometry.dtype, device=tensors[0].device
        )
        for _ in range(function.num_outputs)
    )
    return outputs[0] if len(outputs) == 1 else outputs


@contextmanager
def compiled_extensions(trace: TraceContext, module: Any) -> Iterator[None]:
    """Let sources for CUDA not be compiled; torch/utils/cpp_extension.py, ``load``."""
    load, load_inline = module.load, module.load_inline

    def load_files(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile the files of an extension."""
        files = [sources] if isinstance(sources, str) else sources
        for_cuda = kwargs.get("with_cuda") or any(str(file).endswith(".cu") for file in files)
        if trace.off() or not for_cuda:
            return load(name, sources, *args, **kwargs)
        return _Extension(trace, name)

    def load_text(
        name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Compile the sources that are given."""
        if trace.off() or not (kwargs.get("with_cuda") or cuda_sources):
            return load_inline(name, cpp_sources, cuda_sources, *args, **kwargs)
        return _Extension(trace, name)

    with replaced_all([(module, {"load": load_files, "load_inline": load_text})]):
        yield


class _Extension(ModuleType):
    """An extension whose kernels are not compiled: what nobody described says what to do."""

    def __init__(self, trace: TraceContext, name: str) -> None:
        super().__init__(name)
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        described = extension_function(self.__name__, name)
        if described is not None:
            return described

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise UnsupportedOperatorError(
                f"{self._trace.user_line()}: {self.__name__}.{name} is compiled for a GPU and "
                f"cannot run in a trace. {_DESCRIBE}"
            )

        return refuse
