"""Libraries that launch kernels themselves, followed from when the program has imported them.

Also kernels in CUDA C++ that a program compiles itself, and addresses on the GPU for other
packages. Neither is a torch operator (pybind11 hands an extension's functions to Python): what such
a kernel allocates and returns is known to its author alone, or to a function of torch's operators
that allocates and computes the same. There is one for peft's, which BOFT compiles to make
block-diagonal matrices. Of bitsandbytes it is what is beside its operators: its library in C++, and
memory that it pages itself.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from functools import partial, reduce
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from pytest_torchmem.errors import UnsupportedOperatorError
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.third_party.bitsandbytes import NativeLibrary
from pytest_torchmem.operators.workspace import on_meta
from pytest_torchmem.step.imports import is_imported, told_of_imports
from pytest_torchmem.torch_private.flex_attention import MASKS, captured_tensors_lifted
from pytest_torchmem.torch_private.patches import Replacements, call_jitted, replaced_all

Function = Callable[..., Any]


def _block_diagonal(input: Tensor) -> list[Tensor]:
    """Return matrices of blocks; peft/tuners/boft/fbd/fbd_cuda_kernel.cu."""
    several, blocks, rows, columns = input.shape
    output = input.new_zeros(several, blocks * rows, blocks * columns)
    _blocks_of(output, input.shape).copy_(input)
    return [output]


def _block_diagonal_backward(grad_output: Tensor, input: Tensor) -> list[Tensor]:
    """Return the blocks of a gradient; peft/tuners/boft/fbd/fbd_cuda_kernel.cu."""
    grad_input = torch.zeros_like(input)
    grad_input.copy_(_blocks_of(grad_output, input.shape))
    return [grad_input]


def _blocks_of(matrices: Tensor, shape: torch.Size) -> Tensor:
    several, blocks, rows, columns = shape
    cut = matrices.view(several, blocks, rows, blocks, columns)
    return cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


_EXTENSIONS: Mapping[str, Mapping[str, Function]] = {
    "fbd_cuda": {"forward": _block_diagonal, "backward": _block_diagonal_backward}
}
"""By the name of the extension, the first argument of ``torch.utils.cpp_extension.load``, and the
names that it gives its functions."""

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
        many = len(tensors) > 1
        geometry = reduce(torch.add, map(on_meta, tensors)) if many else on_meta(tensors[0]).clone()
    outputs = tuple(
        torch.empty_strided(
            geometry.shape, geometry.stride(), dtype=geometry.dtype, device=tensors[0].device
        )
        for _ in range(function.num_outputs)
    )
    return outputs[0] if len(outputs) == 1 else outputs


def compiled_extensions(trace: TraceContext, module: Any) -> AbstractContextManager[None]:
    """Let sources for CUDA not be compiled; torch/utils/cpp_extension.py, ``load``."""
    load, load_inline = module.load, module.load_inline

    def load_files(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        for_cuda = kwargs.get("with_cuda") or any(str(file).endswith(".cu") for file in files)
        if trace.off() or not for_cuda:
            return load(name, sources, *args, **kwargs)
        return _Extension(trace, name)

    def load_text(
        name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if trace.off() or not (kwargs.get("with_cuda") or cuda_sources):
            return load_inline(name, cpp_sources, cuda_sources, *args, **kwargs)
        return _Extension(trace, name)

    return replaced_all([(module, {"load": load_files, "load_inline": load_text})])


def bitsandbytes_library(trace: TraceContext, module: Any) -> AbstractContextManager[None]:
    """Let what bitsandbytes launches from Python take nothing; bitsandbytes/functional.py. What it
    keeps for the process, maps of quantization among it, is not the trace's.
    """
    functional = sys.modules[f"{module.__name__}.functional"]
    get_paged: Any = functional.get_paged

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
        """Make a tensor in memory that host and GPU share: the allocator for the GPU has none."""
        if trace.off():
            given = {} if device is None else {"device": device}
            return get_paged(*shape, dtype=dtype, **given)
        tensor: Any = torch.empty(*shape, dtype=dtype, device="cpu")
        tensor.is_paged, tensor.page_deviceid = True, 0
        return tensor

    library = _Library(trace, functional.lib)
    optimizers = sys.modules[f"{module.__name__}.optim.optimizer"].GlobalOptimManager
    replacements: Replacements = [
        (functional, {"lib": library, "get_paged": paged, "name2qmap": {}}),
        (functional.GlobalPageManager, {"_instance": None}),
        (optimizers, {"_instance": _copy_of(optimizers._instance)}),
    ]
    return replaced_all(replacements)


def _copy_of(manager: Any) -> Any:
    """Return a manager that knows of the parameters of the trace too, and is left behind there."""
    if manager is None:
        return None
    copied = copy(manager)
    tables = {name: one for name, one in vars(manager).items() if isinstance(one, (dict, list))}
    vars(copied).update({name: one.copy() for name, one in tables.items()})
    return copied


class _Library(NativeLibrary):
    """The library of the process, which does nothing on the trace's thread."""

    def __init__(self, trace: TraceContext, original: Any) -> None:
        self._trace = trace
        self._original = original

    def __getattr__(self, name: str) -> Any:
        on_thread = self._trace.on_thread()
        return super().__getattr__(name) if on_thread else getattr(self._original, name)


