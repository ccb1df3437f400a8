"""Values that are known: token ids, masks, lengths, counters, computed for real beside the trace.

A storage whose content is known carries it as real memory. An operator all of whose inputs are
known is run for real as well, so that ``mask.any()``, ``lengths.max().item()`` and boolean indexing
give what they would; everything large, random or computed from parameters stays unknown.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.plan import Output, Plan
from pytest_torchmem.interception.values.assumptions import assume, assumed_output
from pytest_torchmem.interception.values.contents import Assumption, Contents
from pytest_torchmem.interception.values.unknown_integers import UnknownInteger
from pytest_torchmem.step.trees import argument_leaves, argument_tensors, replace_tensors
from pytest_torchmem.torch_private.storages import storage_address

#: Elements up to which values are kept. Integers and booleans decide control flow and shapes; of
#: floating values only small tables (drop path rates, optimizer steps) are ever asked for, and
#: of random ones a row, one for each sample of a batch.
LIMIT_INTEGER = 1 << 18
LIMIT_FLOATING = 1 << 10
LIMIT_RANDOM = 1 << 7

#: The same for the masks that kernels of nested tensors make of their sizes: a boolean for every
#: element, by which they select.
LIMIT_NESTED = 1 << 26

#: Initialisers draw again what fell out of bounds (``_no_grad_trunc_normal_``); a trace counts
#: every first draw as accepted.
_INITIALISERS = torch.nn.init.__file__

#: What ``torch.distributions`` is given counts as valid.
_VALIDATION = tuple(
    os.path.join(os.path.dirname(torch.__file__), "distributions", name)
    for name in ("constraints.py", "distribution.py")
)

#: Bytes up to which what stands in for unknown values has an element for each of theirs.
_LARGEST_STAND_IN = 1 << 26

#: How often one line may ask for what is not known and get the same answer.
_LARGEST_GUESSES = 1_000

_CPU = torch.device("cpu")


def worth_knowing(
    dtype: torch.dtype, elements: int, largest: int = 0, limit: int = LIMIT_INTEGER
) -> bool:
    """Return whether the values of a tensor of that size are kept.

    ``largest``: the elements of the largest known tensor that it is computed from. A mask made
    floating (``-inf`` where nothing is attended to) is as large as the boolean one. ``limit`` is
    that of integers and booleans.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    return elements <= (max(LIMIT_FLOATING, largest) if floating else limit)


