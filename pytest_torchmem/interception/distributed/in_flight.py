"""Asynchronous collectives, and the tensors that they hold until they are waited for."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from pytest_torchmem.torch_private.tensors.storages import storage_address


class _Work(NamedTuple):
    """What is held as long as one of the outputs was not waited for."""

    outputs: list[Tensor]
    given: list[Tensor]
    stashes: bool
    """Whether what it was given is let go by the first that is waited for."""


class InFlight:
    """What was begun and not waited for, by the storages of the outputs.

    As ``WorkRegistry`` in torch/csrc/distributed/c10d/ProcessGroup.cpp: what nobody waits for
    stays. The work of NCCL holds what it was given until it is waited for, that of gloo as long as
    it is in the registry (``with_work``).
    """

    def __init__(self) -> None:
        self._works: dict[int, list[_Work]] = {}

    def begin(self, outputs: Iterable[Tensor], given: Sequence[Tensor], *, stashes: bool) -> None:
        """Take note of a collective that makes ``outputs``, or writes to them."""
        work = _Work(list(outputs), list(given), stashes)
        for output in work.outputs:
            self._works.setdefault(storage_address(output), []).append(work)

    def wait(self, tensor: Tensor) -> None:
        """Let go of what the collectives hold that make ``tensor``."""
        for work in self._works.pop(storage_address(tensor), ()):
            if work.stashes:
                work.given.clear()