class _Extension(ModuleType):
    """An extension whose kernels are not compiled: what nobody described says what to do."""

    def __init__(self, trace: TraceContext, name: str) -> None:
        super().__init__(name)
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        described = _EXTENSIONS.get(self.__name__, {}).get(name)
        if described is not None:
            return described

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise UnsupportedOperatorError(
                f"{self._trace.user_line()}: {self.__name__}.{name} is compiled for a GPU and "
                f"cannot run in a trace. {_DESCRIBE}"
            )

        return refuse


Follow = Callable[[TraceContext, Any], AbstractContextManager[None]]
Libraries = Mapping[str, Follow]
"""What is entered for a module, by its name, as soon as it is imported."""


def _by(module: str, function: str, *given: str) -> Follow:
    """Return a function of a module of this folder, which is imported when it is called."""

    def follow(trace: TraceContext, library: Any) -> AbstractContextManager[None]:
        found: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
        entered: AbstractContextManager[None] = found(trace, library, *given)
        return entered

    return follow


ON_GPU: Libraries = {
    "bitsandbytes": bitsandbytes_library,
    MASKS: _by("flex_attention", "flex_attention"),
    "torch.utils.cpp_extension": compiled_extensions,
    "triton.runtime.jit": _by("triton", "triton_launches", "JITFunction"),
    "triton.runtime.interpreter": _by("triton", "triton_launches", "InterpretedFunction"),
    "triton.runtime.autotuner": _by("triton", "triton_autotuned"),
    "triton.runtime.driver": _by("triton", "triton_driver"),
}
ON_CPU: Libraries = {
    MASKS: lambda trace, module: captured_tensors_lifted(),  # it runs as it is
    "triton.runtime.jit": _by("triton", "triton_refused"),
}


@contextmanager
def libraries_followed(trace: TraceContext, libraries: Libraries) -> Iterator[None]:
    """Follow the libraries that are imported, and those that the program imports in the trace.
    Nothing is imported here: a library that the program does not use costs nothing.
    """
    with ExitStack() as entered:
        waiting, following = dict(libraries), False

        def follow(_: str = "") -> None:
            nonlocal following
            if following:  # what is called below imports others
                return
            following = True
            try:
                while names := [name for name in waiting if is_imported(name)]:
                    for name in names:
                        entered.enter_context(waiting.pop(name)(trace, sys.modules[name]))
            finally:
                following = False

        follow()
        with told_of_imports(follow):
            yield
