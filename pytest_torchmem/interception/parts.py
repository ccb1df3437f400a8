"""The parts of a trace that those who run its operators share."""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.conversion import Conversion
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.interception.phases import EngineOrder, Phases, Streams
from pytest_torchmem.interception.placement import Placement
from pytest_torchmem.interception.values.known import KnownValues
from pytest_torchmem.interception.values.policy import Values
from pytest_torchmem.interception.wrapped_numbers import WrappedNumbers
from pytest_torchmem.targets.target import Target


class Parts:
    """State of a trace: its target, ledger, attribution, known values and placement."""

    def __init__(
        self, target: Target, ledger: Ledger, attribution: Attribution, values: Values
    ) -> None:
        self.target = target
        self.ledger = ledger
        self.attribution = attribution
        self.values = KnownValues(ledger, attribution, values)
        self.streams = tuple(Streams(ledger.on(device)) for device in target.devices)
        """Those of each GPU, by its index; on the CPU there is one."""
        self.order = EngineOrder()
        self.phases = Phases(ledger, attribution, self.streams)
        self.conversion = Conversion(target, ledger, self.values, attribution, self.phases)
        self.numbers = WrappedNumbers(ledger, self.values.contents)
        self.placement = Placement(target, ledger)


class RunMode(NamedTuple):
    """How operators are run at the moment; the default is as the program's own."""

    placed_on: torch.device | None = None
    """Where outputs go, instead of where the inputs are, while a copy between devices runs."""
    makes_graphs: bool = False
    """Whether graphs of the program are made, of tensors that stand for those of the trace."""
    compiles: bool = False
    """Whether that is the program's own compiler: tensors that stand for others say where these
    are, as the program's own do."""
    graph_on_host: bool = False
    """Whether the graph that it works on has tensors on the host alone."""
    aside: bool = False
    """Whether operators are run on known values, and nothing is booked."""


class Intercepts(Protocol):
    """How those who run operators let others come to the interceptor, or go elsewhere."""

    @property
    def mode(self) -> RunMode:
        """How operators are run at the moment."""

    def intercepting(self) -> AbstractContextManager[None]:
        """Let operators that are issued inside come to the interceptor."""

    def placing_on(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Make their outputs on ``device``."""
