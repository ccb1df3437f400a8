"""Values computed beside a trace: an operator run for real by the CPU's kernels.

So is what a kernel takes on this machine, where oneDNN was not checked: each geometry is run once,
on tensors of zeros of its own.

The capture of a CUDA graph runs no kernel. What it makes holds nothing yet, and what it writes to
keeps its values, until ``replay`` runs everything that was captured on the values that are there
then. It does so on the same addresses: intermediate tensors have their contents at every replay,
although nothing in the program holds them any more.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.plan import Call, Output, Plan, Same, plan_of_result
from pytest_torchmem.interception.values import messages, random_numbers
from pytest_torchmem.interception.values.contents import Contents, is_floating, zeros
from pytest_torchmem.journal.journal import variables
from pytest_torchmem.operators.workspace import Workspace
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin
from pytest_torchmem.step import generators
from pytest_torchmem.step.trees import argument_tensors, replace_tensors
from pytest_torchmem.torch_private import tensors as private
from pytest_torchmem.torch_private.devices import EventType, profiler_runs
from pytest_torchmem.torch_private.keys import OpOverload, at_kernels, schema
from pytest_torchmem.torch_private.names import TORCH_VERSION
from pytest_torchmem.torch_private.patches import having
from pytest_torchmem.torch_private.settings import OneThread, fills_new_memory

_CPU = torch.device("cpu")
_DROPOUT = "aten::native_dropout"
_FEW = 1 << 15
"""Elements up to which one thread is as fast as several: ``at::internal::GRAIN_SIZE``
(ATen/Parallel.h), up to which pointwise kernels use one by themselves."""

_elements: Callable[[Tensor], int] = Tensor.numel

#: Types that some of the CPU's kernels do not know, computed in ``float32`` instead.
HALVES = (torch.float16, torch.bfloat16)

#: What kernels say of a type that they do not know, and what oneDNN says of one that needs other
#: instructions than this machine has.
TYPE_REFUSED = ("not implemented for", "could not create a primitive")


def run_for_real(call: Call, values: list[Tensor], *, alone: bool = False) -> Any:
    """Run an operator with ``values`` in the place of its tensor arguments, by the CPU's kernel.

    An operator that only cuda has is run by what its record says. Memory that nobody has written to
    is zero, so that a trace is the same every time. ``alone``: on this thread, however many
    elements there are. Raises what the kernel raises.
    """
    alone, draws = alone or are_few(values), call.operator.random and call.device is not None
    with generators.drawing_on(cast(Any, call.device).device) if draws else nullcontext():
        try:
            result = _run(call, values, alone)
        except (RuntimeError, NotImplementedError) as error:
            if not any(words in str(error) for words in TYPE_REFUSED):
                raise
            return _run_in_another_type(call, values, alone)
    if call.operator.makes_empty and not fills_new_memory():
        for tensor in argument_tensors(result):
            private.TensorBase.zero_(tensor)
    return result


def are_few(values: Sequence[Tensor]) -> bool:
    """Return whether one thread computes with so many elements as fast as several."""
    return sum(map(_elements, values)) <= _FEW


def _run(call: Call, values: list[Tensor], alone: bool) -> Any:
    operator = call.operator
    args, kwargs = operator.placed(call.args, call.kwargs, _CPU)
    if values is not call.tensors:
        real = {id(tensor): value for tensor, value in zip(call.tensors, values, strict=True)}
        if not real:  # a tensor on meta, like which one is made, stands for its own geometry
            given = argument_tensors((call.args, call.kwargs))
            real = {id(one): one for one in given if one.is_meta}
        args = replace_tensors(args, lambda tensor: real[id(tensor)])
        if kwargs:
            kwargs = replace_tensors(kwargs, lambda tensor: real[id(tensor)])
    equivalent = call.values
    on_host = call.device is not None and call.device.device == _CPU
    lowers = operator.has_body and on_host and torch.is_autocast_enabled("cpu")
    with OneThread() if alone else nullcontext(), at_kernels(lowers=lowers):
        if equivalent is not None:
            return equivalent(args, kwargs)
        if operator.functional:  # its kernel would ask the group of processes
            return messages.run_functional(operator.name, args, kwargs)
        overload = operator.overload
        own = generators.own_generator() if operator.random else None
        if operator.name == _DROPOUT:
            return _dropout(own, *args, **kwargs)
        named: torch.Generator | None = kwargs.get("generator")
        if named is not None:
            kwargs, own = {**kwargs, "generator": generators.drawn_from(named)}, None
        elif own is not None and (drawing := _with_generator(overload)) is not None:
            overload, kwargs, own = drawing, {**kwargs, "generator": own}, None
        with nullcontext() if own is None else generators.default_drawing_as(own):
            made = overload(*operator.with_exact_numbers(args), **kwargs)
        if operator.random and isinstance(made, Tensor):
            generators.current_draws().change(operator.name, args, made)
        return made


@cache
def _with_generator(overload: OpOverload) -> OpOverload | None:
    """Return the overload that takes a generator and else the same, if there is one."""
    names = [str(argument.name) for argument in schema(overload).arguments]
    if "generator" in names:
        return overload
    packet: Any = overload.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        if {str(one.name) for one in schema(other).arguments} == {*names, "generator"}:
            return other  # type: ignore[no-any-return]
    return None


def _dropout(own: torch.Generator | None, input: Tensor, p: float, train: bool | None) -> Any:
    """``native_dropout_cpu`` (native/Dropout.cpp) with a generator, which the operator lacks. The
    mask lies as the input does, as that of ``_dropout_impl``, which the CPU runs: the numbers are
    drawn in the order of memory, so that both drop the same elements.
    """
    if not input.numel() or train is False or p in (0, 1):
        return torch.ops.aten.native_dropout.default(input, p, train)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=own)
    return input.mul(mask).mul_(1 / (1 - p)), mask


def to_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _run_in_another_type(call: Call, values: list[Tensor], alone: bool) -> Any:
    """Run an operator whose CPU kernel does not know a type; outputs are not converted back. Half
    precision is computed in single, and integers (``histc``) in double.
    """
    if any(value.dtype in HALVES for value in values):
        single = [*map(to_single, values)]
    else:
        single = [one if is_floating(one.dtype) else one.double() for one in values]
    if all(one is other for one, other in zip(single, values, strict=True)):
        raise NotImplementedError(f"the CPU has no kernel of {call.operator.name} for these types")
    result = _run(call, single, alone)
    written = call.written()
    for tensor, value, computed in zip(call.tensors, values, single, strict=True):
        if id(tensor) in written and computed is not value:
            value.copy_(computed)
    return result


@dataclass(eq=False, repr=False)
class RandomPlace:
    """Where a generator was at some moment."""

    generator: torch.Generator
    random_state: Tensor

    @classmethod
    def now(cls, generator: torch.Generator) -> "RandomPlace":
        return cls(generator, generators.state_of(generator))

    def restore_random_numbers(self) -> None:
        generators.set_state_of(self.generator, self.random_state)


@dataclass(eq=False, repr=False)
class Ahead(RandomPlace):
    """An operator's values, computed before its body ran, and where the generator was then."""

    real: Any
    """What it returned."""
    written: dict[int, Tensor]
    """The contents of the storages that it wrote to, by their addresses."""


