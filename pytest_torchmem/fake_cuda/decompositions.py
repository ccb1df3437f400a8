"""Composite operators on fake cuda take the paths of its GPU, which their records have."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from pytest_torchmem.fake_cuda.autocast import cuda_autocast
from pytest_torchmem.interception.attribution import code_made_by
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.refusals import REFUSALS, in_words_of_kernel
from pytest_torchmem.operators.calls import CompositeCall
from pytest_torchmem.operators.families import read_index
from pytest_torchmem.operators.overlay import generation, taught_paths
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.gpus import Gpu
from pytest_torchmem.torch_private.dispatcher import composite_kernels, overload_of
from pytest_torchmem.torch_private.keys import is_composite_implicit, is_dispatched


@contextmanager
def cuda_dispatch(gpu: Gpu, trace: TraceContext) -> Iterator[Mapping[str, Callable[..., Any]]]:
    """Let composite operators on fake cuda tensors of this thread take the GPU's path.

    Yields, by name, what runs those of them that arrive undecomposed.
    """
    names = _with_paths(generation())
    paths = _Paths(names, gpu, trace)

    def run(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path = paths.get(name)  # none of an operator that an earlier trace was taught one of
        tensors = argument_tensors((args, kwargs))
        # For nested tensors composite operators have other bodies.
        if path is None or not tensors or any(tensor.is_nested for tensor in tensors):
            return NotImplemented
        return path(*args, **kwargs)

    with composite_kernels(names, run), cuda_autocast(trace):
        yield _Undecomposed(names, gpu, trace)


class _Paths(Mapping[str, Callable[..., Any]]):
    """Paths of composite operators by name, made at first use."""

    def __init__(self, names: frozenset[str], gpu: Gpu, trace: TraceContext) -> None:
        self._names, self._gpu, self._trace = names, gpu, trace
        self._made: dict[str, Callable[..., Any]] = {}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        path = self._made.get(name)
        if path is None:
            if name not in self:
                raise KeyError(name)
            spec = spec_of(overload_of(name))
            path = self._made[name] = _path(spec, self._gpu, self._trace)
        return path

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Undecomposed(_Paths):
    """Those of them that arrive undecomposed."""

    def __contains__(self, name: object) -> bool:
        return name in self._names and not spec_of(overload_of(str(name))).one_kernel_on("cuda")


@lru_cache(maxsize=1)
def _with_paths(generation: int) -> frozenset[str]:
    """Return the operators that have a path on cuda, in a generation of what users teach."""
    recorded = (f"aten::{name}" for name in read_index()["paths"]["cuda"].split())
    taught = (overload.name() for overload in taught_paths("cuda"))
    return frozenset((*filter(is_dispatched, recorded), *taught))  # those that this torch has


def _path(spec: OperatorSpec, gpu: Gpu, trace: TraceContext) -> Callable[..., Any]:
    path = spec.cuda.path
    assert path is not None
    composite = is_composite_implicit(spec.overload)

    def elsewhere(call: CompositeCall) -> Any:
        return call() if composite else NotImplemented

    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = next(iter(argument_tensors((args, kwargs))), None)
        call = CompositeCall(args, kwargs, spec.overload, trace)
        if first is None:
            return elsewhere(call)
        trace.begin_beside(first)
        if not trace.is_on_gpu(first):
            return elsewhere(call)
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
