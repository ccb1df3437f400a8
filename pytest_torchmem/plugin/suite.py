"""``--torchmem-fake-cuda``: a whole suite as if a GPU were there, whatever its tests are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_torchmem.checks.defaults import VALUES_MODES
from pytest_torchmem.checks.settings import parse_values
from pytest_torchmem.errors import UsageError

if TYPE_CHECKING:
    from pytest_torchmem.tracing.standing import StandingGpu

_GPU: pytest.StashKey[StandingGpu] = pytest.StashKey()


def gpu_of(config: pytest.Config, name: str) -> StandingGpu:
    """Return the GPU that the suite sees, made when first asked for; it is gone after the run.

    Raises ``UsageError`` for one that is not known, or not yet: a ``conftest.py`` may add it.
    """
    if _GPU not in config.stash:
        from pytest_torchmem.targets.gpus import find_gpu

        found = find_gpu(name).name
        try:
            from pytest_torchmem.tracing.standing import StandingGpu
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise UsageError(
                "--torchmem-fake-cuda: torch is not installed in this environment"
            ) from None
        given = config.known_args_namespace
        written = getattr(given, "torchmem_allocator", None)
        allocator = written or config.getini("torchmem_allocator") or ""
        values = getattr(given, "torchmem_values", None) or config.getini("torchmem_values")
        gpu = config.stash[_GPU] = StandingGpu(
            found,
            allocator=str(allocator),
            limited=True,
            values=parse_values(values or VALUES_MODES[0], "torchmem_values"),
            of_suite=True,
        )
        config.add_cleanup(gpu.close)
    return config.stash[_GPU]


class SuiteHooks:
    """Where a suite sees the GPU: while modules are collected, and in every test."""

    def __init__(self, gpu: StandingGpu) -> None:
        self._gpu = gpu

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        """Import tests, and select them, with the GPU."""
        with self._gpu.on():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """Switch on once for all phases of a test, reports of them included."""
        with self._gpu.on():
            return (yield)
