"""Where an operator's outputs are made, and which devices go together.

Copies between host and GPU go through temporaries on either side (native/cuda/Copy.cu): bytes
travel between contiguous tensors of one type (``cudaMemcpyAsync``). Where the two ends of a copy
are not that (``copy_requires_temporaries``), ``copy_kernel_cuda`` makes contiguous ones beside
them: the type is converted on the host, or for a ``non_blocking`` copy on the GPU. Between GPUs,
which can reach each other's memory, a kernel copies.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.interception.plan import Call
from pytest_torchmem.operators.workspace import is_dense
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.trees import argument_tensors
from pytest_torchmem.targets.target import Target, not_linked
from pytest_torchmem.torch_private.patches import having
from pytest_torchmem.torch_private.tensors import storage_address

_CPU = torch.device("cpu")
_ledger = attrgetter("ledger")
#: How torch begins (``compute_types`` in ATen/TensorIterator.cpp).
ON_TWO_DEVICES = "Expected all tensors to be on the same device"


#: Generators of fake cuda by the addresses of those in C++, which are the CPU's.
GPU_GENERATORS: WeakValueDictionary[int, Any] = WeakValueDictionary()


class Placement:
    """Finds the device of outputs from those of the inputs, for the operators of one trace."""

    def __init__(self, target: Target, ledger: Ledger) -> None:
        self._target = target
        self._ledger = ledger
        self._last: DeviceLedger | None = None
        self.nested: DeviceLedger | None = None
        """Where values of a nested tensor are while its kernel runs; its sizes are the host's."""
        self._in_cpp = False
        """Whether the body that is running is C++'s."""
        self.per_thread: dict[str, Callable[[], Any]] = {
            "_last": lambda: None,
            "nested": lambda: None,
            "_in_cpp": bool,
        }
        self.guessed: dict[int, int] = {}
        """Storages that C++ asked for without saying beside which tensor: a device guessed."""

    def device_of(self, call: Call, target: torch.device | None) -> DeviceLedger | None:
        """Return where a call's outputs are made; None for ``meta``.

        ``target`` is where a copy between devices goes while it runs. Raises what torch raises for
        tensors of devices that do not go together.
        """
        if target is None and call.records and not (call.kwargs or call.operator.takes_device):
            device = call.records[0].ledger
            if len(self._ledger.devices) > 1 or call.operator.record.across_devices:
                device = self._shared(call, device)
            self._last = device
            return device
        asked = call.operator.device_of(call.args, call.kwargs)
        if asked is not None and asked.type == "meta":
            return None
        if target is not None:
            if self._in_cpp and asked is None and self._is_beside_host(call):
                return self._ledger.on(_CPU)
            return self._ledger.on(target)
        if asked is not None and asked.type != "cpu":
            named = self._target.normalise(asked)
            if named not in self._target.devices:
                raise not_linked(named)
            return self._ledger.on(named)
        # What C++ asks to be made on the CPU stands beside a tensor that C++ takes to be there; a
        # program that asks for the CPU comes with ``target`` set (fake_cuda/api). Where C++
        # names no device (lengths, batch sizes) it is the host.
        if not call.records:
            if asked is None:
                return self._ledger.on(_CPU)
            return self.beside_no_tensor(call.kwargs)
        device = call.records[0].ledger
        if len(self._ledger.devices) > 1 or call.operator.record.across_devices:
            device = self._shared(call, device)
        self._last = device
        return device

    def within_body(self, in_cpp: bool) -> AbstractContextManager[None]:
        """Let an operator's body be run: ``in_cpp``, what it makes without naming a device, and of
        that alone, is on the host (the index that ``repeat`` makes with ``at::arange``).
        """
        return having(self, _in_cpp=in_cpp)

    def _is_beside_host(self, call: Call) -> bool:
        """Return whether all of a call's tensors are on the host, or it has none and makes one.

        What is made like a tensor goes where the body's own call is sent (``randn_like(device=)``).
        """
        if call.operator.takes_device:
            return not call.records
        return bool(call.records) and all(record.ledger.device == _CPU for record in call.records)

    def beside_no_tensor(self, kwargs: dict[str, Any]) -> DeviceLedger:
        """Return where that is made which C++ asks the CPU for, in a call without tensors."""
        generator = kwargs.get("generator")
        if generator is not None and _device_type(generator) == "cpu":
            return self._ledger.on(_CPU)  # torch.utils.data.random_split
        dtype = kwargs.get("dtype")
        if self.nested is not None and dtype is not None:
            return self.nested if dtype.is_floating_point else self._ledger.on(_CPU)
        return self._last or self._where_tensors_are()

    @property
    def last_on_host(self) -> bool:
        """Whether the last operator, if there was any, ran on the host."""
        return self._last is None or self._last.device == _CPU

    def begin_on(self, device: DeviceLedger) -> None:
        """Take note of where the tensors of a composite operator are, which is about to run."""
        self._last = device

    def run_on_host(self) -> None:
        """Take note of an operator that ran on real tensors of the host."""
        self._last = self._ledger.on(_CPU)

    def _where_tensors_are(self) -> DeviceLedger:
        """Return the machine's device if it holds anything, else the host."""
        device = self._ledger.on(self._target.device)
        return device if device.entries else self._ledger.on(_CPU)

    def _shared(self, call: Call, device: DeviceLedger) -> DeviceLedger:
        """Return the device that all tensors of a call are on, or go with."""
        if call.operator.record.across_devices:
            if call.operator.masks:  # C++ makes an index of a Python one (``x[True]``, ``x[[0]]``)
                for tensor, record in zip(call.tensors[1:], call.records[1:], strict=True):
                    self._move_guess(tensor, record, device)
            _check_across(call)
            return device
        if [*map(_ledger, call.records)].count(device) == len(call.records):
            return device
        first = call.records[0]
        for tensor, record in zip(call.tensors, call.records, strict=True):
            if record.ledger is device:
                continue
            if device.device.type == "cpu" and _all_scalars(call, device):
                device = record.ledger
            elif self._move_guess(tensor, record, device):
                continue
            elif self._is_guess(first) and not _goes_anywhere(tensor, record):
                device = record.ledger
                self._ledger.move(first, device)
            elif not _goes_anywhere(tensor, record):
                raise _on_two_devices(call, device.device, record.ledger.device)
        return device

    def _move_guess(self, tensor: Tensor, record: StorageRecord, device: DeviceLedger) -> bool:
        """Move a tensor whose device was guessed to that of the others.

        A number stays on the host (``x[mask] = 0``): its kernel takes it from there.
        """
        wrong = record.ledger is not device and self._is_guess(record)
        if wrong and not _goes_anywhere(tensor, record):
            self._ledger.move(record, device)
            return True
        return False

    def note_guess(self, call: Call, result: Any) -> None:
        """Remember results whose device nothing but guesses decided."""
        if call.records and not self.guessed:
            return
        if self.are_guesses(call.records):
            self.guess(result)

    def are_guesses(self, records: list[StorageRecord]) -> bool:
        """Return whether nothing but guesses decided where any of the storages is."""
        return all(map(self._is_guess, records))

    def guess(self, result: Any) -> None:
        """Remember tensors whose device nothing said, or C++ alone knows: of an index that it makes
        of a list (torch/csrc/autograd/python_variable_indexing.cpp, ``sequenceToVariable``).
        """
        for tensor in argument_tensors(result):
            record = self._ledger.records[storage_address(tensor)]
            self.guessed[record.address] = record.index

    def cut(self) -> None:
        """Forget guesses about what is gone."""
        known = self._ledger.records
        self.guessed = {
            address: index for address, index in self.guessed.items() if address in known
        }

    def _is_guess(self, record: StorageRecord) -> bool:
        return self.guessed.get(record.address) == record.index


