"""Hollow tensors are made here, from plans, and booked; and Python numbers that C++ wraps.

For ``x * 0.5`` torch makes a tensor of 8 bytes of the number (``PythonArgs::tensor_slow`` in
torch/csrc/utils/python_arg_parser.cpp). It dies with the call, unless the node of the graph saves
it, as ``MulBackward0`` does: then it lives until the node is released. The interceptor is handed
the number and never the tensor; when the next operator arrives the node stands, and shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, dtype_name
from pytest_torchmem.interception.plan import Output, Plan, Same, Temporary
from pytest_torchmem.interception.values.contents import Contents
from pytest_torchmem.interception.values.policy import EMPTY, NO_MEMORIES, memory_for
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.operators.workspace import Buffer, type_of_number
from pytest_torchmem.profile.timeline import Allocation, Confidence, Kind, Origin, Phase
from pytest_torchmem.step.trees import replace_leaves
from pytest_torchmem.torch_private.keys import OpOverload
from pytest_torchmem.torch_private.tensors import (
    current_node,
    hollow_storage,
    in_engine_thread,
    is_view_of_another,
    keeps_graph,
    node_number,
    saved_by,
    storage_address,
    tensor_on,
    view_base,
)

_HOST = torch.device("cpu")
_tuple: Any = tuple.__new__
"""Makes a named tuple as its class does, without a call of Python for each storage."""
_ACTIVATION, _WORKSPACE = Kind.ACTIVATION, Kind.WORKSPACE
_EXACT = Confidence.EXACT
_KIND_OF_PHASE = {
    Phase.BASELINE: Kind.OTHER,
    Phase.FORWARD: Kind.ACTIVATION,
    Phase.BACKWARD: Kind.GRADIENT,
    Phase.BETWEEN: Kind.OTHER,
    Phase.OPTIMIZER: Kind.OPTIMIZER_STATE,
}


def make_outputs(
    ledger: Ledger,
    plan: Plan,
    tensors: list[Tensor],
    device: DeviceLedger,
    origin: Origin,
    memories: Mapping[int, Tensor] = NO_MEMORIES,
) -> Any:
    """Return what a plan says an operator returns, its new storages booked on ``device``.

    Those that a kernel makes on the host are booked there.
    ``tensors`` are the operator's tensor arguments in order, ``memories`` the real memory of new
    storages whose values are known, by slot.
    """
    outputs = plan.outputs
    if plan.makes_one:
        memory = memories.get(0) if memories else None
        return make_hollow(ledger, outputs, plan.slots[0], device, origin, _EXACT, memory)
    if type(outputs) is Same and outputs.grown is None and not plan.steps:
        return tensors[outputs.position]
    storages: dict[int, torch.UntypedStorage] = {}
    made: dict[int, Tensor] = {}

    def make(output: Output | Same) -> None:
        if isinstance(output, Same):
            tensor = tensors[output.position]
            if output.grown is not None:
                grow(ledger, tensor, output.grown, device, origin)
        else:
            slot, nbytes = output.slot, plan.slots[output.slot]
            if nbytes < 0:
                base = tensors[-1 - nbytes]
                tensor = output.on(base.untyped_storage(), int(base.storage_offset()))
            elif slot in storages:
                tensor = output.on(storages[slot])
            else:
                on = ledger.on(_HOST) if slot in plan.on_host else device
                sure, memory = plan.confidences.get(slot, _EXACT), memories.get(slot)
                tensor = make_hollow(ledger, output, nbytes, on, origin, sure, memory)
                storages[slot] = tensor.untyped_storage()
        made[id(output)] = tensor

    def tensor_of(output: Output | Same) -> Tensor:
        if id(output) not in made:
            make(output)
        return made[id(output)]

    if plan.steps:
        _follow(ledger, plan, device, origin, make)
    return replace_leaves(outputs, (Output, Same), tensor_of)


def _follow(
    ledger: Ledger,
    plan: Plan,
    device: DeviceLedger,
    origin: Origin,
    make: Callable[[Output | Same], None],
) -> None:
    """Write down a plan's requests in their order, and ``make`` its outputs."""
    temporaries: dict[int, int] = {}
    step: Any
    try:
        for step in plan.steps:
            kind = type(step)
            if kind is int:
                device.remove(temporaries.pop(-step))
            elif kind is Temporary:
                number, nbytes, shape, dtype, label, confidence = step
                entry = (nbytes, _WORKSPACE, origin, shape, dtype, label, confidence)
                temporaries[number] = device.add(_tuple(Allocation, entry))
            elif kind is Buffer:
                ledger.keep(step, in_engine_thread(), device, origin)
            else:
                make(step)
    finally:  # the device may have no memory for one of them
        for index in temporaries.values():
            device.remove(index)


def make_hollow(
    ledger: Ledger,
    output: Output,
    nbytes: int,
    device: DeviceLedger,
    origin: Origin,
    confidence: Confidence = _EXACT,
    memory: Tensor | None = None,
    taken: int | None = None,
) -> Tensor:
    """Return a new hollow tensor on a storage of ``nbytes`` bytes, which may show real ``memory``.

    Small integer and boolean ones always have some. ``taken``: the bytes of it that the allocator
    gave, if not all.
    """
    dtype, shape = output.dtype, output.shape
    phase, _, operator, _, recomputed = origin
    if memory is None and (not dtype.is_floating_point or operator == EMPTY):
        memory = memory_for(dtype, nbytes, operator)
    storage = hollow_storage(nbytes, memory)
    kind = _ACTIVATION if recomputed else _KIND_OF_PHASE[phase]
    if taken is None:
        taken = nbytes
    entry = _tuple(Allocation, (taken, kind, origin, shape, dtype_name(dtype), "", confidence))
    ledger.attach(storage, device.add(entry), device, True, memory)
    return tensor_on(storage, dtype, shape, output.stride, output.offset)


def grow(
    ledger: Ledger, tensor: Tensor, output: Output, device: DeviceLedger, origin: Origin
) -> None:
    """Give a tensor another geometry, and a larger storage where its own is too small."""
    last = sum(
        (size - 1) * stride for size, stride in zip(output.shape, output.stride, strict=True)
    )
    elements = 0 if 0 in output.shape else last + 1
    needed = (elements + int(tensor.storage_offset())) * tensor.element_size()
    storage = tensor.untyped_storage()
    if needed > storage.nbytes():
        record = ledger.records.get(storage_address(tensor))
        if record is not None and not record.hollow:  # a caller's, whose data are to stay
            ledger.outgrown.append((ref(tensor), tensor.detach().clone()))
        storage = make_hollow(ledger, output, needed, device, origin).untyped_storage()
    tensor.set_(storage, int(tensor.storage_offset()), output.shape, output.stride)


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
                # Its conjugate, or a graph of ``torch.jit.trace``, has it as an ordinary tensor.
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
