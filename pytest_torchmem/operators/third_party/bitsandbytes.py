"""bitsandbytes: its kernels as the Python functions that they are, launches aside.

Each of its operators has a function in Python for each device (``bitsandbytes/backends/*/ops.py``)
that makes tensors and hands their addresses to a library in C++. A trace runs the functions of the
installed version with a library that does nothing, so what they ask for is exact. They are read
from their files: where there is no GPU, bitsandbytes does not import those for CUDA.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from pytest_torchmem.operators.registry import operator
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private import devices, keys, patches

NAMESPACE = "bitsandbytes"
_ACROSS_DEVICES = "bitsandbytes::optimizer_update_"
"""Their states may be paged: in memory that the host and the GPU share."""


class NativeLibrary:
    """The library in C++, with functions of every name that do nothing, and return what stands for
    success.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def describe() -> None:
    """Make a record of each operator that the installed version has a function for on CUDA."""
    ours = {*_functions("default", None), *_functions("cuda", None)}
    for name in ours.intersection(keys.all_operators()):
        paged = name.startswith(_ACROSS_DEVICES)
        described = operator(name, source="bitsandbytes/backends", across_devices=paged)
        described.decomposition("cuda")(_body(name))
        described.values("cuda")(_values(name))


def _body(name: str) -> Callable[..., Any]:
    """Return what runs an operator's function for the GPU of a trace."""

    def run(machine: Gpu, arguments: dict[str, Any]) -> Any:
        """Run the library's function, bitsandbytes/backends/cuda/ops.py, whose launches do nothing.
        Its kernels are in csrc/kernels.cu.
        """
        function = _functions("cuda", machine).get(name) or _functions("default", machine)[name]
        result = function(**arguments)
        return None if name.endswith(".out") else result

    return run


def _values(name: str) -> Callable[..., Any]:
    """Return what computes an operator's values: the library's kernel for the CPU, or the one in
    torch's operators that it has for any device (bitsandbytes/backends/default/ops.py).
    """
    operator_name, _, overload = name.partition("::")[2].partition(".")

    def compute(arguments: dict[str, Any]) -> Any:
        """Run the operator on the CPU; what it writes to, it writes to there."""
        packet = getattr(getattr(torch.ops, NAMESPACE), operator_name)
        return getattr(packet, overload or "default")(**arguments)

    return compute


@cache
def _functions(backend: str, gpu: Gpu | None) -> dict[str, Callable[..., Any]]:
    """Return the functions of a backend by the names of their operators. Those for CUDA remember
    what they chose by the index of the GPU, so every GPU has its own.
    """
    found: dict[str, Callable[..., Any]] = {}
    path = _file(backend)
    if path is None:
        return found

    def register_kernel(name: str, _: str) -> Callable[..., Any]:
        def keep(function: Callable[..., Any]) -> Callable[..., Any]:
            return found.setdefault(name, function)

        return keep

    try:
        module = ModuleType(f"{NAMESPACE}.backends.{backend}.ops")
        module.__package__ = f"{NAMESPACE}.backends.{backend}"
        module.__file__ = str(path)
        operators, extension = (
            sys.modules[f"{NAMESPACE}.{name}"] for name in ("_ops", "cextension")
        )
        replacements: patches.Replacements = [
            (operators, {"register_kernel": register_kernel}),
            (extension, {"lib": NativeLibrary()}),
        ]
        with patches.replaced_all(replacements), devices.raw_stream_known(lambda: False):
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
        vars(module).update(_IN_PLACE_OF_CUDA)
    except Exception:
        # Of another version, whose files are others: outputs are known, what is taken is not.
        return {}
    return found


_IN_PLACE_OF_CUDA: dict[str, Any] = {
    "CUBLAS_Context": SimpleNamespace(
        get_instance=lambda: SimpleNamespace(get_context=lambda device: None)
    ),
    "_cuda_device_of": lambda tensor: nullcontext(),
    "_get_raw_stream": lambda index: 0,
    "_get_tensor_stream": lambda tensor: None,
    "get_ptr": lambda tensor: None,
}
"""What the functions for CUDA take from elsewhere, and what would make a context there."""


def _file(backend: str) -> Path | None:
    spec = find_spec(f"{NAMESPACE}.backends.{backend}")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "ops.py"
    return path if path.exists() else None
