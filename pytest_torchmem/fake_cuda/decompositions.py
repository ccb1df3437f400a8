"""Composite operators on fake cuda take the paths of its GPU, which their records have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from pytest_torchmem.fake_cuda.autocast import cuda_autocast
from pytest_torchmem.interception.attribution import code_made_by
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.refusals import REFUSALS, in_words_of_kernel
from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.families import load
from pytest_torchmem.operators.overlay import generation, taught_paths
from pytest_torchmem.operators.registry import records
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.dispatch.dispatcher import composite_kernels
from pytest_torchmem.torch_private.dispatch.operators import OpOverload, find_operator


@contextmanager
def cuda_dispatch(gpu: Gpu, trace: TraceContext) -> Iterator[Mapping[str, Callable[..., Any]]]:
    """Let composite operators on fake cuda tensors of this thread take the GPU's path.

    Yields, by name, what runs those of them that arrive undecomposed.
    """
    specs = _with_paths(generation())
    paths = _Paths(specs, gpu, trace)

    def run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        path = paths.get(name)  # none of an operator that an earlier trace was taught one of
        tensors = argument_tensors((args, kwargs))
        # For nested tensors composite operators have other bodies.
        if path is None or not tensors or any(tensor.is_nested for tensor in tensors):
            return NotImplemented
        return path(*args, **kwargs)

    with composite_kernels(specs, run), cuda_autocast(trace):
        yield _Paths(_undecomposed(generation()), gpu, trace)


class _Paths(Mapping[str, Callable[..., Any]]):
    """What runs operators, by name; made when it is first asked for."""

    def __init__(self, specs: Mapping[str, OperatorSpec], gpu: Gpu, trace: TraceContext) -> None:
        self._specs, self._gpu, self._trace = specs, gpu, trace
        self._made: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        path = self._made.get(name)
        if path is None:
            path = self._made[name] = _path(self._specs[name], self._gpu, self._trace)
        return path

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


@lru_cache(maxsize=1)
def _with_paths(generation: int) -> dict[str, OperatorSpec]:
    """Return the operators that have a path on cuda, by name, in a generation of what users teach.

    Of overloads of one name, the last counts.
    """
    specs = (spec_of(overload) for overload in {*taught_paths("cuda"), *_recorded_paths()})
    return {spec.name: spec for spec in specs}


@lru_cache(maxsize=1)
def _undecomposed(generation: int) -> dict[str, OperatorSpec]:
    """Return those of them that arrive undecomposed."""
    specs = _with_paths(generation)
    return {name: spec for name, spec in specs.items() if not spec.one_kernel_on("cuda")}


@cache
def _recorded_paths() -> tuple[OpOverload, ...]:
    """Return the operators of this torch whose records have a path on cuda."""
    load()
    names = [name for name, record in records().items() if "cuda" in record.path]
    found = (find_operator(name.removeprefix("aten::")) for name in names)
    return tuple(overload for overload in found if overload is not None)


def _path(spec: OperatorSpec, gpu: Gpu, trace: TraceContext) -> Callable[..., Any]:
    path = spec.cuda.path
    assert path is not None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = next(iter(argument_tensors((args, kwargs))), None)
        call = CompositeCall(args, kwargs, spec.overload, trace)
        if first is None:
            return call()
        trace.begin_beside(first)
        if not trace.is_on_gpu(first):
            return call()
        try:
            return path(args, kwargs, machine=gpu, call=call)
        except REFUSALS as error:
            with trace.working():
                found = in_words_of_kernel(spec, args, kwargs, error, on_gpu=True)
            try:
                if found is error:
                    raise
                raise found from None
            finally:
                del found  # a frame that holds what it raised is a cycle, and holds the tensors

    return kernel


PATH = code_made_by(_path, "kernel")
"""The code by which each composite operator takes its path."""