def _goes_anywhere(tensor: Tensor, record: StorageRecord) -> bool:
    """Return whether a tensor is a number on the host, which goes with a GPU's tensors."""
    return tensor.dim() == 0 and record.ledger.device.type == "cpu"


def check_generator(generator: torch.Generator, device: torch.device) -> None:
    """Raise what torch raises for random numbers of another device (core/Generator.h)."""
    found = _device_type(generator)
    if found != device.type:
        raise RuntimeError(
            f"Expected a '{device.type}' device type for generator but found '{found}'"
        )


def _device_type(generator: torch.Generator) -> str:
    on_gpu = cast(Any, generator)._cdata in GPU_GENERATORS
    return "cuda" if on_gpu else generator.device.type


def _all_scalars(call: Call, device: DeviceLedger) -> bool:
    """Return whether all tensors on ``device`` have no dimension, and so go with any other."""
    return all(
        tensor.dim() == 0
        for tensor, record in zip(call.tensors, call.records, strict=True)
        if record.ledger is device
    )


def _check_across(call: Call) -> None:
    """Raise for what C++ would not accept of tensors of two devices, with its words.

    Where an index is (native/TensorAdvancedIndexing.cpp, make_info), a sequence's lengths are
    (native/PackedSequence.cpp) or a tensor of scalars for lists is (native/ForeachUtils.h,
    convert_tensor_to_scalar_list) is not seen by C++, which takes all of them to be on the CPU.
    """
    operator, records = call.operator, call.records
    name, device = operator.name, records[0].ledger.device
    if operator.record.of_host:
        *others, own = records
        place = own.ledger.device
        # A module's inputs were all put on the GPU by the trace, not by the program.
        if place.type != "cpu" and own.ledger.origin(own.index).phase is not Phase.BASELINE:
            raise RuntimeError(operator.record.elsewhere.format(device=place))
        for record in others:
            if record.ledger.device != device:
                raise _on_two_devices(call, device, record.ledger.device)
    if not call.operator.masks:
        return
    end = len(records) - ("put" in name)
    for record in records[1:end]:
        if record.ledger.device not in (device, _CPU):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({device})"
            )
    for tensor, record in zip(call.tensors[end:], records[end:], strict=True):
        if record.ledger.device != device and tensor.dim() > 0:
            raise _on_two_devices(call, device, record.ledger.device)


