"""The replaced functions of all kinds, entered and left together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.python_api.addresses import Addresses
from pytest_torchmem.interception.python_api.copies import Copies, Pickling
from pytest_torchmem.interception.python_api.modules import modules_given_back
from pytest_torchmem.interception.python_api.storages import RealStorages
from pytest_torchmem.interception.python_api.values import Values
from pytest_torchmem.torch_private.kernels import below_interception
from pytest_torchmem.torch_private.operators import HigherOrderOperator
from pytest_torchmem.torch_private.patches import replaced_all


@contextmanager
def python_functions(trace: TraceContext) -> Iterator[None]:
    """Let tensors without memory be copied, pickled, printed and read on the trace's thread."""
    owners = (Values, Copies, Pickling, RealStorages, Addresses)
    replacements = [entry for owner in owners for entry in owner(trace).replacements()]
    dispatch = below_interception(HigherOrderOperator.dispatch)
    replacements.append((HigherOrderOperator, {"dispatch": dispatch}))
    with replaced_all(replacements), modules_given_back(trace):
        yield
