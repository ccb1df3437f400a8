"""Tests that run in a trace, what a traced program returns, and figures of a real run."""

import functools
import io
from collections.abc import Callable
from typing import Any

import torch

from pytest_torchmem import MemoryProfile, measure, trace


def in_a_trace(device: str = "", **options: Any) -> Callable[..., Any]:
    """Let a test run in a trace, on the device that it is given unless one is named."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            trace(lambda: test(**given), device=device or given.get("device", "cpu"), **options)

        return run

    return decorate


def result_of(body: Callable[[], Any], **options: Any) -> Any:
    """Trace ``body`` and return what it returned, in the one pass that there has to be."""
    results: list[Any] = []
    trace(lambda: results.append(body()), **options)
    [result] = results
    return result


def on_fake_cuda(body: Callable[[], Any], **options: Any) -> Any:
    """Trace ``body`` on fake cuda and return what it returned."""
    return result_of(body, device="cuda", **options)


def cuda(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    """Return ones on the GPU."""
    return torch.ones(*shape, dtype=dtype, device="cuda", requires_grad=grad)


def as_measured(target: Any, *args: Any, **options: Any) -> MemoryProfile:
    """Return a trace, whose figures have to be those of the real allocator on this CPU."""
    traced = trace(target, *args, host="here", **options)
    assert traced.figures() == measure(target, *args, **options).figures()
    return traced


def through_a_file(value: Any, **options: Any) -> Any:
    """Save a value into memory, and return what is loaded of it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)
