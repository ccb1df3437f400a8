"""Phases, found from what runs: forward, backward, between, optimizer; and the stream it is on."""

from __future__ import annotations

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.interception.streams import Streams
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.torch_private.autograd import current_graph_task


class Phases:
    """Keeps the ledger's phase, and its stream, in step with the program.

    Backward is while the autograd engine runs, and optimizer while a ``step`` does. What comes
    after a backward outside of both is between, until a module is called again.
    """

    def __init__(self, ledger: Ledger, attribution: Attribution, streams: Streams) -> None:
        self._ledger = ledger
        self._streams = streams
        self._attribution = attribution
        self._calls_before = -1
        """Calls of outermost modules up to the last backward or optimizer step."""
        self._before_optimizer = Phase.FORWARD

    def find(self) -> Phase:
        """Enter the phase that an operator issued now belongs to, and return it."""
        if self._streams.several:
            self._streams.find()
        ledger, calls = self._ledger, self._attribution.outermost_calls
        if current_graph_task() != -1:
            ledger.enter(Phase.BACKWARD)
            self._calls_before = calls
            return Phase.BACKWARD
        if ledger.phase is Phase.BACKWARD:
            ledger.enter(Phase.BETWEEN)
        if ledger.phase is Phase.BETWEEN and calls != self._calls_before:
            ledger.enter(Phase.FORWARD)
        return ledger.phase

    def enter_optimizer(self) -> None:
        """Begin an optimizer's step."""
        self._before_optimizer = self._ledger.phase
        self._ledger.enter(Phase.OPTIMIZER)

    def leave_optimizer(self) -> None:
        """End an optimizer's step."""
        before = self._before_optimizer
        self._ledger.enter(Phase.FORWARD if before is Phase.FORWARD else Phase.BETWEEN)
        self._calls_before = self._attribution.outermost_calls
