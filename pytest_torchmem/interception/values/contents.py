"""What is known, or assumed, of the values of storages, and how far they are computed.

``values="none"`` knows the values of small integers and booleans alone, and guesses what else a
program asks for. ``"real"`` computes every tensor's. ``"auto"`` computes them as far as a small
budget of bytes and operations goes, so that tests' small models just work. Where the program's way
depends on a value beyond it, that pass ends, and the program is traced again with a larger budget.
A budget is never counted in time, so that a trace is the same on every machine. Values of small
tensors are always kept.
"""

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pytest_torchmem.errors import PassEnded
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.plan import Call, Output, Plan
from pytest_torchmem.step.trees import argument_leaves
from pytest_torchmem.torch_private import modes, settings
from pytest_torchmem.torch_private.tensors import TensorBase, bytes_of, read_as, tensor_on
from pytest_torchmem.units import format_size

ValuesMode: TypeAlias = Literal["auto", "real", "none"]


class Values(Enum):
    """What one pass of a trace computes, and does where a value is not known."""

    GUESSED = "none"
    """Small values are known, others guessed: the profile warns of each guess."""
    ASKED_FOR = "auto"
    """Every value is known as far as a small budget goes; a decision on another ends the pass."""
    WITHIN_BUDGET = "auto, again"
    """Every value is known as far as the budget goes; a decision on another is an error."""
    REAL = "real"
    """Every value is known; a decision on what has none (a tensor on ``meta``) is an error."""
    BETWEEN_TRACES = "between traces"
    """Every value is known as far as the budget of a test goes; a decision on another is an error.

    So it is on a GPU that stands between traces, where nothing can be run again."""
    OF_SUITE = "in a suite"
    """The same, with a budget for what a whole suite of tests decides on: none is traced."""

    @property
    def computes(self) -> bool:
        """Whether values are computed whatever their type."""
        return self is not Values.GUESSED

    @property
    def wants_all(self) -> bool:
        """Whether no other pass follows that computes what this one leaves out."""
        return self is not Values.GUESSED and self is not Values.ASKED_FOR

    @property
    def stands(self) -> bool:
        """Whether these are values of a GPU that stands between traces."""
        return self is Values.BETWEEN_TRACES or self is Values.OF_SUITE

    @property
    def may_warn(self) -> bool:
        """Whether a guess may be told by a profile: there is one, and it is to have guesses."""
        return not (self.stands or self is Values.REAL)

    def budget(self) -> "ValuesBudget | None":
        """Return what the values of a pass may take, ``None`` for any amount."""
        if self is Values.ASKED_FOR:
            return ValuesBudget(8 << 20, 10_000_000)
        if self is Values.BETWEEN_TRACES:
            return ValuesBudget(128 << 20, 1_000_000_000)
        if self is Values.OF_SUITE:
            return ValuesBudget(2 << 30, 100_000_000_000)
        return ValuesBudget(2 << 30, 500_000_000_000) if self is Values.WITHIN_BUDGET else None


class ValuesNeeded(PassEnded):
    """Ends a pass whose program's way depends on a value that has to be computed."""


NOTHING = Plan((), None)
"""The plan of a call whose outputs' geometry is not known yet."""


