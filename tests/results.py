"""What a traced program returns."""

from collections.abc import Callable
from typing import Any

from pytest_torchmem import trace


def result_of(body: Callable[[], Any], **options: Any) -> Any:
    """Trace ``body`` and return what it returned, in the one pass that there has to be."""
    results: list[Any] = []
    trace(lambda: results.append(body()), **options)
    [result] = results
    return result


def on_fake_cuda(body: Callable[[], Any], **options: Any) -> Any:
    """Trace ``body`` on fake cuda and return what it returned."""
    return result_of(body, device="cuda", **options)
