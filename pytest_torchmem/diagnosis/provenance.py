"""Where the tensors of a step come from: the calls that made them, and what those read."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from math import prod

from pytest_torchmem.profile.module_paths import Numbers, fold, write_numbers
from pytest_torchmem.profile.timeline import Allocation, Kind, OperatorCall, Origin, Phase, Timeline
from pytest_torchmem.snapshots.alive import Group, What

_ZERO = ("aten::zero_", "aten::_foreach_zero_")
_MOST_ANCESTORS, _MOST_CALLS = 200, 20
STANDING = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT)
DOUBLE = ("float64", "complex128")


class Provenance:
    """The operators that a step ran, asked about what they made."""

    def __init__(
        self,
        timeline: Timeline,
        calls: Sequence[OperatorCall] = (),
        broadcasts: Mapping[Origin, str] | None = None,
        functions: Iterable[tuple[Origin, str]] = (),
        on_host: Timeline | None = None,
    ) -> None:
        self._on_host = on_host.allocations if on_host is not None else ()
        self._functions = functions
        self._events, self._allocations, self._calls = timeline.events, timeline.allocations, calls
        self.broadcasts: Mapping[Origin, str] = broadcasts or {}
        self._makers: dict[str, set[str]] = {}

    @cached_property
    def _forward(self) -> list[OperatorCall]:
        return [call for call in self._calls if call.origin.phase is Phase.FORWARD]

    @cached_property
    def _made_by(self) -> dict[int, OperatorCall]:
        """By the index of the allocation."""
        return {index: call for call in self._calls for index in self._indices(call)}

    def _indices(self, call: OperatorCall) -> Iterator[int]:
        """Yield the indices of what a call made."""
        return (event - 1 for event in self._events[call.start : call.stop] if event > 0)

    def allocation(self, index: int) -> Allocation:
        """Return an allocation by its index."""
        return self._allocations[index]

    def reads(self, index: int) -> list[int]:
        """Return the indices of what the call read that made an allocation."""
        call = self._made_by.get(index)
        return _read(call) if call is not None else []

    def read(self, index: int) -> list[Allocation]:
        """Return what the call read that made an allocation, in the order of its arguments."""
        return [self._allocations[one] for one in self.reads(index)]

    def caller(self, one: Allocation) -> str:
        """Return the called operator whose body made an allocation, "" where it is not known."""
        call = self._made_by.get(self.index(one))
        return call.origin.operator if call is not None else ""

    def index(self, one: Allocation) -> int:
        """Return the index of what a call made, -1 for anything else."""
        return next((index for index in self._made_by if self._allocations[index] is one), -1)

    def makers_before(self, operator: str, last: Collection[str]) -> set[str]:
        """Return the modules that made inputs of an operator's first calls, back to ``last``."""
        if operator not in self._makers:
            origins = {index: self._allocations[index].origin for index in self._made_by}
            made = (index for index, origin in origins.items() if origin.operator == operator)
            paths = (
                fold(self._allocations[one].origin.module)[0]
                for index in islice(made, _MOST_CALLS)
                for one in self.ancestors(index, last)
            )
            self._makers[operator] = {path for path in paths if path}
        return self._makers[operator]

    def ancestors(self, index: int, last: Collection[str] = ()) -> Iterator[int]:
        """Yield the allocations that one was computed of, nearest first, back to ``last``."""
        waiting, seen = deque([index]), {index}
        while waiting and len(seen) < _MOST_ANCESTORS:
            for read in self.reads(waiting.popleft()):
                if read not in seen:
                    seen.add(read)
                    if not last or fold(self._allocations[read].origin.module)[0] not in last:
                        waiting.append(read)
                    yield read

    def original_of(self, index: int, copies: Collection[str]) -> Allocation | None:
        """Return the tensor that copies by operators of ``copies`` go back to, if it is known."""
        seen, found = {index}, None
        while reads := self.reads(index):
            operator = self._allocations[index].origin.operator.partition(".")[0]
            if operator not in copies or reads[0] in seen:
                break
            index = reads[0]
            seen.add(index)
            found = self._allocations[index]
            if found.kind in STANDING:
                break
        return found

    def first_of_type(self, index: int, *, as_many: bool = False) -> int:
        """Return the index from where on values are of the type of an allocation.

        Goes up from operator to operator as long as these are given numbers of that type, as many
        rather than fewer, or only ``as_many``: a constant or a mask, too, made narrower numbers
        this type. Complex ones in double precision are of real ones in it.
        """
        found = self._allocations
        own, seen = found[index], {index}
        types = DOUBLE if own.dtype in DOUBLE else (own.dtype,)
        while reads := self.reads(index):
            new = [one for one in reads if one not in seen and found[one].kind not in STANDING]
            same = [one for one in new if found[one].dtype in types]
            like = [one for one in same if prod(found[one].shape) >= prod(own.shape)]
            if not like and (as_many or not same):
                break
            index = (like or same)[0]
            seen.add(index)
        return index

    def made(
        self, places: Collection[tuple[str, str, str, tuple[int, ...]]], dtype: str
    ) -> Allocation | None:
        """Return the first tensor of a type at places: module, operator, line and shape."""
        for one in self._allocations:
            own = (fold(one.origin.module)[0], one.origin.operator, one.origin.line, one.shape)
            if one.dtype == dtype and own in places:
                return one
        return None

    def first_made(self, tensor: tuple[str, tuple[int, ...]]) -> int:
        """Return the index of the first tensor of a type and a shape, and no parameter, or -1."""
        made = ((i, one) for i, one in enumerate(self._allocations) if one.kind not in STANDING)
        return next((index for index, one in made if (one.dtype, one.shape) == tensor), -1)

    def first_double_on_host(self, copy: Allocation) -> Origin | None:
        """Return who made on the host what a tensor is a copy of, or a view of it, if in double
        precision.
        """
        size, made = prod(copy.shape), (one for one in self._on_host if one.dtype in DOUBLE)
        same = (one.origin for one in made if prod(one.shape) == size and one.origin.line)
        return next(same, None) if copy.origin.operator == "aten::_to_copy" else None

    def first_with(self, size: int) -> Allocation | None:
        """Return the first tensor that has a size which nothing had that its operator read."""
        for index, one in enumerate(self._allocations):
            is_made = index in self._made_by and one.kind not in STANDING
            if size in one.shape and one.dtype and is_made:
                read = not any(size in other.shape for other in self.read(index))
                return one if read and one.origin.line else None
        return None

    def largest(self, operator: str) -> Allocation | None:
        """Return the largest tensor that an operator made, in the forward if it ran there."""
        own = [call for call in self._calls if call.origin.operator == operator]
        forward = [call for call in own if call.origin.phase is Phase.FORWARD]
        indices = (index for call in forward or own for index in self._indices(call))
        tensors = (one for one in map(self.allocation, indices) if one.dtype)
        return max(tensors, key=lambda one: one.nbytes, default=None)

    def given_as(self, place: int, operators: Collection[str]) -> Iterator[int]:
        """Yield what operators read in one place of their arguments, outside of the backward."""
        for call in self._forward:
            if call.origin.operator in operators and len(call.reads) > place:
                yield call.reads[place] - 1

    def read_in(self, module: str, stars: Sequence[Collection[int]] = ()) -> Iterator[int]:
        """Yield the inputs of a pattern's modules in the forward, of those numbers in ``stars``."""
        for call in self._forward:
            pattern, numbers = fold(call.origin.module)
            wanted = zip(numbers, stars, strict=False)
            if pattern == module and all(one in star or not star for one, star in wanted):
                yield from _read(call)

    def readers(self, index: int) -> list[Origin]:
        """Return the operators of the forward that read an allocation, in their order."""
        return [call.origin for call in self._forward if index + 1 in call.reads]

    def read_at(self, index: int) -> int:
        """Return the first allocation made of another one, -1 where nothing reads that."""
        made = (at for at, call in self._made_by.items() if index + 1 in call.reads)
        return min(made, default=-1)

    def given_to(self, pattern: str) -> set[tuple[str, str, str, tuple[int, ...]]]:
        """Return a module's inputs: by module, operator, type and shape of what made them."""
        start = f"{pattern}."
        inside = (one for one in self._given if one == pattern or one.startswith(start))
        return set().union(*(self._given[one] for one in inside))

    @cached_property
    def _given(self) -> dict[str, set[tuple[str, str, str, tuple[int, ...]]]]:
        """By the pattern of the module that read it."""
        found: dict[str, set[tuple[str, str, str, tuple[int, ...]]]] = {}
        for call in self._forward:
            if call.origin.module:
                own = found.setdefault(fold(call.origin.module)[0], set())
                for one in map(self.allocation, _read(call)):
                    made = one.origin
                    own.add((fold(made.module)[0], made.operator, one.dtype, one.shape))
        return found

    @cached_property
    def _recorded(self) -> dict[int, Origin]:
        """The operators that autograd recorded, by their nodes."""
        return {call.node: call.origin for call in self._calls if call.node > 0}

    def saver(self, index: int) -> Origin | None:
        """Return the only operator of the forward whose backward reads an allocation, if any."""
        nodes = {-call.node for call in self._calls if call.node < 0 and index + 1 in call.reads}
        found = {self._recorded[node] for node in nodes if node in self._recorded}
        return found.pop() if len(found) == 1 else None

    def written(self, module: str, source: str, line: str) -> Origin | None:
        """Return the forward operator whose backward called ``source`` at a place, if known."""
        for call in self._calls:
            own = call.origin
            if call.node < 0 and (own.operator, own.line) == (source, line):
                found = self._recorded.get(-call.node)
                if found is not None and fold(found.module)[0] == module and found.line == line:
                    return found
        return None

    def zeroed_gradients(self) -> Origin | None:
        """Return where gradients were set to zero, and so kept."""
        zero = (one for one in self._calls if one.origin.operator.partition(".")[0] in _ZERO)
        kinds = ((call, {self._allocations[one].kind for one in _read(call)}) for call in zero)
        return next((call.origin for call, read in kinds if Kind.GRADIENT in read), None)

    def places_of(self, operators: Iterable[str]) -> set[tuple[str, str]]:
        """Return where operators were called, by the patterns of modules, and lines."""
        origins = (one for name in operators for one in self.places(name) if one.line)
        return {(fold(one.module)[0], one.line) for one in origins}

    def groups_of(self, operators: Iterable[str]) -> list[Group]:
        """Return the calls of operators as groups of which nothing is alive."""
        found: dict[What, set[Numbers]] = {}
        for origin in (one for name in operators for one in self.places(name)):
            path, numbers = fold(origin.module)
            what = What("", path, origin.operator, "", (), origin.line, 0)
            found.setdefault(what, set()).add(numbers)
        return [Group(what, {}, write_numbers(own)) for what, own in found.items()]

    def called_as(self, *names: str) -> list[Origin]:
        """Return where the source calls functions of these names, as operators, one a line."""
        found: dict[str, Origin] = {}
        for origin, name in self._functions:
            if name.rpartition(".")[2] in names:
                found.setdefault(origin.line, origin._replace(operator=name.lstrip(".")))
        return [*found.values()]

    def places(self, operator: str) -> Iterator[Origin]:
        """Yield where an operator was called."""
        return (call.origin for call in self._calls if call.origin.operator == operator)


def _read(call: OperatorCall) -> list[int]:
    """Return the indices of what a call read, in the order of its arguments."""
    return [one - 1 for one in call.reads if one > 0]


NOTHING_RAN = Provenance(Timeline())