class ValuesBudget:
    """The bytes and operations that the values of one trace may take.

    An operation is a multiplication and addition, or an element that is read or written. When the
    budget is spent, what is cheap and only depends on known values still is computed: the random
    numbers and lengths of a program that prepares its data.
    """

    CHEAP = 1 << 16
    """Operations, and bytes, up to which one operator is always computed."""
    OF_WHOLE_NUMBERS = 64
    """So many times that for an operator on integers and booleans alone: positions, masks, lengths.

    They decide the way of a program, and are few beside the numbers that it computes with."""

    def __init__(self, nbytes: int, operations: int) -> None:
        self._bytes, self._limit = nbytes, operations
        self._operations = 0
        self.spent = ""
        """What there was too much of, when the budget was exceeded."""

    def affords(self, live: int, call: Call, plan: Plan) -> bool:
        """Return whether a call's values may be computed. ``live`` are the bytes of the values that
        are known now.
        """
        known = plan.cost
        if known is None:
            nbytes = sum(size for size in plan.slots if size > 0)
            made = [output.dtype for output in argument_leaves(plan.outputs, Output)]
            dtypes = [*made, *(tensor.dtype for tensor in call.tensors)]
            times = 1 if any(map(is_floating, dtypes)) else self.OF_WHOLE_NUMBERS
            known = operations_of(call, plan), nbytes, times
            if plan is not NOTHING:  # any other is that of calls with the same geometry
                plan.cost = known
        if self.is_cheap(known):
            return True
        operations, nbytes, _ = known
        if self.spent:
            return False
        self.spend(operations)
        return self.holds(live + nbytes)

    def is_cheap(self, cost: tuple[int, int, int]) -> bool:
        """Return whether a call of a plan that costs so much is always computed."""
        operations, nbytes, times = cost
        return operations <= times * self.CHEAP and nbytes <= times * self.CHEAP

    def spend(self, operations: int) -> bool:
        self._operations += operations
        if self._operations > self._limit and not self.spent:
            self.spent = f"takes more than {self._limit / 1e9:g} billion operations"
        return not self.spent

    def holds(self, live: int) -> bool:
        """Return whether there is room for values of ``live`` bytes."""
        if live > self._bytes and not self.spent:
            self.spent = f"takes more than {format_size(self._bytes)}"
        return not self.spent


def operations_of(call: Call, plan: Plan) -> int:
    """Return how many operations a call takes: the elements that it reads and makes, and the
    multiplications of a product, a convolution or an attention.

    These are counted as ``torch.utils.flop_counter`` does, which would import triton, and with it
    the compiler: many times what a first trace takes.
    """
    made = sum([math.prod(output.shape) for output in argument_leaves(plan.outputs, Output)])
    read = sum([tensor.numel() for tensor in call.tensors])
    multiplications = _counter(call.operator.name.partition(".")[0].removeprefix("aten::"))
    if multiplications is None:
        return made + read
    return made + read + multiplications(call.named, made)


_Counter = Callable[[Mapping[str, Any], int], int]
"""Counts multiplications of an operator, from its arguments by name and the elements it makes."""
_FACTORS = {"mm": "self", "bmm": "self", "_scaled_mm": "self", "addmm": "mat1", "baddbmm": "batch1"}
"""The first factor of a product."""


@cache
def _counter(name: str) -> _Counter | None:
    backward = name.endswith("_backward")
    if name in _FACTORS:
        return lambda named, made: made * int(named[_FACTORS[name]].shape[-1])
    if "convolution" in name or name.startswith("_slow_conv"):
        return _of_convolution_backward if backward else _of_convolution
    if name.startswith("_scaled_dot_product_"):
        # A backward computes the first product of the forward again, and a product for each factor.
        return partial(_of_attention, 5 if backward else 2, -2)
    if name.startswith(("_flash_attention_", "_efficient_attention_")):
        return partial(_of_attention, 5 if backward else 2, 1)
    return None


def _of_convolution(named: Mapping[str, Any], made: int) -> int:
    # The weight is met once for each place of the output; of the input, if it is transposed.
    weight, input = named["weight"], named.get("input", named.get("self"))
    if named.get("transposed"):
        return _places(input) * int(weight.numel())
    outputs: int = made // max(int(weight.shape[0]), 1)
    return outputs * int(weight.numel())


def _of_convolution_backward(named: Mapping[str, Any], made: int) -> int:
    met = named["input"] if named.get("transposed") else named["grad_output"]
    wanted: int = sum(named["output_mask"][:2])
    return wanted * _places(met) * int(named["weight"].numel())


def _places(tensor: Any) -> int:
    return int(tensor.numel()) // max(int(tensor.shape[1]), 1)


def _of_attention(products: int, sequence: int, named: Mapping[str, Any], made: int) -> int:
    queries: int = named["query"].numel()
    return products * queries * int(named["key"].shape[sequence])


#: Elements up to which values are kept. Integers and booleans decide control flow and shapes; of
#: floating values only small tables (drop path rates, optimizer steps) are ever asked for, and
#: of random ones a row, one for each sample of a batch.
LIMIT_INTEGER = 1 << 18
LIMIT_FLOATING = 1 << 10
LIMIT_RANDOM = 1 << 7

#: The same for the masks that kernels of nested tensors make of their sizes: a boolean for every
#: element, by which they select.
LIMIT_NESTED = 1 << 26

#: What makes tensors of which C++ may fill floating ones without an operator.
EMPTY = "aten::empty.memory_format"

