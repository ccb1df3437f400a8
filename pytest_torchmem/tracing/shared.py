"""What a trace leaves with other programs: none of its tensors."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parameter import is_lazy

from pytest_torchmem.interception.layouts.sparse import storage_holder
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.step.program_state import SharedState
from pytest_torchmem.torch_private.overrides import DisableTorchFunctionSubclass
from pytest_torchmem.torch_private.storages import storage_address


def let_go_of_tensors(ledger: Ledger, shared: SharedState) -> None:
    """Take tensors that a trace has made out of global variables, classes and modules.

    The next program would find a table that has no memory in the place of none, and its trace would
    not count it.
    """
    made = ledger.made()
    if not made:
        return

    def is_made_here(tensor: Tensor) -> bool:
        if is_lazy(tensor):
            return False
        try:
            return storage_address(storage_holder(tensor)) in made
        except (RuntimeError, NotImplementedError):
            return False

    with DisableTorchFunctionSubclass():
        shared.let_go(is_made_here)