def memories_of(
    plan: Plan, real: Any, given: list[Tensor], *, exact: bool = False
) -> dict[int, Tensor]:
    """Return real memory for a plan's new storages, by slot, with the values of its outputs.

    ``real`` is what the CPU's kernel returned for ``given``. Where it lies as the plan says, its
    own memory is taken, otherwise its values are copied. An output of another shape has no values;
    where the shapes are to be ``exact``, it raises ``ValueError``.
    """
    outputs = plan.outputs
    if type(outputs) is Output:  # as most operators return
        memory = own_memory_of(outputs, plan.slots[outputs.slot], real, given)
        if memory is not None:
            return {outputs.slot: memory}
    memories: dict[int, Tensor] = {}
    taken = {private.storage_address(tensor) for tensor in given}
    for output, value in in_pairs(plan.outputs, real):
        if type(output) is not Output or plan.slots[output.slot] < 0:
            continue
        nbytes, slot = plan.slots[output.slot], output.slot
        if tuple(value.shape) != tuple(output.shape):
            # what a library keeps for itself, in a size of each machine's own
            if value.dim() == len(output.shape) == 1 and value.dtype == output.dtype == torch.uint8:
                memories[slot] = zeros(max(nbytes, value.numel()))
                memories[slot][: value.numel()] = value
            elif exact and nbytes:
                shapes = f"{tuple(value.shape)} for an output of {tuple(output.shape)}"
                raise ValueError(f"its values are of shape {shapes}")
            continue
        if slot not in memories and _lies_as(value, output, nbytes):
            address = private.storage_address(value)
            if address not in taken:
                taken.add(address)
                memories[slot] = private.bytes_of(value.untyped_storage())
                continue
        if slot not in memories:
            memories[slot] = zeros(nbytes)
        private.TensorBase.copy_(output.on(memories[slot].untyped_storage()), value)
    return memories


def own_memory_of(output: Output, nbytes: int, real: Any, given: list[Tensor]) -> Tensor | None:
    """Return a computed tensor's own memory, where it lies there as ``output`` does, else None."""
    if type(real) is not Tensor or real.shape != output.shape or not _lies_as(real, output, nbytes):
        return None
    if private.storage_address(real) in map(private.storage_address, given):
        return None
    return private.bytes_of(real.untyped_storage())


