"""Tests of several ranks whose fixtures go by the process: each rank has fixtures of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from pytest_torchmem.errors import add_note
from pytest_torchmem.plugin.failure import MemoryCheckFailed

if TYPE_CHECKING:
    from pytest_torchmem.plugin.checker import Checker
    from pytest_torchmem.plugin.standing import StandingGpus


class RankHooks:
    """Runs a test once as each of its processes, as launchers do, if its fixtures ask for that.

    Between two of them fixtures that go by the process are torn down and set up again.
    """

    def __init__(self, gpus: StandingGpus, checker: Callable[[pytest.Item], Checker]) -> None:
        self._gpus = gpus
        self._checker = checker
        self._running: pytest.Function | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        """Run a test as its first process, and then as the others."""
        if self._running is pyfuncitem:
            return (yield)
        first, *others = self._gpus.processes(pyfuncitem) or (None,)
        if first is None:
            return (yield)
        failed: list[MemoryCheckFailed] = []
        result, self._running = None, pyfuncitem
        try:
            with self._gpus.one_by_one(pyfuncitem):
                try:
                    result = yield
                except MemoryCheckFailed as error:
                    failed.append(error)
                except Exception as error:
                    add_note(error, f"(the test ran as {first})")
                    raise
                for world in others:
                    try:
                        with self._gpus.as_process(pyfuncitem, world):
                            pyfuncitem.ihook.pytest_pyfunc_call(pyfuncitem=pyfuncitem)
                    except MemoryCheckFailed as error:
                        failed.append(error)
                    except Exception as error:
                        add_note(error, f"(the test ran as {world})")
                        raise
        finally:
            self._running = None
        if failed:
            raise self._checker(pyfuncitem).one_failure(failed)
        return result