_zeros = torch.zeros  # not what stands there in a trace, which tells devices apart

#: Of an operator whose outputs' values are not known.
NO_MEMORIES: Mapping[int, Tensor] = {}


def worth_knowing(
    dtype: torch.dtype, elements: int, largest: int = 0, limit: int = LIMIT_INTEGER
) -> bool:
    """Return whether the values of a tensor of that size are kept.

    ``largest``: the elements of the largest known tensor that it is computed from. A mask made
    floating (``-inf`` where nothing is attended to) is as large as the boolean one. ``limit`` is
    that of integers and booleans.
    """
    return elements <= (max(LIMIT_FLOATING, largest) if is_floating(dtype) else limit)


def is_floating(dtype: torch.dtype) -> bool:
    """Return whether a type is one of real or complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def is_count(dtype: torch.dtype) -> bool:
    """Return whether values of a type may be how many there are of something."""
    return not is_floating(dtype) and dtype is not torch.bool


def memory_for(dtype: torch.dtype, nbytes: int, operator: str = "") -> Tensor | None:
    """Return real memory for a small integer or boolean storage, else None.

    C++ reads and writes such tensors without an operator: lengths, batch sizes, splits. Of floating
    ones it fills what it has just made empty (``at::tensor``, in the CTC loss).
    """
    floating = is_floating(dtype)
    most = (LIMIT_FLOATING if floating else LIMIT_INTEGER) * dtype.itemsize
    kept = 0 < nbytes <= most and not (floating and operator != EMPTY)
    return zeros(nbytes) if kept else None


def zeros(nbytes: int) -> Tensor:
    """Return bytes that are all zero.

    From 32,768 on ``fill_`` runs on threads (``at::internal::GRAIN_SIZE``), which a process without
    them would start for this.
    """
    if nbytes < 32_768:
        return _zeros(nbytes, dtype=torch.uint8)
    made = torch.empty(nbytes, dtype=torch.uint8)
    ctypes.memset(made.data_ptr(), 0, nbytes)
    return made


_UNWRITTEN = 0xA5
"""The first and the last bytes of memory that is shown and that nobody has written to."""
_AT_ENDS = 64
_of_ranks = attrgetter("of_ranks")


class Assumption(Enum):
    """A value that stands for all elements of a storage, and whether it is a guess."""

    __hash__ = object.__hash__  # that of ``Enum`` is a function of Python

    TRUE = (True, False)
    FALSE = (False, False)
    GUESSED_TRUE = (True, True)
    GUESSED_FALSE = (False, True)
    FIRST = (0, "position")
    """Of the positions that were found, one that exists wherever there is any."""

    @property
    def answer(self) -> Any:
        return self.value[0]

    @property
    def guessed(self) -> bool:
        """Whether the value may well be another one in a real run."""
        return bool(self.value[1])


class Contents:
    """The values of storages: of the ledger's records, or of what outlives these (``Captured``)."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.are_unwritten = False
        """Whether any storage was ever left that nobody has written to; asked for every operator.
        """
        self.are_of_ranks = False
        """Whether any content ever went by what other processes are taken to have."""

    def known(self, record: StorageRecord) -> Tensor | None:
        """Return a storage's content as a flat uint8 tensor, ``None`` where it is not known."""
        if record.ends:
            self.settle((record,))
        return record.content

    def find(self, record: StorageRecord, tensor: Tensor) -> Tensor | None:
        """Return the real values of ``tensor``, which lies on a storage; None if unknown."""
        return None if self.known(record) is None else self.value(record, tensor)

    def leave_unwritten(self, record: StorageRecord) -> None:
        """Know nothing of an empty storage until it is written to."""
        self._ledger.forget(record)
        memory = record.memory
        assert memory is not None
        first, count = memory.data_ptr(), min(_AT_ENDS, memory.numel())
        record.ends = ((first, count), (first + memory.numel() - count, count))
        self.are_unwritten = True
        _mark(record, _UNWRITTEN)

    def begin_writing(self, record: StorageRecord) -> None:
        """Know an empty storage that is written to from now on: what is not counts as zero."""
        if record.ends:
            _mark(record, 0)
            self.show(record)

    def share(self, record: StorageRecord) -> Tensor | None:
        """Let what is known lie in memory that other processes see, and return that, ``None`` where
        nothing is.
        """
        self.begin_writing(record)
        shared: Tensor | None = getattr(record, "shared", None)
        if shared is None and (content := self.known(record)) is not None:
            shared = content.clone()
            shared.untyped_storage().share_memory_()
            record.memory = None  # C++ is shown what was there before
            self._set(record, shared)
            record.shared = shared
        return shared

    def settle(self, records: Iterable[StorageRecord]) -> bool:
        """Know storages that C++ has written to (``at::tensor``); tell whether others are left."""
        left = False
        for record in records:
            if not record.ends:
                continue
            if any(ctypes.string_at(*end).strip(bytes([_UNWRITTEN])) for end in record.ends):
                self.show(record)
            else:
                left = True
        return left

    def are_known(self, records: Iterable[StorageRecord]) -> bool:
        if self.are_unwritten:
            self.settle(records)
        return all(record.content is not None for record in records)

    def are_shown(self, records: Iterable[StorageRecord], or_real: bool) -> bool:
        """Return whether whoever reads the storages reads what is known of them.

        ``or_real``: those of real tensors do, to which nothing is written.
        """
        for record in records:
            memory = record.memory
            if (memory is None or record.content is not memory) and not (or_real and record.as_met):
                return False
        return True

    def value(self, record: StorageRecord, tensor: Tensor, content: Tensor | None = None) -> Tensor:
        """Return the real values of ``tensor``, a view of the known content of its storage. Or of a
        copy of that ``content``.
        """
        whole: Any = record.content if content is None else content
        record.as_met = False  # whoever has it may write to it
        offset = int(tensor.storage_offset())
        storage = whole.untyped_storage()
        real = tensor_on(storage, tensor.dtype, tensor.shape, tensor.stride(), offset)
        return read_as(tensor, real)

    def remember(self, record: StorageRecord, tensor: Tensor) -> None:
        """Keep the content of the whole storage of the real ``tensor`` as that of ``record``."""
        # Not the modes of the program, which may be making a graph; and to copy takes no threads.
        with modes.NoDispatchModes(), settings.OneThread():
            content = bytes_of(tensor.untyped_storage())
            memory = record.memory
            own = TensorBase.clone(content) if memory is None else TensorBase.copy_(memory, content)
            self._set(record, own)

    def write(self, record: StorageRecord, tensor: Tensor, value: Tensor | None) -> bool:
        """Let ``tensor`` have a value, or nothing be known of its storage any more: if there is no
        value, or one of a part of it alone. Return whether it has it.
        """
        nbytes = tensor.untyped_storage().nbytes()
        is_whole = tensor.numel() * tensor.element_size() == nbytes
        if value is None or (self.known(record) is None and not is_whole):
            self.assume(record, None)
            return False
        if record.content is None:
            self.show(record, nbytes)
        TensorBase.copy_(self.value(record, tensor), value.reshape(tensor.shape))
        return True

    def show(self, record: StorageRecord, nbytes: int = 0) -> None:
        """Take a storage's bytes, or ``nbytes`` of new memory, as its known values."""
        self._set(record, zeros(nbytes) if record.memory is None else record.memory)

    def of_others(self, records: Iterable[StorageRecord]) -> str:
        """Return the line that gathered values of other ranks, if a content depends on them."""
        return next(filter(None, map(_of_ranks, records)), "") if self.are_of_ranks else ""

    def take_from_others(self, record: StorageRecord, line: str) -> None:
        """Take note that a storage's content goes by what other processes are taken to have."""
        record.of_ranks, self.are_of_ranks = line, True

    def assume(self, record: StorageRecord, assumption: Assumption | None) -> None:
        """Let an assumption, or nothing, stand for the elements of a storage."""
        self._ledger.forget(record)
        record.assumption = assumption

    def _set(self, record: StorageRecord, content: Tensor) -> None:
        self._ledger.forget(record)
        shared: Tensor | None = getattr(record, "shared", None)
        if shared is not None and content is not shared:
            content = shared.copy_(content)
        record.content, record.size = content, content.nbytes
        self._ledger.known_bytes += record.size


def _mark(record: StorageRecord, byte: int) -> None:
    """Fill the ends of unwritten memory; without torch, which may be intercepted here."""
    for pointer, count in record.ends:
        ctypes.memset(pointer, byte, count)