def grown_of(plan: Plan, real: Any) -> dict[int, Tensor]:
    """Return the values of arguments that an operator has resized (``out=``): by ``-1 - position``,
    since those of new storages go by their slots.
    """
    if type(plan.outputs) is Output:
        return {}
    return {
        -1 - output.position: value
        for output, value in in_pairs(plan.outputs, real)
        if isinstance(output, Same) and output.grown is not None
    }


def in_pairs(outputs: Any, results: Any) -> Iterator[tuple[Output | Same, Tensor]]:
    """Yield the outputs of a plan with the tensors that stand where they do in ``results``."""
    if isinstance(outputs, (Output, Same)):
        if isinstance(results, Tensor):
            yield outputs, results
    elif isinstance(outputs, (list, tuple)) and isinstance(results, (list, tuple)):
        for output, result in zip(outputs, results, strict=False):
            yield from in_pairs(output, result)


def _lies_as(value: Tensor, output: Output, nbytes: int) -> bool:
    return (
        value.dtype is output.dtype
        and value.stride() == output.stride
        and private.storage_bytes(value.untyped_storage()) == nbytes
        and value.storage_offset() == output.offset
        and not (value.is_conj() or value.is_neg())
    )


def laid_out_as(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` in a storage of its own that ``tensor`` can be a view of."""
    nbytes = tensor.untyped_storage().nbytes()
    if (
        value.stride() == tensor.stride()
        and value.storage_offset() == tensor.storage_offset()
        and value.untyped_storage().nbytes() == nbytes
    ):
        return value
    storage = zeros(nbytes).untyped_storage()
    return cast(Tensor, private.TensorBase.copy_(Output.of(tensor).on(storage), value))


LARGEST = 64 * 2**20
"""Bytes of a call's arguments and outputs up to which it is run: a second or less of work."""


def workspace_here(call: Call, plan: Plan, result: Any) -> Workspace | None:
    """Return what the kernel of a call takes at its peak beyond its outputs, and let the plan have
    the outputs that it made.

    ``result`` shows those that the plan has. None for a call of more than ``LARGEST`` bytes, beside
    another profiler, and where the kernel raises.
    """
    tensors = [*call.tensors, *argument_tensors(result)]
    if sum(map(_extent, tensors)) > LARGEST or profiler_runs():
        return None
    real = replace_tensors((call.args, call.kwargs), _zeros_like)
    # Kineto reads its log level at a process' first recording, and else logs every one.
    level = os.environ.get("KINETO_LOG_LEVEL", "99")
    try:
        with (
            variables({"KINETO_LOG_LEVEL": level}, all_of_them=False),
            profile(profile_memory=True) as profiler,
            at_kernels(),
        ):
            made = call.operator.overload(*real[0], **real[1])
    except RuntimeError:
        return None
    ran = plan_of_result(made, argument_tensors(real))
    plan.slots, plan.outputs = ran.slots, ran.outputs
    # the most bytes that the allocator's recorded requests had at once
    live = peak = 0
    results: Any = profiler.kineto_results
    for _, change in sorted(_requests(results.experimental_event_tree())):
        live += change
        peak = max(peak, live)
    taken = peak - sum(nbytes for nbytes in ran.slots if nbytes > 0)
    return Workspace((taken,) if taken else ())


def _extent(tensor: Tensor) -> int:
    return Output.of(tensor).span * tensor.element_size()


def _zeros_like(tensor: Tensor) -> Tensor:
    storage = zeros(_extent(tensor)).untyped_storage()
    return private.tensor_on(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0)


def _requests(events: list[Any]) -> Iterator[tuple[int, int]]:
    """Yield the time and the bytes of every request, below 0 where they are given back."""
    for event in events:
        if event.tag == EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _requests(event.children)


_AT_EACH_CAPTURE = TORCH_VERSION < (2, 14)
"""Whether a graph has a seed and an offset also if it draws nothing."""


def not_permitted() -> Exception:
    """Return what CUDA raises where the host waits for what is captured."""
    message = "CUDA error: operation not permitted when stream is capturing"
    return torch.AcceleratorError(message)


class Captured:
    """A storage that a graph uses: the program's for as long as it lives, then the graph's own."""

    memory = content = assumption = None
    size, of_ranks, ends, as_met = 0, "", (), False
    """What a record of the ledger has: what is known of the storage when it is gone."""

    def __init__(self, record: StorageRecord) -> None:
        self.record = record
        self.graphs = 0
        """How many graphs use it."""


class _Step(NamedTuple):
    """An operator with stand-ins for its tensors, and the storages that these lie on."""

    call: Call
    plan: Plan
    storages: tuple[Captured, ...]
    made: tuple[tuple[int, Captured], ...]
    """The plan's new storages, by slot."""


class GraphRecording:
    """What one graph has captured; ``shared`` has the storages that all graphs use, by address."""

    def __init__(
        self, index: int, stream: int, ledger: Ledger, shared: dict[int, Captured]
    ) -> None:
        self._device = ledger.on(torch.device("cuda", index))
        self.index = index
        """That of the GPU."""
        self.streams = {stream}
        """Those that belong to the capture."""
        self._ledger = ledger
        self._shared = shared
        self.steps: list[_Step] = []
        self._storages: dict[Captured, None] = {}
        self._random: list[int] = []
        """The ledger's entries of what a replay draws random numbers by."""
        if _AT_EACH_CAPTURE:
            self._keep_random_state()

    def covers(self, call: Call) -> bool:
        """Return whether a call goes to a stream that is being captured."""
        here = call.device is self._device
        return (here and self._device.stream in self.streams) or any(map(self.uses, call.records))

    def uses(self, record: StorageRecord) -> bool:
        """Return whether what is done with a storage now is captured."""
        return record.ledger is self._device and self._device.stream in self.streams

    def note(self, call: Call, plan: Plan, result: Any) -> None:
        """Write down an operator, whose outputs are ``result``."""
        if not self._random and random_numbers.draws_numbers(call):
            self._keep_random_state()
        stand_ins = {id(tensor): _stand_in(tensor) for tensor in call.tensors}
        args = replace_tensors(call.args, lambda tensor: stand_ins[id(tensor)])
        kwargs = replace_tensors(call.kwargs, lambda tensor: stand_ins[id(tensor)])
        tensors = [stand_ins[id(tensor)] for tensor in call.tensors]
        made = tuple(
            (output.slot, self._of(self._ledger.records[private.storage_address(tensor)]))
            for output, tensor in in_pairs(plan.outputs, result)
            if type(output) is Output and plan.slots[output.slot] >= 0
        )
        storages = tuple(map(self._of, call.records))
        again = Call(call.operator, args, kwargs, tensors, [], call.device, stands_in=True)
        self.steps.append(_Step(again, plan, storages, made))

    def _keep_random_state(self) -> None:
        """Book a seed and an offset, in ordinary memory of the default stream.

        native/cuda/CUDAGeneratorImpl.cpp, ``CUDAGeneratorCaptureState::initialize``. Torch 2.11 has
        them on the stream of the capture (``register_graph``).
        """
        device, origin = self._device, Origin(self._ledger.phase, "")
        label = "random state of a CUDA graph"
        entry = Allocation(8, Kind.OTHER, origin, (1,), "int64", label)
        with having(device, stream=device.stream if TORCH_VERSION < (2, 12) else 0):
            self._random = [device.add(entry), device.add(entry)]

    def _of(self, record: StorageRecord) -> Captured:
        found = self._shared.get(record.address)
        if found is None or found.record is not record:
            found = self._shared[record.address] = Captured(record)
        if found not in self._storages:
            self._storages[found] = None
            found.graphs += 1
        return found

    def replay(
        self,
        contents: Contents,
        compute: Callable[[Call, Plan], Mapping[int, Tensor] | None],
        forget_written: Callable[[Call], None],
    ) -> None:
        """Run everything that was captured on the values that are there now."""
        for step in self.steps:
            call = step.call
            call.records = [self._now(storage) for storage in step.storages]
            memories = compute(call, step.plan)
            if memories is None:
                for _, storage in step.made:
                    contents.assume(self._now(storage), None)
                forget_written(call)
                continue
            for slot, storage in step.made:
                if slot in memories:
                    contents.remember(self._now(storage), memories[slot])
        for storage in self._storages:
            if storage.graphs == 1 and self._now(storage) is storage:
                self._ledger.forget(storage)

    def drop(self) -> None:
        """End: what only this graph uses is gone."""
        self.steps.clear()
        for index in self._random:
            self._device.remove(index)
        self._random.clear()
        for storage in self._storages:
            storage.graphs -= 1
            if not storage.graphs:
                self._ledger.forget(storage)
                if self._shared.get(storage.record.address) is storage:
                    del self._shared[storage.record.address]
        self._storages.clear()

    def _now(self, storage: Captured) -> Any:
        """Return what the contents of a storage go by now."""
        alive = self._ledger.records.get(storage.record.address) is storage.record
        return storage.record if alive else storage


def _stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor without data that lies on its storage as ``tensor`` does."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(elements, dtype=tensor.dtype, device="meta")
    made = whole.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return private.read_as(tensor, made)
