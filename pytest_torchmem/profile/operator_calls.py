"""The calls of operators in a trace: where among the events, what they read, what they cost."""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple, Protocol

from pytest_torchmem.profile.timeline import Origin

GRAPH_NODE: ContextVar[str] = ContextVar("graph node", default="")
"""The node of a graph whose operators run, where a graph is run node by node."""


class Work(Protocol):
    """What one call of an operator has a device do."""

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition as two."""

    @property
    def read(self) -> int:
        """Bytes of the arguments that the kernel reads, each once."""

    @property
    def written(self) -> int:
        """Bytes of what the kernel returns or writes to, each once."""


class KnownWork(NamedTuple):
    """Work whose figures are at hand."""

    flops: int = 0
    read: int = 0
    written: int = 0


class OperatorCall(NamedTuple):
    """One call of an operator, with what its body called."""

    start: int
    """How many events there were when it began."""
    stop: int
    """And when it returned."""
    origin: Origin
    node: int
    """Of a call that autograd recorded: one more than the sequence number of its node. Of a call
    that the autograd engine's node made: minus one more than that node's sequence number. 0 for
    any other."""
    node_name: str
    """The name of the autograd node that made the call, where no recorded call has its number."""
    reads: tuple[int, ...]
    """Its arguments' allocations, as events number them (index + 1), in order."""
    work: Work
    label: str = ""
    """The node of a graph that the call belongs to, where one is run node by node."""
