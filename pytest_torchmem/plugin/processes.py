"""Checks that a process calls which a test has forked: nothing of them comes to the report."""

import mmap
import os

from pytest_torchmem.errors import UsageError

NOT_HERE = (
    "not checked: torchmem.check was called in a process that the test forked, whose results are "
    "lost. Call it in the process of the test, with what the other one would run"
)


class OtherProcesses:
    """Tells a test of the checks that were called in processes forked from its own.

    They share a byte of memory with it, and nothing else that both could count on.
    """

    def __init__(self) -> None:
        self._byte = mmap.mmap(-1, 1)

    def refuse(self, process: int) -> None:
        """Raise ``UsageError``, and let the other process know, unless ``process`` is this one."""
        if os.getpid() != process:
            self._byte[0] = 1
            raise UsageError(NOT_HERE)

    def called(self) -> bool:
        """Tell whether any did since this was last asked."""
        told = bool(self._byte[0])
        self._byte[0] = 0
        return told
