"""What a trace leaves with other programs: none of its tensors."""

from __future__ import annotations

from torch.nn.parameter import is_lazy

from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.interception.survivors import address_of
from pytest_torchmem.journal.contents import SharedState
from pytest_torchmem.torch_private.dispatch.overrides import DisableTorchFunctionSubclass


def let_go_of_tensors(ledger: Ledger, shared: SharedState) -> None:
    """Take tensors that a trace has made out of global variables, classes and modules.

    The next program would find a table that has no memory in the place of none, and its trace would
    not count it.
    """
    made = ledger.made()
    if not made:
        return
    with DisableTorchFunctionSubclass():
        shared.let_go(lambda tensor: not is_lazy(tensor) and address_of(tensor) in made)
