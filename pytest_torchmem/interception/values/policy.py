"""How far a trace computes the values of tensors: what ``values=`` says, and its budget.

``"none"`` knows the values of small integers and booleans alone, and guesses what else a program
asks for. ``"real"`` computes every tensor's. ``"auto"`` computes them as far as a small budget of
bytes and operations goes, so that tests' small models just work. Where the program's way depends on
a value beyond it, that pass ends, and the program is traced again with a larger budget. A budget is
never counted in time, so that a trace is the same on every machine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache, lru_cache
from typing import Any

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.plan import Output, Plan
from pytest_torchmem.step.trees import argument_leaves, replace_leaves
from pytest_torchmem.torch_private.operators import OpOverload
from pytest_torchmem.units import format_size


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

    @property
    def computes(self) -> bool:
        """Whether values are computed whatever their type."""
        return self is not Values.GUESSED

    def budget(self) -> Budget | None:
        """Return what the values of a pass may take, ``None`` for any amount."""
        if self is Values.ASKED_FOR:
            return Budget(8 << 20, 10_000_000)
        return Budget(2 << 30, 500_000_000_000) if self is Values.WITHIN_BUDGET else None


class ValuesNeeded(BaseException):
    """Ends a pass whose program's way depends on a value that has to be computed.

    No ``Exception``, because programs catch those.
    """


NOTHING = Plan((), None)
"""The plan of a call whose outputs' geometry is not known yet."""


class Budget:
    """The bytes and operations that the values of one trace may take.

    An operation is a multiplication and addition, or an element that is read or written. When the
    budget is spent, what is cheap and only depends on known values still is computed: the random
    numbers and lengths of a program that prepares its data.
    """

    CHEAP = 1 << 16
    """Operations, and bytes, up to which one operator is always computed."""

    def __init__(self, nbytes: int, operations: int) -> None:
        self._bytes, self._limit = nbytes, operations
        self._operations = 0
        self.spent = ""
        """What there was too much of, when the budget was exceeded."""

    def affords(self, live: int, call: Call, plan: Plan) -> bool:
        """Return whether a call's values may be computed.

        ``live`` are the bytes of the values that are known now.
        """
        operations = operations_of(call, plan)
        nbytes = sum(size for size in plan.slots if size > 0)
        if operations <= self.CHEAP and nbytes <= self.CHEAP:
            return True
        if self.spent:
            return False
        self.spend(operations)
        return self.holds(live + nbytes)

    def spend(self, operations: int) -> bool:
        """Count operations; return whether the budget was not exceeded."""
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
    """Return how many operations a call takes: torch's own count where it has one, or elements."""
    outputs = argument_leaves(plan.outputs, Output)
    count = sum([math.prod(output.shape) for output in outputs])
    count += sum([tensor.numel() for tensor in call.tensors])
    formula = _formula_of(call.operator.overload)
    if formula is not None:
        made = replace_leaves(plan.outputs, Output, lambda output: output.shape)
        # It may know another form of this operator.
        with suppress(AssertionError, TypeError, ValueError, IndexError, AttributeError):
            count += formula(*call.args, **call.kwargs, out_val=made) // 2
    return count


@lru_cache(maxsize=1000)
def _formula_of(overload: OpOverload) -> Callable[..., int] | None:
    return _formulas().get(overload.overloadpacket)


@cache
def _formulas() -> Mapping[Any, Callable[..., int]]:
    logger = logging.getLogger("torch.utils.flop_counter")
    before, logger.disabled = logger.disabled, True  # it tells that triton is missing
    try:
        from torch.utils.flop_counter import flop_registry
    finally:
        logger.disabled = before
    return flop_registry
