"""Values that are known: computed for real beside the trace, by the CPU's kernels.

A storage whose content is known carries it as real memory. An operator all of whose inputs are
known is run for real as well, so that ``mask.any()``, ``lengths.max().item()`` and boolean indexing
give what they would. Small integers and booleans are always kept (token ids, masks, lengths); all
else where values are real (``contents.py``).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.interception.plan import Call, Output, Plan, Same
from pytest_torchmem.interception.refusals import LinAlgError
from pytest_torchmem.interception.values import computed, messages
from pytest_torchmem.interception.values.answers import Answers, assume, assumed_output, even_counts
from pytest_torchmem.interception.values.contents import (
    LIMIT_INTEGER,
    LIMIT_RANDOM,
    NO_MEMORIES,
    NOTHING,
    Values,
    is_floating,
    worth_knowing,
    zeros,
)
from pytest_torchmem.interception.values.random_numbers import generator_of
from pytest_torchmem.operators.registry import Fills, UnknownOutputs
from pytest_torchmem.operators.spec import OperatorSpec, spec_of
from pytest_torchmem.step.generators import state_of
from pytest_torchmem.step.trees import (
    Args,
    Kwargs,
    argument_leaves,
    argument_tensors,
    replace_tensors,
)
from pytest_torchmem.torch_private.kernels import function_of
from pytest_torchmem.torch_private.keys import COMPOSITE_EXPLICIT, CPU, at_kernels, has_kernel
from pytest_torchmem.torch_private.settings import OneThread, fills_new_memory
from pytest_torchmem.torch_private.tensors import TensorBase, storage_address

#: What a kernel of the CPU raises for what it cannot compute; a user's own may raise anything.
_NOT_COMPUTED = (RuntimeError, NotImplementedError, ValueError, TypeError)

#: What the CPU's kernels say of this machine, and of types that they do not know.
_NOT_OF_VALUES = (
    "can't allocate memory",
    "not enough memory",
    "not implemented",
    "INTERNAL ASSERT",
    "could not create a primitive",
)
_CONTAINERS = frozenset({list, tuple, dict})
_Found = TypeVar("_Found")


class NotKnown(Exception):
    """Ends what is computed beside a trace, of a tensor whose values are not known."""


class KnownValues(Answers):
    """Keeps the known values of one trace in step with its operators."""

    def __init__(self, ledger: Ledger, attribution: Attribution, mode: Values) -> None:
        super().__init__(ledger, attribution, mode)
        self.computes = mode.computes
        self.limit = LIMIT_INTEGER
        """Elements up to which values of integers and booleans are always kept."""
        self.recordings: list[computed.GraphRecording] = []
        """The graphs that are being captured."""
        self._captured: dict[int, computed.Captured] = {}
        """The storages that graphs use, by address."""

    # -- operators ---------------------------------------------------------------------------------

    def worth_knowing(self, dtype: torch.dtype, elements: int) -> bool:
        """Return whether the values of a real tensor that enters the trace are kept."""
        if worth_knowing(dtype, elements):
            return True
        if self._budget is not None:
            return self._budget.holds(self._ledger.known_bytes + elements * dtype.itemsize)
        return self.mode.computes

    def begin_anew(self, record: StorageRecord, nbytes: int) -> None:
        """Take note of a storage's new memory, which is zero until it is written to."""
        fits = record.memory is None or record.memory.nbytes == nbytes
        if nbytes and fits and self.mode.computes and self.worth_knowing(torch.uint8, nbytes):
            self.contents.show(record, nbytes)
            cast(Tensor, record.content).zero_()

    def keep_resized(self, tensor: Tensor, content: Tensor) -> None:
        """Take note that a tensor, which may be in a larger storage now, has kept its ``content``.

        What is beyond that is zero here; ``resize_bytes_cpu`` (native/Resize.cpp) leaves it as it
        finds it.
        """
        record = self._ledger.records.get(storage_address(tensor))
        if record is None or self.contents.known(record) is not None:
            return
        whole = zeros(tensor.untyped_storage().nbytes())
        if fills_new_memory():
            whole = torch.empty_like(whole.view(tensor.dtype)).view(torch.uint8)
        whole[: content.numel()] = content
        self.contents.remember(record, whole)

    def expect(self, nbytes: int) -> None:
        """Take note that so many bytes are to be known from the beginning, or none of them."""
        if self._budget is not None:
            self._budget.holds(nbytes)

    def compute(self, call: Call, plan: Plan) -> Mapping[int, Tensor] | None:
        """Run an operator for real, on what is known of its arguments; it writes to that too.
        Returns the memory of the plan's new storages, by slot, with the values of its outputs, or
        ``None`` where what it reads is not known.
        """
        if self.recordings and self.is_captured(call):
            return None
        if self.contents.are_unwritten and (copied := self._begin_writing(call, plan)) is not None:
            return copied
        if self.computes and call.operator.needs_values:
            return self._compute_whatever(call, plan) if self._has_what_is_read(call) else None
        memories = self._computed(call, plan)
        if memories is None and call.operator.random:
            self._random_numbers.skip(call, plan)
        return memories

    def _has_what_is_read(self, call: Call) -> bool:
        """Return whether the values are known of all arguments that have any and are read."""
        for tensor, record in call.pairs():  # most often the first ends it
            if record.content is None and tensor.numel() and call.reads(tensor):
                return False
        return True

    def _begin_writing(self, call: Call, plan: Plan | None) -> Mapping[int, Tensor] | None:
        """Know the storages that nobody has written to and that an operator writes to. Returns the
        memory of a copy of one, which nobody has written to either.
        """
        operator, contents = call.operator, self.contents
        if not contents.settle(call.records):
            return None
        if operator.name == "aten::where.self":  # which chooses what was written (VonMises)
            for record in call.records:
                contents.begin_writing(record)
            return None
        if operator.copies_whole and plan is not None and plan.makes_one:
            return {0: zeros(plan.slots[0])}
        received = operator.overload.namespace in ("c10d", "fsdp")
        if not (received or operator.only_writes(call.args)):
            return None
        written = call.all_written()
        read = {record.address for tensor, record in call.pairs() if id(tensor) not in written}
        for tensor, record in call.pairs():
            if id(tensor) in written and record.address not in read:
                contents.begin_writing(record)
        return None

    def compute_shown(
        self,
        operator: OperatorSpec,
        args: Args,
        kwargs: Kwargs,
        tensors: list[Tensor],
        records: list[StorageRecord],
        plan: Plan,
        device: DeviceLedger,
    ) -> Mapping[int, Tensor] | None:
        """Return what ``compute`` does, of an operator that ``reads_in_place``: computed with the
        trace's own tensors, where they show what is known of them. None where that has to be looked
        at by ``compute``: nothing was computed then.
        """
        if operator.values_on(device.device.type) is not None:
            return None
        budget, contents = self._budget, self.contents
        if budget is not None and (plan.cost is None or not budget.is_cheap(plan.cost)):
            return None
        given = tensors
        if not contents.are_shown(records, operator.reads_real):
            if not contents.are_known(records):
                return None
            given = [*map(contents.value, records, tensors)]
            real = dict(zip(map(id, tensors), given, strict=True))
            if kwargs or not _CONTAINERS.isdisjoint(map(type, args)):
                args, kwargs = replace_tensors((args, kwargs), lambda tensor: real[id(tensor)])
            else:
                args = (*map(real.get, map(id, args), args),)
        alone = not self.mode.wants_all or computed.are_few(tensors)
        try:
            with OneThread() if alone else nullcontext(), at_kernels():
                exact = operator.with_exact_numbers(args) if plan.numbers else args
                return computed.memories_of(
                    plan, function_of(operator.overload)(*exact, **kwargs), given
                )
        except Exception:  # what it means, ``compute`` finds out by running it once more
            return None

    def _computed(self, call: Call, plan: Plan) -> Mapping[int, Tensor] | None:
        operator = call.operator
        if operator.overload.namespace == "c10d":
            if self.mailbox is not None and self.mailbox.deliver(call, self.contents):
                return NO_MEMORIES
            found = messages.copies_of_collective(call)
            if found is not None:
                self._copy(call, *found)
                return NO_MEMORIES
        elif operator.broadcasts and self.mailbox is not None:
            received = self.mailbox.pass_on(call, self.contents)
            if received is not None:
                value = received[0]
                if value is None:
                    return None
                if not call.operator.mutated:
                    return computed.memories_of(plan, value, [])
                laid_out = computed.laid_out_as(call.tensors[0], value)
                self.contents.remember(call.records[0], laid_out)
                return NO_MEMORIES
        if self._counts_others(call):
            return None
        if self.computes:
            can = operator.ignores_values or self._has_what_is_read(call)
            return self._compute_whatever(call, plan) if can else None
        if operator.opaque:
            return None
        if call.records:
            computable = not operator.random or operator.shared.fills is Fills.RANDOM
            if (computable and self.contents.are_known(call.records)) or operator.ignores_values:
                return self._compute_small(call, plan)
        elif operator.shared.fills is not None:
            return self._compute_small(call, plan)
        return None

    def note(
        self, call: Call, plan: Plan, result: Any, memories: Mapping[int, Tensor] | None
    ) -> None:
        """Note what is known of an operator's outputs, and of what it wrote to. ``memories`` is
        what ``compute`` returned.
        """
        if self.recordings and (recording := self._recording_of(call)) is not None:
            recording.note(call, plan, result)
            return
        if call.operator.writes and not all(record.hollow for record in call.records):
            written = call.all_written()
            for tensor, record in call.pairs():
                record.outdated |= not record.hollow and id(tensor) in written
        if memories is not None:
            line = self.contents.of_others(call.records) or self._gathered_now(call)
            if memories:
                empty = not fills_new_memory() and (
                    call.operator.makes_empty
                    or (call.operator.copies_whole and self.contents.settle(call.records[:1]))
                )
                self.show(plan, result, memories, unwritten=empty)
            self._spread(call, result, line)
            return
        operator = call.operator
        if operator.record.unknown_outputs is not None and call.records and not operator.opaque:
            self._assume(call, result)
        if operator.writes:
            self._written(call)

    def show(
        self, plan: Plan, result: Any, memories: Mapping[int, Tensor], *, unwritten: bool = False
    ) -> None:
        """Know a plan's outputs by their memories, unless these are ``unwritten``."""
        records, contents = self._ledger.records, self.contents
        if plan.makes_one and not unwritten:  # as most do
            if 0 in memories:
                contents.show(records[storage_address(result)])
            return
        for output, tensor in computed.in_pairs(plan.outputs, result):
            record = records[storage_address(tensor)]
            if type(output) is Output and output.slot in memories:
                if unwritten and plan.slots[output.slot]:
                    contents.leave_unwritten(record)
                else:
                    contents.show(record)
            elif isinstance(output, Same) and output.grown is not None:
                value = memories.get(-1 - output.position)
                if value is not None:
                    contents.remember(record, computed.laid_out_as(tensor, value))

    def check(self, call: Call) -> None:
        """Raise what the kernel raises for positions that are known, of what is not computed."""
        contents = self.contents
        if self.recordings or contents.of_others(call.records):
            return
        records = {id(one): record for one, record in call.pairs()}

        def known(tensor: Tensor) -> Tensor | None:
            return contents.find(records[id(tensor)], tensor)

        check = call.operator.cpu.check_values
        if check is not None:
            with at_kernels():
                check(call.args, call.kwargs, known=known)

    def known_value(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor without memory, or one that is real itself. Raises
        ``NotKnown``.
        """
        record = self._ledger.records.get(storage_address(tensor))
        known = None if record is None else self.contents.find(record, tensor)
        if known is None and record is not None and record.hollow:
            raise NotKnown
        return tensor if known is None else known

    def affords(self, operations: int) -> bool:
        """Return whether so many operations may be computed beside the trace."""
        if not self.mode.computes:
            return False
        return self._budget is None or self._budget.spend(operations)

    def can_show_geometry(self, operator: OperatorSpec) -> bool:
        """Return whether an operator may be run to see what it makes (``torchvision::nms``)."""
        of_torch = operator.overload.namespace in ("aten", "prims", "c10d")
        name = operator.name
        runs = has_kernel(name, CPU) or has_kernel(name, COMPOSITE_EXPLICIT)
        return self.mode.computes and not of_torch and runs

    def ahead_of_body(self, call: Call, *, of_torch: bool) -> computed.RandomPlace | int | None:
        """Compute the values of an operator whose body is about to be run for what it allocates.

        The operators in the body need not be those of the CPU's kernel; where it is not
        ``of_torch`` it only requests what the kernel does. In the capture of a graph nothing is
        computed, and this is how many operators were captured before.
        """
        if self.recordings and (recording := self._recording_of(call)) is not None:
            return len(recording.steps)
        ahead = self._ahead(call, of_torch)
        if ahead is None and call.operator.random and not of_torch:
            return computed.RandomPlace.now(generator_of(call))
        return ahead

    def _ahead(self, call: Call, of_torch: bool) -> computed.Ahead | None:
        contents, operator = self.contents, call.operator
        if operator.makes_empty or (operator.opaque and call.values is None):
            return None
        if contents.are_unwritten:
            self._begin_writing(call, None)
        if not contents.are_known(call.records) or self._counts_others(call):
            return None
        if not self.mode.computes and (of_torch or not self._are_small(call)):
            return None
        if not self._may_compute(call, NOTHING):
            return None
        written = call.written()
        copies = {
            record.address: TensorBase.clone(known)
            for tensor, record in call.pairs()
            if id(tensor) in written and (known := contents.known(record)) is not None
        }
        given = [
            contents.value(record, tensor, copies.get(record.address))
            for tensor, record in call.pairs()
        ]

        def run() -> computed.Ahead:
            real, generator = self.run(call, given), generator_of(call)
            return computed.Ahead(generator, state_of(generator), real, copies)

        return self._attempt(call, run)

    def _are_small(self, call: Call) -> bool:
        """Return whether a call's values are kept whatever else is computed, as far as it shows."""
        if call.operator.random and call.operator.shared.fills is not Fills.RANDOM:
            return False
        return all(map(self._is_small, call.tensors))

    def _is_small(self, tensor: Tensor) -> bool:
        return worth_knowing(tensor.dtype, tensor.numel(), limit=self.limit)

    def note_body(
        self,
        call: Call,
        plan: Plan,
        result: Any,
        ahead: computed.RandomPlace | int | None,
        *,
        of_torch: bool,
    ) -> None:
        """Note what is known of what an operator's body made and wrote to; else what is assumed."""
        if isinstance(ahead, int):
            recording = self._recording_of(call)
            if recording is not None:
                del recording.steps[ahead:]  # those of the body
                recording.note(call, plan, result)
            return
        if ahead is not None:
            ahead.restore_random_numbers()
        if not isinstance(ahead, computed.Ahead):
            if ahead is not None:
                self._random_numbers.skip(call, plan)
        else:
            records, line = self._ledger.records, self.contents.of_others(call.records)
            for address, content in ahead.written.items():
                if address in records:
                    self.contents.remember(records[address], content)
            given = {record.address for record in call.records}
            pairs = zip(argument_tensors(result), argument_tensors(ahead.real), strict=False)
            for tensor, value in pairs:
                record = records.get(storage_address(tensor))
                if record is None or record.address in given or tensor.shape != value.shape:
                    continue
                if not self.mode.computes and not self._is_small(tensor):
                    self.contents.assume(record, None)
                    continue
                self.contents.remember(record, computed.laid_out_as(tensor, value))
            self._spread(call, result, line)
            return
        outputs = argument_tensors(result)
        if not of_torch:  # it has made them of anything
            self.forget(outputs)
            self._written(call)
        found = [self._ledger.records.get(storage_address(tensor)) for tensor in outputs]
        if any(one is not None and self.contents.known(one) is None for one in found):
            self._assume(call, result)

    def note_outputs(self, call: Call, result: Any, real: Any) -> None:
        """Know outputs by their ``real`` values, or assume something of them."""
        if not self.contents.are_known(call.records) or self._counts_others(call):
            self._assume(call, result)
            return
        self.take(result, real)
        self._spread(call, result, self.contents.of_others(call.records))

    def _counts_others(self, call: Call) -> bool:
        """Return whether counts are asked for of what goes by what other processes have: the
        choices of a router that is split, say, which are as even as those of unknown values.
        """
        even = call.operator.record.unknown_outputs is UnknownOutputs.EVEN_COUNTS
        return even and bool(self.contents.of_others(call.records))

    def _assume(self, call: Call, result: Any) -> None:
        rule = call.operator.record.unknown_outputs
        output = None if rule is None else assumed_output(rule, result)
        if rule is UnknownOutputs.EVEN_COUNTS:
            if not self._has_another_pass() and len(call.tensors) == 1 and output is not None:
                self.take(output, even_counts(call.tensors[0].numel(), output))
                line = self._attribution.user_line() or "the traced program"
                self._evenly = self._evenly or line
        elif rule is not None and output is not None:
            record = self._ledger.records[storage_address(output)]
            self.contents.assume(record, assume(rule, call, self.contents))

    def add_in_place(self, call: Call) -> None:
        """Add the second tensor of a call to the first, or forget it: a sum of gradients."""
        contents, (first, second) = self.contents, call.records
        if self.recordings and (recording := self._recording_of(call)) is not None:
            in_place = spec_of(torch.ops.aten.add_.Tensor)
            sum_ = Call(in_place, call.args, call.kwargs, call.tensors, call.records, call.device)
            recording.note(sum_, Plan((), Same(0)), call.tensors[0])
            return
        first.outdated = not first.hollow
        if contents.known(first) is None:
            return
        if contents.known(second) is None:
            contents.assume(first, None)
            return
        values = [contents.value(*pair) for pair in zip(call.records, call.tensors, strict=True)]
        with torch.no_grad():
            TensorBase.add_(*values)

    def compute_launch(
        self,
        kernel: str,
        tensors: list[Tensor],
        operations: int,
        run: Callable[[list[Tensor]], object],
    ) -> bool:
        """Let ``run`` compute what a launched kernel writes, in the values of its tensors. Return
        False where these are not known, or it takes more operations than there may be.
        """
        contents, found = self.contents, self._ledger.records
        records = [found.get(storage_address(tensor)) for tensor in tensors]
        for record in records:
            if record is not None:
                contents.begin_writing(record)
        known = [record for record in records if record is not None]
        if self.recordings or len(known) < len(records) or not contents.are_known(known):
            return False
        if not self.affords(operations):
            return False
        try:
            run([contents.value(*pair) for pair in zip(known, tensors, strict=True)])
        except Exception as error:
            self._note_failure(f"the kernel {kernel}", error)
            return False
        return True

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Know nothing any more of the storages of tensors that something else wrote to."""
        for tensor in tensors:
            record = self._ledger.records.get(storage_address(tensor))
            if record is not None:
                self.contents.assume(record, None)

    # -- CUDA graphs -------------------------------------------------------------------------------

    def begin_capture(self, index: int, stream: int) -> computed.GraphRecording:
        """Compute nothing on a stream of a GPU from now on."""
        recording = computed.GraphRecording(index, stream, self._ledger, self._captured)
        self.recordings.append(recording)
        return recording

    def replay(self, recording: computed.GraphRecording) -> None:
        recording.replay(self.contents, self.compute, self._written)

    def is_captured(self, call: Call) -> bool:
        """Return whether a call is not run, but written down for a graph."""
        return self._recording_of(call) is not None

    def uses_captured(self, record: StorageRecord) -> bool:
        """Return whether what is done with a storage now is captured."""
        return any(one.uses(record) for one in self.recordings)

    def refuse_captured(self, call: Call) -> None:
        """Raise what CUDA does where the host needs a value that is only there after a replay."""
        if self.recordings and self.is_captured(call):
            raise computed.not_permitted()

    def _recording_of(self, call: Call) -> computed.GraphRecording | None:
        return next((one for one in self.recordings if one.covers(call)), None)

    # -- how values come about ---------------------------------------------------------------------

    def run(self, call: Call, values: list[Tensor]) -> Any:
        """Run an operator for real with ``values`` in the place of its tensor arguments."""
        return computed.run_for_real(call, values, alone=not self.mode.wants_all)

    def threads(self) -> OneThread | nullcontext[None]:
        """Return a context for what copies values: as many threads as help. Within the small budget
        others do not, and they spin when they have nothing to do (libgomp's GOMP_SPINCOUNT): more
        processor time than all that is computed takes.
        """
        return nullcontext() if self.mode.wants_all else OneThread()

    def take(self, results: Any, values: Any) -> None:
        """Keep ``values`` as those of ``results``, where they are small enough or all are kept."""
        for tensor, value in zip(argument_tensors(results), argument_tensors(values), strict=False):
            record = self._ledger.records.get(storage_address(tensor))
            if record is None or tensor.shape != value.shape:
                continue
            if self.contents.known(record) is not None:
                continue
            if self._is_small(tensor) or self.worth_knowing(tensor.dtype, tensor.numel()):
                self.contents.remember(record, computed.laid_out_as(tensor, value))

    def give(self, results: list[Tensor], values: Iterable[Tensor] | None) -> None:
        """Let tensors have values that were computed aside, or none that are known."""
        self.forget(results)
        for tensor, value in zip(results, values or (), strict=False):
            record = self._ledger.records.get(storage_address(tensor))
            if record is not None:
                self.contents.remember(record, computed.laid_out_as(tensor, value.to(tensor.dtype)))

    def _compute_whatever(self, call: Call, plan: Plan) -> Mapping[int, Tensor] | None:
        operator = call.operator
        if operator.opaque and operator.overload.namespace == "c10d":
            return None  # other processes would have to be there
        if not self._may_compute(call, plan):
            return None
        return self._attempt(call, lambda: self._run_whole(call, plan))

    def _may_compute(self, call: Call, plan: Plan) -> bool:
        """Return whether a call is within the budget, and its generator where it would be."""
        live, budget = self._ledger.known_bytes, self._budget
        if budget is not None and not budget.affords(live, call, plan):
            return False
        return not call.operator.random or self._random_numbers.ready(call, plan)

    def _copy(self, call: Call, copies: list[messages.Copy], of_others: bool) -> None:
        """Let a collective's outputs have values, where those that they are made of are known.
        ``of_others``: they are those of other processes too, which are taken to have what this one
        has: sizes and counts, and what else is computed as far as the budget goes.
        """
        contents, line = self.contents, self._attribution.user_line() or "the traced program"
        records = {id(one): record for one, record in call.pairs()}
        for tensor, source, made in copies:
            record, value = records[id(tensor)], contents.find(records[id(source)], source)
            counts = messages.is_taken_to_be_same(call, tensor)
            matters = not of_others or counts or self.worth_knowing(tensor.dtype, tensor.numel())
            value = made(value) if value is not None and matters else None
            is_known = contents.write(record, tensor, value)
            if is_known and of_others and (counts or tensor is not source):
                contents.take_from_others(record, line)

    def _gathered_now(self, call: Call) -> str:
        """Return the line of a collective whose outputs depend on other ranks, "" for others."""
        operator = call.operator
        if not operator.functional or operator.broadcasts:
            return ""
        same = messages.is_taken_to_be_same(call, call.tensors[0])
        sums = operator.name.startswith(messages.SUMS) and not same
        if sums or not messages.includes_others(call):
            return ""
        return self._attribution.user_line() or "the traced program"

    def _spread(self, call: Call, result: Any, line: str) -> None:
        """Let what was computed go by what other processes are taken to have, if a line says so."""
        if not line:
            return
        written = call.operator.written(call.args, call.kwargs)
        for tensor in argument_tensors([result, list(written)]):
            record = self._ledger.records.get(storage_address(tensor))
            if record is not None:
                self.contents.take_from_others(record, line)

    def _attempt(self, call: Call, compute: Callable[[], _Found]) -> _Found | None:
        """Return what is computed, or None, with the reason kept for who asks for it."""
        operator = call.operator
        try:
            return compute()
        except (IndexError, LinAlgError):
            raise  # as it would for real
        except Exception as error:
            if not operator.opaque and not isinstance(error, _NOT_COMPUTED):
                raise
            if _is_refusal(call, error):
                raise
            self._note_failure(operator.name, error)
            return None

    def _note_failure(self, name: str, error: Exception) -> None:
        if not self._failed:
            line = self._attribution.user_line() or "the traced program"
            what = str(error).partition("\n")[0]
            self._failed = f"{line}: {name} could not be computed ({what})"

    def _compute_small(self, call: Call, plan: Plan) -> Mapping[int, Tensor] | None:
        operator = call.operator
        made = argument_leaves(plan.outputs, Output)
        if not made and not operator.mutated and not operator.mutated_names:
            return None
        largest = max((tensor.numel() for tensor in call.tensors), default=0)
        sizes = [(output.dtype, math.prod(output.shape)) for output in made]
        if not all(worth_knowing(dtype, size, largest, self.limit) for dtype, size in sizes):
            return None
        floating = operator.random and made and made[0].dtype.is_floating_point
        if floating and (len(made[0].shape) > 1 or sizes[0][1] > LIMIT_RANDOM):
            return None
        if not self.contents.are_known(call.records) and any(
            size > 1 and is_floating(dtype) for dtype, size in sizes
        ):
            # Of what is like an unknown tensor integers decide, and the gradient of a loss, which
            # is compared with 1 before it is multiplied by.
            return None
        if operator.random and not self._random_numbers.ready(call, plan):
            return None
        try:
            return self._run_whole(call, plan)
        except (RuntimeError, NotImplementedError, IndexError, ValueError):
            return None

    def _run_whole(self, call: Call, plan: Plan) -> Mapping[int, Tensor]:
        """Run an operator on what its tensors hold, and on zeros where it reads no values."""
        contents, made = self.contents, plan.outputs
        if (
            call.operator.shared.fills is Fills.ZEROS
            and type(made) is Output
            and plan.slots[made.slot] >= 0
        ):
            return {made.slot: zeros(plan.slots[made.slot])}  # the state of an optimizer
        if plan.constant is not None and not any(map(_may_be_another, _given(call))):
            return {0: TensorBase.clone(plan.constant)}
        shown = call.operator.reads_in_place and not call.stands_in
        if shown and contents.are_shown(call.records, call.operator.reads_real):
            given = call.tensors
        else:
            given = [
                torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                if contents.known(record) is None
                else contents.value(record, tensor)
                for tensor, record in call.pairs()
            ]
        by_record = call.values is not None
        drawn_otherwise = by_record and call.operator.random
        before = computed.RandomPlace.now(generator_of(call)) if drawn_otherwise else None
        real = self.run(call, given)
        if before is not None:  # the CPU's kernel draws others, and as many as it does
            before.restore_random_numbers()
            self._random_numbers.skip(call, plan)
        grown = computed.grown_of(plan, real)
        if not plan.slots:
            return grown or NO_MEMORIES
        memories = computed.memories_of(plan, real, given, exact=by_record)
        if _is_constant(call, plan, memories):
            plan.constant = TensorBase.clone(memories[0])
            _Constants.nbytes += plan.constant.nbytes
        if grown:
            memories |= grown
        if by_record:  # what that leaves out, nobody reads
            for slot, nbytes in enumerate(plan.slots):
                if slot not in memories and nbytes >= 0:
                    memories[slot] = zeros(nbytes)
        return memories

    def _written(self, call: Call) -> None:
        """Forget what was known of the storages that an operator wrote to, or know them anew."""
        operator, contents = call.operator, self.contents
        records = {id(one): record for one, record in call.pairs()}
        kept = {id(call.named[name]) for name in operator.record.keeps_values}
        for argument in operator.all_written(call.args, call.kwargs):
            if id(argument) in kept:
                continue
            for tensor in argument_tensors(argument):
                record = records[id(tensor)]
                contents.assume(record, None)
                if not operator.shared.overwrites:
                    continue
                nbytes = tensor.untyped_storage().nbytes()
                if tensor.numel() * tensor.element_size() == nbytes and (
                    self._is_small(tensor)
                    or (self.mode.computes and self.worth_knowing(tensor.dtype, tensor.numel()))
                ):
                    self._overwrite(call, tensor, record, nbytes)

    def _overwrite(self, call: Call, tensor: Tensor, record: StorageRecord, nbytes: int) -> None:
        """Know the whole storage of ``tensor`` anew, if what is written to it is known."""
        contents = self.contents
        if any(
            one is not tensor and contents.known(source) is None for one, source in call.pairs()
        ):
            return
        contents.show(record, nbytes)
        self.run(call, [contents.value(source, other) for other, source in call.pairs()])


class _Constants:
    """What plans of the process keep of them, in bytes."""

    LARGEST = 1 << 15
    MOST = 1 << 24
    nbytes = 0


def _is_constant(call: Call, plan: Plan, memories: Mapping[int, Tensor]) -> bool:
    """Return whether each call of a plan makes the same of its numbers (``torch.ones``)."""
    return (
        call.operator.shared.fills is Fills.NUMBERS
        and not call.tensors
        and plan.makes_one
        and 0 in memories
        and plan.slots[0] <= _Constants.LARGEST
        and _Constants.nbytes < _Constants.MOST
        and not any(map(_may_be_another, _given(call)))
    )


def _given(call: Call) -> tuple[Any, ...]:
    return (*call.args, *call.kwargs.values())


def _may_be_another(value: object) -> bool:
    """Return whether a number is -0.0, or may have one in it: its plan is that of 0.0, too."""
    if isinstance(value, float):
        return value == 0 and math.copysign(1.0, value) < 0
    return isinstance(value, complex)


def _is_refusal(call: Call, error: Exception) -> bool:
    """Return whether the program's own kernel would have raised an error of the CPU's kernel. That
    of the CPU does. A GPU's refuses values where its record says so, but other types.
    """
    operator = call.operator
    if operator.opaque or call.values is not None or type(error) is not RuntimeError:
        return False
    if any(words in str(error) for words in _NOT_OF_VALUES):
        return False
    on_cpu = call.device is not None and call.device.device.type == "cpu"
    return on_cpu or operator.record.refuses_values or operator.shared.refuses_values