def is_count(dtype: torch.dtype) -> bool:
    """Return whether values of a type may be how many there are of something."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


def memory_for(dtype: torch.dtype, nbytes: int, operator: str = "") -> Tensor | None:
    """Return real memory for a small integer or boolean storage, else None.

    C++ reads and writes such tensors without an operator: lengths, batch sizes, splits. Of floating
    ones it fills what it has just made empty (``at::tensor``, in the CTC loss).
    """
    if nbytes == 0:
        return None
    floating = dtype.is_floating_point or dtype.is_complex
    if floating and operator != "aten::empty.memory_format":
        return None
    if nbytes > (LIMIT_FLOATING if floating else LIMIT_INTEGER) * dtype.itemsize:
        return None
    return torch.zeros(nbytes, dtype=torch.uint8)


class KnownValues:
    """Keeps the known values of one trace in step with its operators."""

    def __init__(self, ledger: Ledger, attribution: Attribution) -> None:
        self.contents = Contents(ledger)
        self.warnings: list[str] = []
        self._guesses: dict[str, int] = {}
        self.limit = LIMIT_INTEGER
        """Elements up to which values of integers and booleans are kept."""
        self._ledger = ledger
        self._attribution = attribution

    def know(self, call: Call, plan: Plan, result: Any) -> None:
        """Compute the values of what an operator made or wrote to, if those it read are known."""
        operator = call.operator
        if operator.opaque:
            self._written(call)
        elif call.records:
            computable = not operator.random or operator.shared.makes_values
            known = computable and self.contents.are_known(call.records)
            if known and self._compute(call, plan, result):
                return
            if operator.shared.fills and self._compute(call, plan, result):
                return
            rule = operator.record.unknown_outputs
            output = None if rule is None else assumed_output(rule, result)
            if rule is not None and output is not None:
                record = self._ledger.records[storage_address(output)]
                self.contents.assume(record, assume(rule, call, self.contents))
        elif operator.shared.makes_values and self._compute(call, plan, result):
            return
        if operator.mutated or operator.mutated_names:
            self._written(call)

    def item(self, tensor: Tensor, record: StorageRecord) -> Any:
        """Return the number of a tensor of one element; what is not known and not integer is 1."""
        __tracebackhide__ = True
        if self.contents.known(record) is not None:
            return self.contents.value(record, tensor).item()
        if tensor.dtype is torch.bool:
            return self._truth(record)
        assumed = self.contents.assumed(record)
        if assumed is not None:
            return self._position(tensor, assumed)
        what = f"read an unknown value of a {tensor.dtype} tensor"
        if is_count(tensor.dtype):
            raise self.unknown(what)
        self._warn(f"{what}; unknown values are treated as 1")
        return 1.0

    def count(self, tensor: Tensor) -> UnknownInteger:
        """Return what stands for an integer that is not known, where a program may just tell it."""
        self._warn(f"read an unknown value of a {tensor.dtype} tensor; it is treated as 1")
        return UnknownInteger(1.0, self.unknown)

    def stand_in(self, tensor: Tensor, record: StorageRecord, what: str) -> Tensor:
        """Return a real tensor for one whose values a program takes out of torch.

        What is not known is 1, and a position that was found is 0. Raises ``UnknownValueError`` for
        other integers: they are sizes often enough.
        """
        __tracebackhide__ = True
        if self.contents.known(record) is not None:
            return self.contents.value(record, tensor)
        assumed = self.contents.assumed(record)
        number: float = 1 if assumed is None else assumed.answer
        if assumed is None and is_count(tensor.dtype):
            raise self.unknown(what)
        self._warn(f"{what}; unknown values are treated as {number}")
        one = torch.full((), number, dtype=tensor.dtype)
        if tensor.numel() * tensor.element_size() > _LARGEST_STAND_IN:
            return one.expand(tensor.shape)
        return one.repeat(tensor.shape) if tensor.dim() else one

    def _truth(self, record: StorageRecord) -> bool:
        """Return what an unknown truth value counts as."""
        __tracebackhide__ = True
        assumed = self.contents.assumed(record) or Assumption.GUESSED_TRUE
        if not assumed.guessed:
            return bool(assumed.answer)
        if self._attribution.asked_from(_INITIALISERS):
            return False
        if any(map(self._attribution.asked_from, _VALIDATION)):
            return True
        answer = bool(assumed.answer)
        self.guess(
            "comparison with an unknown value; unknown values are treated as 1, so the result is "
            f"{answer}"
        )
        return answer

    def _position(self, tensor: Tensor, assumed: Assumption) -> int:
        __tracebackhide__ = True
        self.guess(
            f"read an unknown position from a {tensor.dtype} tensor; unknown positions are treated "
            f"as {assumed.answer}"
        )
        return int(assumed.answer)

    def guess(self, what: str) -> None:
        """Warn of a guess, and end a loop that would wait for another answer for ever."""
        __tracebackhide__ = True
        self._warn(what)
        line = self._attribution.user_line()
        times = self._guesses[line] = self._guesses.get(line, 0) + 1
        if times > _LARGEST_GUESSES:
            raise self.unknown(
                f"the same unknown value was read {_LARGEST_GUESSES:,} times here; a loop is "
                "probably waiting for it to change"
            )

    def _warn(self, what: str) -> None:
        """Tell of the first value that was made up; those after it may follow from it."""
        if not self.warnings:
            line = self._attribution.user_line() or "the traced program"
            self.warnings.append(f"{line}: {what}")

    def unknown(self, what: str) -> UnknownValueError:
        """Return the error for a value that the trace does not have, naming the user's line."""
        line = self._attribution.user_line()
        return UnknownValueError(
            f"{line or 'the traced program'}: {what}. This line needs a value that the trace does "
            "not have: a trace only has the values of small integer and boolean tensors (token "
            "ids, masks, lengths) that are neither random nor computed from parameters. Pass the "
            "input with real values, or skip this line while tracing (a flag, or a budget on a "
            "part of the model)"
        )

    def run(self, call: Call, values: list[Tensor]) -> Any:
        """Run an operator for real with ``values`` in the place of its tensor arguments."""
        real = {id(tensor): value for tensor, value in zip(call.tensors, values, strict=True)}
        operator, kwargs = call.operator, call.kwargs
        if operator.takes_device:
            kwargs = {**kwargs, "device": _CPU}
            kwargs.pop("pin_memory", None)
        args = replace_tensors(call.args, lambda tensor: real[id(tensor)])
        with torch.no_grad():
            return operator.overload(
                *operator.with_numbers_as_tensors(args, "cpu"),
                **replace_tensors(kwargs, lambda tensor: real[id(tensor)]),
            )

    def take(self, results: Any, values: Any, largest: int = 0) -> None:
        """Keep ``values`` as those of ``results``, where they are small enough.

        ``largest``: the elements of the largest known tensor that they were computed from.
        """
        for tensor, value in zip(argument_tensors(results), argument_tensors(values), strict=False):
            record = self._ledger.records.get(storage_address(tensor))
            if record is None or tensor.shape != value.shape:
                continue
            if self.contents.known(record) is not None:
                continue
            if worth_knowing(tensor.dtype, tensor.numel(), largest, self.limit):
                self.contents.remember(record, laid_out_as(tensor, value))

    def _compute(self, call: Call, plan: Plan, result: Any) -> bool:
        operator = call.operator
        made = argument_leaves(plan.outputs, Output)
        if not made and not operator.mutated and not operator.mutated_names:
            return False
        largest = max((tensor.numel() for tensor in call.tensors), default=0)
        sizes = [(output.dtype, math.prod(output.shape)) for output in made]
        if not all(worth_knowing(dtype, size, largest, self.limit) for dtype, size in sizes):
            return False
        floating = operator.random and made and made[0].dtype.is_floating_point
        if floating and (len(made[0].shape) > 1 or sizes[0][1] > LIMIT_RANDOM):
            return False
        if not self.contents.are_known(call.records) and any(
            output.dtype.is_floating_point or output.dtype.is_complex for output in made
        ):
            return False  # of what is like an unknown tensor, integers alone decide anything
        values = [
            torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
            if self.contents.known(record) is None
            else self.contents.value(record, tensor)
            for tensor, record in zip(call.tensors, call.records, strict=True)
        ]
        try:
            real = self.run(call, values)
        except (RuntimeError, NotImplementedError, IndexError, ValueError):
            return False
        self.take(result, real, largest)
        return True

    def _written(self, call: Call) -> None:
        """Forget what was known of the storages that an operator wrote to, or know them anew."""
        operator = call.operator
        kept = {
            id(call.args[operator.argument_names.index(name)])
            for name in operator.record.keeps_values
        }
        for argument in operator.written(call.args, call.kwargs):
            if id(argument) in kept:
                continue
            for tensor in argument_tensors(argument):
                record = self._ledger.records.get(storage_address(tensor))
                if record is None:
                    continue
                self.contents.assume(record, None)
                nbytes = tensor.untyped_storage().nbytes()
                if (
                    operator.shared.overwrites
                    and tensor.numel() * tensor.element_size() == nbytes
                    and worth_knowing(tensor.dtype, tensor.numel(), limit=self.limit)
                ):
                    self._overwrite(call, tensor, record, nbytes)

    def _overwrite(self, call: Call, tensor: Tensor, record: StorageRecord, nbytes: int) -> None:
        """Know the whole storage of ``tensor`` anew, if what is written to it is known."""
        pairs = list(zip(call.tensors, call.records, strict=True))
        contents = self.contents
        if any(other is not tensor and contents.known(source) is None for other, source in pairs):
            return
        contents.show(record, nbytes)
        self.run(call, [contents.value(source, other) for other, source in pairs])


def laid_out_as(tensor: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` in a storage of its own that ``tensor`` can be a view of."""
    nbytes = tensor.untyped_storage().nbytes()
    if (
        value.stride() == tensor.stride()
        and value.storage_offset() == tensor.storage_offset()
        and value.untyped_storage().nbytes() == nbytes
    ):
        return value
    storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
    return Output.of(tensor).on(storage).copy_(value)
