"""Real tensors that enter a trace, and hollow tensors that leave it."""

from __future__ import annotations

import gc
import weakref
from types import FrameType

import torch
from torch import Tensor

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.layouts.sparse import storage_holder, without_entries
from pytest_torchmem.interception.ledger import AllocationEntry, Ledger, StorageRecord
from pytest_torchmem.interception.materialize import make_hollow
from pytest_torchmem.interception.phases import Phases
from pytest_torchmem.interception.plan import Output
from pytest_torchmem.interception.values import known
from pytest_torchmem.interception.values.contents import Contents
from pytest_torchmem.operators.sparse.parts import COMPRESSED
from pytest_torchmem.profile.timeline import Kind, Origin, Phase
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.storages import hollow_storage, storage_address
from pytest_torchmem.torch_private.tensors import is_view_of_another, view_base

_CPU = torch.device("cpu")


class Conversion:
    """Books real tensors as they are met, and makes hollow tensors of those that a step is given.

    Its methods run while nothing is intercepted.
    """

    def __init__(
        self,
        target: Target,
        ledger: Ledger,
        contents: Contents,
        attribution: Attribution,
        phases: Phases,
    ) -> None:
        self._target = target
        self._contents = contents
        self._ledger = ledger
        self._attribution = attribution
        self._phases = phases
        self._borrowed: list[tuple[weakref.ref[Tensor], Tensor | None]] = []
        self.names: dict[int, tuple[Kind, str, str]] = {}
        """Kind, label and module of real tensors that are known, by their storages' addresses."""

    def borrow(self, tensor: Tensor) -> StorageRecord:
        """Book a real tensor that the program brought with it; nothing is ever written to it."""
        storage = tensor.untyped_storage()
        device = self._ledger.on(self._target.normalise(tensor.device))
        # Memory that is not the allocator's (numpy arrays, shared memory) cannot be resized.
        nbytes = storage.nbytes() if storage.resizable() else 0
        other = (Kind.PARAMETER if tensor.requires_grad else Kind.INPUT, "", "")
        kind, label, module = self.names.get(storage_address(tensor), other)
        origin, shape = Origin(Phase.BASELINE, module), tuple(tensor.shape)
        entry = AllocationEntry(nbytes, kind, origin, shape, tensor.dtype, label)
        record = self._ledger.book(storage, entry, device, earlier=True, hollow=False)
        if storage.data_ptr() != 0 and known.worth_knowing(tensor.dtype, tensor.numel()):
            self._contents.remember(record, tensor)
        # What a program takes of a weight first may be a view of it, such as its transpose.
        owner = view_base(tensor) if is_view_of_another(tensor) else tensor
        if owner is not None and owner.requires_grad and owner.is_leaf:
            # Weakly: what another thread of the program made dies in the course of the trace.
            self._borrowed.append((weakref.ref(owner), owner.grad))
        return record

    def meet(self, tensor: Tensor, device: torch.device, frame: FrameType) -> StorageRecord:
        """Book a real tensor that C++ made just now on ``device`` without an operator."""
        origin = self._attribution.origin(self._phases.find(), "", frame)
        storage = tensor.untyped_storage()
        nbytes, shape = storage.nbytes(), tuple(tensor.shape)
        entry = AllocationEntry(nbytes, Kind.OTHER, origin, shape, tensor.dtype)
        record = self._ledger.book(storage, entry, self._ledger.on(device), hollow=False)
        if known.worth_knowing(tensor.dtype, tensor.numel()):
            self._contents.remember(record, tensor)
        return record

    def return_borrowed(self) -> None:
        """Give real leaves that the program brought with it the gradients they came with."""
        for reference, gradient in self._borrowed:
            tensor = reference()
            if tensor is not None:
                tensor.grad = gradient
        self._borrowed.clear()

    def lift(self, tensor: Tensor, device: torch.device, frame: FrameType) -> Tensor:
        """Return a hollow tensor, on ``device``, for what C++ made of Python numbers."""
        if storage_address(tensor) in self._ledger.records or tensor.device.type == "meta":
            return tensor
        origin = self._attribution.origin(self._phases.find(), "aten::lift_fresh", frame)
        nbytes = tensor.untyped_storage().nbytes()
        output = Output(0, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)
        hollow = make_hollow(self._ledger, output, nbytes, self._ledger.on(device), origin)
        if known.worth_knowing(tensor.dtype, tensor.numel()):
            self._contents.remember(self._ledger.records[storage_address(hollow)], tensor)
        return hollow

    def enter_tensor(
        self,
        tensor: Tensor,
        device: torch.device,
        kind: Kind,
        label: str,
        module: str,
        whole: bool,
    ) -> Tensor:
        """Return a hollow tensor for a real one that is there before the step.

        ``module`` is the path of the module that it is a parameter or buffer of, "" for others.
        ``whole``: its storage is as large as the original's, for others to share;
        otherwise one of its own elements, as a copy to another device has.
        """
        if whole:
            nbytes, output = tensor.untyped_storage().nbytes(), Output.of(tensor)
        else:
            geometry = torch.empty_like(tensor, device="meta")
            nbytes, output = geometry.numel() * geometry.element_size(), Output.of(geometry)
        memory = known.memory_for(output.dtype, nbytes)
        storage = hollow_storage(nbytes, memory)
        origin = Origin(Phase.BASELINE, module)
        entry = AllocationEntry(nbytes, kind, origin, output.shape, output.dtype, label)
        record = self._ledger.book(storage, entry, self._ledger.on(device), memory=memory)
        hollow = output.on(storage)
        if (
            tensor.device.type == "cpu"
            and kind is not Kind.PARAMETER
            and tensor.untyped_storage().data_ptr() != 0
            and known.worth_knowing(tensor.dtype, tensor.numel())
        ):
            self._contents.remember(record, tensor if whole else known.laid_out_as(hollow, tensor))
        return hollow


def give_survivors_data(ledger: Ledger) -> None:
    """Let tensors that outlive their trace read as nan (0 for large integer ones) rather than as no
    memory.

    A test that fails inside of a trace leaves its variables in the traceback, whose values pytest
    prints: a kernel that reads a storage without memory ends the process. A real leaf that was
    first met as something else than itself loses the hollow gradient that it was given.
    """
    survivors = ledger.close()
    if not survivors:
        return
    with torch.inference_mode():
        for value in gc.get_objects():
            if not issubclass(type(value), Tensor):
                continue
            try:
                if storage_address(storage_holder(value)) not in survivors:
                    _without_hollow_gradient(value, survivors)
                    continue
            except (RuntimeError, NotImplementedError):
                continue
            with torch.inference_mode(value.is_inference()):
                value.data = _readable(value)


def _readable(tensor: Tensor) -> Tensor:
    """Return what stands for ``tensor`` after its trace."""
    if tensor.layout in COMPRESSED:
        return without_entries(tensor)
    number = float("nan") if tensor.dtype.is_floating_point or tensor.is_complex() else 0
    data = torch.full((), number, dtype=tensor.dtype)
    if tensor.is_nested:  # it keeps its sizes: to read a part of it raises that it is out of bounds
        return torch.nested.nested_tensor([data])
    return data.expand(tensor.shape)


def _without_hollow_gradient(leaf: Tensor, survivors: set[int]) -> None:
    gradient = leaf.grad if leaf.is_leaf else None
    if gradient is not None and storage_address(gradient) in survivors:
        leaf.grad = None
