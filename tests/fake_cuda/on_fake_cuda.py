"""What tests of fake cuda share."""

from collections.abc import Callable
from typing import Any

from pytest_torchmem import trace


def on_fake_cuda(body: Callable[[], Any], **options: Any) -> Any:
    """Trace ``body`` on fake cuda and return what it returned."""
    results = []

    def program() -> None:
        results.append(body())

    trace(program, device="cuda", **options)
    return results[0]
