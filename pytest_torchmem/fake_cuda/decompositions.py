"""Fake cuda takes the paths of its GPU: one module for each family of composite operators.

A kernel here replaces an operator that ATen decomposes differently on CUDA. It is a function of the
GPU and the operator's own arguments, registered by name; it calls the operators that CUDA would::

    @cuda_kernel("aten::dropout")
    def dropout(gpu: Gpu, composite: Composite, input: Tensor, p: float, train: bool) -> Tensor:
        ...

``composite()`` runs the operator as the CPU does, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from pytest_torchmem.fake_cuda.autocast import cuda_autocast
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.operators.cuda_meta import CUDA_META
from pytest_torchmem.operators.decompositions import LEAVES, Composite, registered_kernels
from pytest_torchmem.operators.families import load
from pytest_torchmem.operators.machine import Machine
from pytest_torchmem.operators.sorting.storages import CUDA_STORAGES
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.torch_private.dispatcher import composite_kernels
from pytest_torchmem.torch_private.operators import OpOverload, find_operator


@contextmanager
def cuda_dispatch(machine: Machine, guard: TraceContext) -> Iterator[None]:
    """Let composite operators on fake cuda tensors of this thread take the GPU's path."""
    assert machine.gpu is not None
    kernels = {
        name: _bind(function, operator, machine, guard) for name, operator, function in _kernels()
    }
    names = ((f"aten::{name}", kernel) for name, kernel in kernels.items())
    machine.kernels.update({name: kernel for name, kernel in names if name not in LEAVES})
    machine.leaves = frozenset(LEAVES)
    machine.meta_functions = CUDA_META
    machine.storages = CUDA_STORAGES
    with composite_kernels(kernels), cuda_autocast(guard):
        yield


@cache
def _kernels() -> tuple[tuple[str, OpOverload, Callable[..., Any]], ...]:
    """Return what the families have registered for operators that this torch has, by bare name."""
    load()
    found = []
    for name, function in registered_kernels().items():
        operator = find_operator(name.removeprefix("aten::"))
        if operator is not None:
            found.append((name.removeprefix("aten::"), operator, function))
    return tuple(found)


def _bind(
    function: Callable[..., Any], operator: Any, machine: Machine, guard: TraceContext
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = next(iter(argument_tensors((args, kwargs))), None)
        record = None if first is None else guard.record(first)
        composite = Composite(guard, operator, args, kwargs)
        if record is None or record.ledger.device.type != "cuda":
            return composite()
        return function(machine.gpu, composite, *args, **kwargs)

    return kernel
