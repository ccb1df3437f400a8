"""Where an operator's outputs are made, which devices go together, and how hollow tensors are made.

Copies between host and GPU go through temporaries on either side (native/cuda/Copy.cu): bytes
travel between contiguous tensors of one type (``cudaMemcpyAsync``). Where the two ends of a copy
are not that (``copy_requires_temporaries``), ``copy_kernel_cuda`` makes contiguous ones beside
them: the type is converted on the host, or for a ``non_blocking`` copy on the GPU. Between GPUs,
which can reach each other's memory, a kernel copies.

Of a Python number torch makes a tensor of 8 bytes, for ``x * 0.5`` say (``PythonArgs::tensor_slow``
in torch/csrc/utils/python_arg_parser.cpp). It dies with the call, unless the node of the graph
saves it, as ``MulBackward0`` does: then it lives until the node is released. The interceptor is
handed the number and never the tensor; when the next operator arrives the node stands, and shows
it.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord, dtype_name
from pytest_torchmem.interception.plan import Call, Output, Plan, Same, Temporary
from pytest_torchmem.interception.values.contents import EMPTY, NO_MEMORIES, Contents, memory_for
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.operators.workspace import Buffer, is_dense, type_of_number
from pytest_torchmem.profile.timeline import Allocation, Confidence, Kind, Origin, Phase
from pytest_torchmem.step.trees import Args, Kwargs, argument_tensors, replace_leaves
from pytest_torchmem.targets.target import Target, not_linked
from pytest_torchmem.torch_private import tensors as private
from pytest_torchmem.torch_private.keys import OpOverload
from pytest_torchmem.torch_private.tensors import hollow_storage, storage_address, tensor_on

_CPU = torch.device("cpu")
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
        one: Any = (ledger, outputs, plan.slots[0], device, origin, _EXACT, memory)
        if plan.steps:
            return _follow(ledger, plan, device, origin, lambda _: make_hollow(*one))
        return make_hollow(*one)
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
                on = ledger.on(_CPU) if slot in plan.on_host else device
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
    make: Callable[[Output | Same], Any],
) -> Any:
    """Write down a plan's requests in their order, and ``make`` its outputs; return the last."""
    temporaries: dict[int, int] = {}
    step: Any
    made: Any = None
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
                ledger.keep(step, private.in_engine_thread(), device, origin)
            else:
                made = make(step)
    finally:  # the device may have no memory for one of them
        for index in temporaries.values():
            device.remove(index)
    return made


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
    needed = (output.span + int(tensor.storage_offset())) * tensor.element_size()
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
    """Numbers that a node inside of a ``CopySlices`` has saved. The outer node holds this object as
    a pre-hook, which tells when it runs and when it is gone.
    """

    def __init__(self, indices: tuple[int, ...], device: DeviceLedger) -> None:
        self.runs = False
        self._indices = indices
        self._device = device

    def __call__(self, *gradients: object) -> None:
        self.runs = self.runs or not private.keeps_graph()

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
        entries = [
            (type_of_number(args[position]).itemsize, Kind.OTHER, origin, (), "", "", _EXACT)
            for position in positions
        ]
        return tuple([device.add(_tuple(Allocation, entry)) for entry in entries])

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
            in_place = pending.operator.name.partition(".")[0].endswith("_")
            if in_place and private.is_view_of_another(pending.result):
                base = private.view_base(pending.result)
                node = None if base is None else base.grad_fn
                hidden = _Hidden(pending.indices, pending.device)
                if pending.operator.record.saves_number and node is not None:
                    node.register_prehook(hidden)
                    self._hidden[hidden] = private.node_number(node)
                    self.are_hidden = True
            else:
                self._follow(pending)
        if self.are_hidden:
            self.are_hidden = bool(self._hidden)
            for hidden, number in tuple(self._hidden.items()):
                if not hidden.runs:
                    continue
                node = private.current_node()
                if private.node_number(node) != number:  # it has run, and let go of its node
                    hidden.release()
                    del self._hidden[hidden]

    def _follow(self, pending: _Pending) -> None:
        """Strike the numbers off when the node releases them; at once where it saved none."""
        node = pending.result.grad_fn
        for name, index in zip(pending.names, pending.indices, strict=True):
            saved = private.saved_by(node, name)
            if isinstance(saved, Tensor) and storage_address(saved) not in self._ledger.records:
                record = self._ledger.attach(saved.untyped_storage(), index, pending.device)
                # Its conjugate, or a graph of ``torch.jit.trace``, has it as an ordinary tensor.
                self._contents.remember(record, saved)
            else:
                pending.device.remove(index)


