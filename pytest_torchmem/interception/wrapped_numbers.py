"""Python numbers that C++ wraps in tensors, and how long the graph keeps them.

For ``x * 0.5`` torch makes a tensor of 8 bytes of the number (``PythonArgs::tensor_slow`` in
torch/csrc/utils/python_arg_parser.cpp). It dies with the call, unless the node of the graph saves
it, as ``MulBackward0`` does: then it lives until the node is released. The interceptor is handed
the number and never the tensor; when the next operator arrives the node stands, and shows it.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pytest_torchmem.interception.ledger import DeviceLedger, Ledger
from pytest_torchmem.interception.values.contents import Contents
from pytest_torchmem.operators.geometry import type_of_number
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin
from pytest_torchmem.torch_private.keys import OpOverload
from pytest_torchmem.torch_private.tensors import (
    current_node,
    is_view_of_another,
    keeps_graph,
    node_number,
    saved_by,
    storage_address,
    view_base,
)


class _Pending(NamedTuple):
    operator: OperatorSpec
    result: Tensor
    names: tuple[str, ...]
    """Names of the arguments that were numbers."""
    indices: tuple[int, ...]
    device: DeviceLedger


class _Hidden:
    """Numbers that a node inside of a ``CopySlices`` has saved.

    The outer node holds this object as a pre-hook, which tells when it runs and when it is gone.
    """

    def __init__(self, indices: tuple[int, ...], device: DeviceLedger) -> None:
        self.runs = False
        self._indices = indices
        self._device = device

    def __call__(self, *gradients: object) -> None:
        self.runs = self.runs or not keeps_graph()

    def release(self) -> None:
        """Strike the numbers off, once."""
        for index in self._indices:
            self._device.remove(index)
        self._indices = ()

    def __del__(self) -> None:
        self.release()


class WrappedNumbers:
    """Books the tensors that Python numbers are wrapped in, on the host."""

    def __init__(self, ledger: Ledger, contents: Contents) -> None:
        self._ledger = ledger
        self._contents = contents
        self.pending: list[_Pending] = []
        """Of operators whose nodes may not stand yet."""
        self.per_thread = {"pending": list}
        self._hidden: weakref.WeakKeyDictionary[_Hidden, int] = weakref.WeakKeyDictionary()
        """The sequence number of the ``CopySlices`` that each belongs to."""
        self.are_hidden = False
        """Whether there may be any of them. This and ``pending`` are asked for every operator."""

    def book(
        self, args: Sequence[Any], positions: tuple[int, ...], device: DeviceLedger, origin: Origin
    ) -> tuple[int, ...]:
        """Write down the numbers at ``positions`` as just made; return their indices."""
        return tuple(
            device.add(Allocation(type_of_number(args[position]).itemsize, Kind.OTHER, origin))
            for position in positions
        )

    def release(
        self,
        operator: OperatorSpec,
        positions: tuple[int, ...],
        indices: tuple[int, ...],
        device: DeviceLedger,
        recorded: Any,
    ) -> None:
        """Release the numbers of an operator that is done, unless its node has saved them.

        ``recorded`` is its result where autograd records it, else None. The result is held until
        the next operator, when its node stands; nothing is allocated before.
        """
        first = recorded[0] if type(recorded) in (tuple, list) and recorded else recorded
        if isinstance(first, Tensor):
            names = tuple(operator.argument_names[position] for position in positions)
            self.pending.append(_Pending(operator, first, names, indices, device))
            return
        for index in indices:
            device.remove(index)

    def settle(self) -> None:
        """Give the numbers of the last operators the lifetime that they have."""
        while self.pending:
            pending = self.pending.pop()
            if is_view_of_another(pending.result) and pending.operator.name.partition(".")[
                0
            ].endswith("_"):
                self._hide(pending)
            else:
                self._follow(pending)
        if self.are_hidden:
            self._settle_hidden()

    def _settle_hidden(self) -> None:
        self.are_hidden = bool(self._hidden)
        for hidden, number in tuple(self._hidden.items()):
            if not hidden.runs:
                continue
            node = current_node()
            if node_number(node) != number:  # it has run, and let go of its node
                hidden.release()
                del self._hidden[hidden]

    def _hide(self, pending: _Pending) -> None:
        base = view_base(pending.result)
        node = None if base is None else base.grad_fn
        hidden = _Hidden(pending.indices, pending.device)
        if pending.operator.record.saves_number and node is not None:
            node.register_prehook(hidden)
            self._hidden[hidden] = node_number(node)
            self.are_hidden = True

    def _follow(self, pending: _Pending) -> None:
        """Strike the numbers off when the node releases them; at once where it saved none."""
        node = pending.result.grad_fn
        for name, index in zip(pending.names, pending.indices, strict=True):
            saved = saved_by(node, name)
            if isinstance(saved, Tensor) and storage_address(saved) not in self._ledger.records:
                record = self._ledger.attach(saved.untyped_storage(), index, pending.device)
                if saved.is_complex():  # its conjugate is a tensor that is no wrapped number
                    self._contents.remember(record, saved)
            else:
                pending.device.remove(index)


def run_on_host(overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on real tensors, of which those that numbers are wrapped in come as numbers.

    Operators of arithmetic take them so (``should_allow_numbers_as_tensors`` in
    torch/csrc/utils/python_arg_parser.cpp). Constants of a program that ``torch.jit.trace`` wrote
    down are wrapped, too, and any operator is run on them.
    """
    try:
        return overload(*args, **kwargs)
    except RuntimeError:
        wrapped = spec_of(overload).with_numbers_as_tensors(args, "cpu")
        if wrapped is args:
            raise
    return overload(*wrapped, **kwargs)
