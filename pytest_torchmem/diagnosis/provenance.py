"""Where the tensors of a step come from: the calls that made them, and what those read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod

from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.operator_calls import OperatorCall
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline

_ZERO = ("aten::zero_", "aten::_foreach_zero_")
_STANDING = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)


class Provenance:
    """The operators that a step ran, asked about what they made."""

    def __init__(
        self,
        timeline: Timeline,
        calls: Sequence[OperatorCall] = (),
        broadcasts: Mapping[Origin, str] | None = None,
    ) -> None:
        self._timeline, self._calls = timeline, calls
        self.broadcasts: Mapping[Origin, str] = broadcasts or {}

    @cached_property
    def _made_by(self) -> dict[int, OperatorCall]:
        """By the index of the allocation."""
        events = self._timeline.events
        return {
            event - 1: call
            for call in self._calls
            for event in events[call.start : call.stop]
            if event > 0
        }

    def read(self, index: int) -> list[Allocation]:
        """Return what the call read that made an allocation, in the order of its arguments."""
        call = self._made_by.get(index)
        found = self._timeline.allocations
        return [found[one - 1] for one in call.reads if one > 0] if call is not None else []

    def original_of(self, index: int, copies: Collection[str]) -> Allocation | None:
        """Return of what an allocation is a copy, or a copy of one, as operators of ``copies`` make
        them; ``None`` where that is not known.
        """
        allocations, seen = self._timeline.allocations, {index}
        found = None
        while (call := self._made_by.get(index)) is not None:
            operator = allocations[index].origin.operator.partition(".")[0]
            read = next((one - 1 for one in call.reads if one > 0), -1)
            if operator not in copies or read in seen or read < 0:
                break
            seen.add(read)
            index = read
            found = allocations[read]
            if found.kind in _STANDING:
                break
        return found

    def first_of_type(self, index: int) -> Allocation:
        """Return from where on values are of the type of an allocation.

        Goes up from operator to operator as long as these are given as many numbers of that type,
        and then by what made narrower numbers this type: a constant, a mask.
        """
        allocations = self._timeline.allocations
        own = allocations[index]
        seen = {index}
        while (call := self._made_by.get(index)) is not None:
            same = [one - 1 for one in call.reads if one > 0 and one - 1 not in seen]
            same = [one for one in same if _is_of_type(allocations[one], own)]
            like = [one for one in same if prod(allocations[one].shape) == prod(own.shape)]
            narrower = [one - 1 for one in call.reads if one > 0]
            narrower = [one for one in narrower if allocations[one].dtype not in ("", own.dtype)]
            if not like and not (same and narrower):
                break
            index = (like or same)[0]
            seen.add(index)
        return allocations[index]

    def made(
        self, places: Collection[tuple[str, str, str, tuple[int, ...]]], dtype: str
    ) -> Allocation | None:
        """Return the first tensor of a type that was made at one of these places: module, operator,
        line and shape.
        """
        for one in self._timeline.allocations:
            own = (fold(one.origin.module)[0], one.origin.operator, one.origin.line, one.shape)
            if one.dtype == dtype and own in places:
                return one
        return None

    def largest(self, operator: str) -> Allocation | None:
        """Return the largest tensor that an operator made outside of the backward."""
        events, allocations = self._timeline.events, self._timeline.allocations
        made = (
            allocations[event - 1]
            for call in self._calls
            if call.origin.operator == operator
            for event in events[call.start : call.stop]
            if event > 0
        )
        return max(made, key=lambda one: one.nbytes if one.dtype else 0, default=None)

    def read_in(self, module: str) -> Iterator[Allocation]:
        """Yield what the calls in a module, a pattern, read outside of the backward."""
        allocations = self._timeline.allocations
        for call in self._calls:
            if fold(call.origin.module)[0] == module and call.origin.phase is Phase.FORWARD:
                yield from (allocations[one - 1] for one in call.reads if one > 0)

    def given_to(self, pattern: str) -> set[tuple[str, str, str, tuple[int, ...]]]:
        """Return what the forward of a module and of those in it read: by the modules, operators,
        types and shapes of who made it.
        """
        start = f"{pattern}."
        inside = (one for one in self._given if one == pattern or one.startswith(start))
        return set().union(*(self._given[one] for one in inside))

    @cached_property
    def _given(self) -> dict[str, set[tuple[str, str, str, tuple[int, ...]]]]:
        """By the pattern of the module that read it."""
        allocations = self._timeline.allocations
        found: dict[str, set[tuple[str, str, str, tuple[int, ...]]]] = {}
        for call in self._calls:
            if call.origin.phase is not Phase.FORWARD or not call.origin.module:
                continue
            own = found.setdefault(fold(call.origin.module)[0], set())
            for one in (allocations[read - 1] for read in call.reads if read > 0):
                made = one.origin
                own.add((fold(made.module)[0], made.operator, one.dtype, one.shape))
        return found

    def largest_in(self, module: str) -> Origin | None:
        """Return who made the largest tensor in a module, a pattern, outside of the backward."""
        events, allocations = self._timeline.events, self._timeline.allocations
        made = (
            allocations[event - 1]
            for call in self._calls
            if fold(call.origin.module)[0] == module and call.origin.phase is Phase.FORWARD
            for event in events[call.start : call.stop]
            if event > 0 and allocations[event - 1].dtype
        )
        found = max(made, key=lambda one: (bool(one.origin.line), one.nbytes), default=None)
        return found.origin if found is not None else None

    def written(self, module: str, source: str, line: str) -> Origin | None:
        """Return the operator of the forward whose backward called ``source`` at a place; ``None``
        where that is not known.
        """
        forward = {call.node: call.origin for call in self._calls if call.node > 0}
        for call in self._calls:
            own = call.origin
            if call.node < 0 and (own.operator, own.line) == (source, line):
                found = forward.get(-call.node)
                if found is not None and fold(own.module)[0] == module and found.line == line:
                    return found
        return None

    def zeroed_gradients(self) -> Origin | None:
        """Return where gradients were set to zero, and so kept."""
        allocations = self._timeline.allocations
        for call in self._calls:
            if call.origin.operator.partition(".")[0] in _ZERO:
                kinds = (allocations[one - 1].kind for one in call.reads if one > 0)
                if Kind.GRADIENT in kinds:
                    return call.origin
        return None

    def places(self, operator: str) -> Iterator[Origin]:
        """Yield where an operator was called, outside of the backward."""
        return (call.origin for call in self._calls if call.origin.operator == operator)


def _is_of_type(one: Allocation, other: Allocation) -> bool:
    return one.dtype == other.dtype and one.kind not in _STANDING


NOTHING_RAN = Provenance(Timeline())
