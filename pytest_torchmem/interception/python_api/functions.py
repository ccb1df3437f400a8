"""The replaced functions of all kinds, entered and left together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.lasting import LASTING, Layer
from pytest_torchmem.interception.python_api.addresses import Addresses
from pytest_torchmem.interception.python_api.checkpoints import sparse_files
from pytest_torchmem.interception.python_api.copies import Copies, Pickling, Swaps
from pytest_torchmem.interception.python_api.fake_tensors import FakeTensors
from pytest_torchmem.interception.python_api.modules import modules_given_back
from pytest_torchmem.interception.python_api.safetensors_files import safetensors_files
from pytest_torchmem.interception.python_api.storages import RealStorages
from pytest_torchmem.interception.python_api.threads import Threads
from pytest_torchmem.interception.python_api.value_methods import ValueMethods
from pytest_torchmem.torch_private.dispatch.kernels import below_interception
from pytest_torchmem.torch_private.dispatch.operators import HigherOrderOperator
from pytest_torchmem.torch_private.patching.patches import Replacements, original_of
from pytest_torchmem.torch_private.patching.replaceable import find_builtin


@contextmanager
def python_functions(trace: TraceContext, *, gives_back: bool = True) -> Iterator[None]:
    """Let tensors without memory be copied, pickled, printed and read on the trace's threads.

    ``gives_back``: real modules have their own tensors again afterwards.
    """
    with ExitStack() as stack:
        addresses = stack.enter_context(LASTING.layer("functions of Python", _functions))
        stack.enter_context(safetensors_files(trace, addresses))
        if gives_back:
            stack.enter_context(modules_given_back(trace))
        yield


def _functions(trace: TraceContext) -> Layer[Addresses]:
    pickling, addresses, fake_tensors = Pickling(trace), Addresses(trace), FakeTensors(trace)
    others = (ValueMethods, Copies, RealStorages, Threads, Swaps)
    owners = (*(other(trace) for other in others), fake_tensors, pickling, addresses)
    replacements = [entry for owner in owners for entry in owner.replacements()]
    replacements += sparse_files(trace, pickling)
    dispatch = below_interception(HigherOrderOperator.dispatch)
    replacements += _found_by_scripts()
    replacements.append((HigherOrderOperator, {"dispatch": dispatch}))
    begin = (pickling.begin, addresses.begin, fake_tensors.begin)
    return Layer(replacements, addresses, begin)


def _found_by_scripts() -> Replacements:
    """Let TorchScript, which knows functions by their identity, know those that were replaced."""
    find = find_builtin[0].original
    find(len)  # makes its table, for the life of the process, of torch's own functions

    def find_replaced(function: Any) -> Any:
        return find(original_of(function))

    return [looked_up.by(find_replaced) for looked_up in find_builtin]