def _on_two_devices(call: Call, first: torch.device, second: torch.device) -> RuntimeError:
    return RuntimeError(
        f"{ON_TWO_DEVICES}, but found at least two devices, {first} and {second}! (when running "
        f"{call.operator.name})"
    )


_aten: Any = torch.ops.aten


def staged_pairs(
    call: Call, result: Any, device: DeviceLedger
) -> Iterator[tuple[Tensor, Tensor, DeviceLedger]]:
    """Yield what a call copies from another device by way of temporaries.

    That is: destination, source, and the device of the source.
    """
    tensors, records = call.tensors, call.records
    half = len(tensors) // 2 if call.operator.name != "aten::_to_copy" else 0
    destinations = tensors[:half] if half else [result]
    for destination, source, record in zip(
        destinations, tensors[half:], records[half:], strict=False
    ):
        both_on_gpus = "cpu" not in (record.ledger.device.type, device.device.type)
        if record.ledger is not device and not both_on_gpus and needs_staging(destination, source):
            yield destination, source, record.ledger


def needs_staging(destination: Tensor, source: Tensor) -> bool:
    """Return whether a copy between devices needs temporaries; ``copy_requires_temporaries``."""
    if not destination.numel():
        return False
    if destination.dtype is not source.dtype:
        return True
    if destination.numel() == 1:
        return False
    strides = zip(
        destination.shape, destination.stride(), source.expand_as(destination).stride(), strict=True
    )
    return not is_dense(destination) or any(
        size > 1 and one != other for size, one, other in strides
    )


def stage(
    destination: Tensor,
    source: Tensor,
    onto: torch.device,
    origin: torch.device,
    non_blocking: bool,
    placing_on: Callable[[torch.device], AbstractContextManager[None]],
) -> None:
    """Issue the operators by which ``copy_kernel_cuda`` makes its temporaries.

    The copies into and out of them take nothing more on a GPU, and are left to the values known.
    """
    same_type = destination.dtype is source.dtype
    converts_source = origin.type == ("cuda" if non_blocking else "cpu")
    target = None
    dtype = destination.dtype if converts_source else source.dtype
    if not destination.is_contiguous() or not (same_type or converts_source):
        with placing_on(onto):
            target = torch.empty(destination.shape, dtype=dtype, device="cpu")
    with placing_on(origin):
        if converts_source and not same_type:
            source = _aten._to_copy.default(source, dtype=dtype)
        source = source.expand_as(destination)
        if not source.is_contiguous():
            source = _aten.clone.default(source, memory_format=torch.contiguous_format)
    del target, source  # together, when the copy is done
