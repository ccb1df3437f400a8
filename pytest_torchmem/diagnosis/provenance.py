"""Where the tensors of a step come from: the calls that made them, and what those read."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from math import prod

from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.operator_calls import OperatorCall
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline

_ZERO = ("aten::zero_", "aten::_foreach_zero_")
_MOST_ANCESTORS, _MOST_CALLS = 200, 20
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
        self._makers: dict[str, set[str]] = {}

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

    def reads(self, index: int) -> list[int]:
        """Return the indices of what the call read that made an allocation."""
        call = self._made_by.get(index)
        return [one - 1 for one in call.reads if one > 0] if call is not None else []

    def caller(self, one: Allocation) -> str:
        """Return the operator that was called when an allocation was made: one that calls others
        has made what these allocate. "" where that is not known.
        """
        found = self._timeline.allocations
        return next((c.origin.operator for i, c in self._made_by.items() if found[i] is one), "")

    def allocation(self, index: int) -> Allocation:
        """Return an allocation by its index."""
        return self._timeline.allocations[index]

    def makers_before(self, operator: str, last: Collection[str]) -> set[str]:
        """Return the modules that made what the first calls of an operator were computed of, but
        for what is beyond the modules of the patterns ``last``.
        """
        if operator not in self._makers:
            found = self._timeline.allocations
            made = (one for one in self._made_by if found[one].origin.operator == operator)
            paths = (
                fold(found[one].origin.module)[0]
                for index in islice(made, _MOST_CALLS)
                for one in self.ancestors(index, last)
            )
            self._makers[operator] = {path for path in paths if path}
        return self._makers[operator]

    def ancestors(self, index: int, last: Collection[str] = ()) -> Iterator[int]:
        """Yield the allocations that one was computed of, the nearest ones first; beyond what
        modules of the patterns ``last`` made is not looked.
        """
        waiting, seen = deque([index]), {index}
        while waiting and len(seen) < _MOST_ANCESTORS:
            call = self._made_by.get(waiting.popleft())
            for read in call.reads if call is not None else ():
                if read > 0 and read - 1 not in seen:
                    seen.add(read - 1)
                    made = self._timeline.allocations[read - 1].origin
                    if not last or fold(made.module)[0] not in last:
                        waiting.append(read - 1)
                    yield read - 1

    def kinds_before(self, index: int, ends: Collection[Kind]) -> set[Kind]:
        """Return which of some kinds of tensors an allocation was computed of, and ``OTHER`` where
        there was something else; beyond those of the kinds, and single numbers, is not looked.
        """
        waiting, seen, found = deque([index]), {index}, set()
        while waiting and len(seen) < _MOST_ANCESTORS:
            call = self._made_by.get(waiting.popleft())
            if call is None or not call.reads:
                found.add(Kind.OTHER)
            for read in call.reads if call is not None else ():
                one = self._timeline.allocations[read - 1]
                if read <= 0 or read - 1 in seen or prod(one.shape) == 1:
                    continue
                seen.add(read - 1)
                if one.kind in ends:
                    found.add(one.kind)
                else:
                    waiting.append(read - 1)
        return found

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

        Goes up from operator to operator as long as these are given as many numbers of that type or
        more, as those that select some are,
        and then by what made narrower numbers this type: a constant, a mask.
        """
        allocations = self._timeline.allocations
        own = allocations[index]
        seen = {index}
        while (call := self._made_by.get(index)) is not None:
            same = [one - 1 for one in call.reads if one > 0 and one - 1 not in seen]
            same = [one for one in same if _is_of_type(allocations[one], own)]
            like = [one for one in same if prod(allocations[one].shape) >= prod(own.shape)]
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

    def first_made(self, tensor: tuple[str, tuple[int, ...]]) -> Origin | None:
        """Return who made the first tensor of a type and a shape, and no parameter."""
        made = (one for one in self._timeline.allocations if one.kind not in _STANDING)
        return next((one.origin for one in made if tensor == (one.dtype, one.shape)), None)

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

    def given_as(self, place: int, operators: Collection[str]) -> Iterator[int]:
        """Yield what operators read in one place of their arguments, outside of the backward."""
        for call in self._calls:
            if call.origin.phase is not Phase.FORWARD or call.origin.operator not in operators:
                continue
            if len(call.reads) > place and call.reads[place] > 0:
                yield call.reads[place] - 1

    def read_in(self, module: str, stars: Sequence[Collection[int]] = ()) -> Iterator[Allocation]:
        """Yield what the calls in a module, a pattern, read outside of the backward: in the modules
        of the numbers that ``stars`` has, where it has any.
        """
        allocations = self._timeline.allocations
        for call in self._calls:
            if call.origin.phase is not Phase.FORWARD:
                continue
            pattern, numbers = fold(call.origin.module)
            wanted = zip(numbers, stars, strict=False)
            if pattern == module and all(one in star or not star for one, star in wanted):
                yield from (allocations[one - 1] for one in call.reads if one > 0)

    def reader_of(self, index: int) -> Origin | None:
        """Return the first operator that reads an allocation, outside of the backward."""
        forward = (call for call in self._calls if call.origin.phase is Phase.FORWARD)
        return next((call.origin for call in forward if index + 1 in call.reads), None)

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