def run_on_host(overload: OpOverload, args: Args, kwargs: Kwargs) -> Any:
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
        self.last: DeviceLedger | None = None
        """Where the last operator ran, or the tensors are of a composite one that is about to."""
        self.nested: DeviceLedger | None = None
        """Where values of a nested tensor are while its kernel runs; its sizes are the host's."""
        self.in_cpp = False
        """Whether the body that is running is C++'s: what it makes without naming a device, and of
        that alone, is on the host (the index that ``repeat`` makes with ``at::arange``)."""
        self.per_thread: dict[str, Callable[[], Any]] = {
            "last": lambda: None,
            "nested": lambda: None,
            "in_cpp": bool,
        }
        self.has_guessed = False
        """Whether the device of any storage was ever guessed; asked for every operator."""

    def device_of(self, call: Call, target: torch.device | None) -> DeviceLedger | None:
        """Return where a call's outputs are made; None for ``meta``.

        ``target`` is where a copy between devices goes while it runs. Raises what torch raises for
        tensors of devices that do not go together.
        """
        if target is not None or not call.records or call.kwargs or call.operator.takes_device:
            asked = call.operator.device_of(call.args, call.kwargs)
            if asked is not None and asked.type == "meta":
                return None
            if target is not None:
                if self.in_cpp and asked is None and self._is_beside_host(call):
                    return self._ledger.on(_CPU)
                return self._ledger.on(target)
            if asked is not None and asked.type != "cpu":
                named = self._target.normalise(asked)
                if named not in self._target.devices:
                    raise not_linked(named)
                return self._ledger.on(named)
            # What C++ asks to be made on the CPU stands beside a tensor that C++ takes to be there;
            # a program that asks for the CPU comes with ``target`` set (fake_cuda/api). Where C++
            # names no device (lengths, batch sizes) it is the host.
            if not call.records:
                return (
                    self._ledger.on(_CPU) if asked is None else self.beside_no_tensor(call.kwargs)
                )
        device = call.records[0].ledger
        if len(self._ledger.devices) > 1 or call.operator.record.across_devices:
            device = self._shared(call, device)
        self.last = device
        return device

    def _is_beside_host(self, call: Call) -> bool:
        """Return whether all of a call's tensors are on the host, or it has none and makes one.
        What is made like a tensor goes where the body's own call is sent (``randn_like(device=)``).
        """
        if call.operator.takes_device:
            return not call.records
        return bool(call.records) and all(record.ledger.device == _CPU for record in call.records)

    def beside_no_tensor(self, kwargs: Kwargs) -> DeviceLedger:
        """Return where that is made which C++ asks the CPU for, in a call without tensors."""
        generator = kwargs.get("generator")
        if generator is not None and _device_type(generator) == "cpu":
            return self._ledger.on(_CPU)  # torch.utils.data.random_split
        dtype = kwargs.get("dtype")
        if self.nested is not None and dtype is not None:
            return self.nested if dtype.is_floating_point else self._ledger.on(_CPU)
        if self.last is not None:
            return self.last
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
        for tensor, record in call.pairs():
            if record.ledger is device:
                continue
            of_device = (one for one, other in call.pairs() if other.ledger is device)
            if device.device.type == "cpu" and not any(one.dim() for one in of_device):
                device = record.ledger  # they go with any other
            elif self._move_guess(tensor, record, device):
                continue
            elif first.guessed and not _goes_anywhere(tensor, record):
                device = record.ledger
                self._ledger.move(first, device)
            elif not _goes_anywhere(tensor, record):
                raise _on_two_devices(call, device.device, record.ledger.device)
        return device

    def _move_guess(self, tensor: Tensor, record: StorageRecord, device: DeviceLedger) -> bool:
        """Move a tensor whose device was guessed to that of the others. A number stays on the host
        (``x[mask] = 0``): its kernel takes it from there.
        """
        wrong = record.ledger is not device and record.guessed
        if wrong and not _goes_anywhere(tensor, record):
            self._ledger.move(record, device)
            return True
        return False

    def guess(self, result: Any) -> None:
        """Remember tensors whose device nothing said, or C++ alone knows: of an index that it makes
        of a list (torch/csrc/autograd/python_variable_indexing.cpp, ``sequenceToVariable``).
        """
        for tensor in argument_tensors(result):
            self._ledger.records[storage_address(tensor)].guessed = self.has_guessed = True


def are_guesses(records: list[StorageRecord]) -> bool:
    """Return whether nothing but guesses decided where any of the storages is."""
    return all(record.guessed for record in records)


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
    """Yield what a call copies from another device by way of temporaries. That is: destination,
    source, and the device of the source.
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
    """Issue the operators by which ``copy_kernel_cuda`` makes its temporaries. The copies into and
    out of them take nothing more on a GPU, and are left to the values known.
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
