"""The events of one device in order: allocations with their origin, frees, phases, operators.

What an allocation is to the step by how long it lives is read from the order of events: what a
forward makes and the backward frees was saved for it; what outlives the backward is held by the
program.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from itertools import accumulate, chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol


class Phase(str, Enum):
    """Where a program is in its training step; found from what runs, never declared."""

    __hash__ = str.__hash__  # that of ``Enum`` is a function of Python, and asked for each operator

    BASELINE = "baseline"
    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN = "between"
    OPTIMIZER = "optimizer"


class Kind(str, Enum):
    """What an allocation is to the training step."""

    __hash__ = str.__hash__

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    UNSHARDED = "all-gathered parameter"
    """A whole parameter, of which each process of ``fully_shard`` has a part."""
    COMMUNICATION = "communication buffer"
    """What is sent to other processes together, or received from them."""
    WORKSPACE = "workspace"
    OTHER = "other"


class Confidence(str, Enum):
    """How sure the bytes of an allocation are; from the most certain to the least."""

    EXACT = "exact"
    """Computed as the source of the kernel computes them."""
    CALIBRATED = "calibrated"
    """Measured on the GPU that is named, for this operator and geometry."""
    LIBRARY = "library"
    """Told by the library that takes them, for the GPU that is named: as exact as the library."""
    BOUNDED = "bounded"
    """At most these."""
    UNKNOWN = "unknown"
    """At least these: the kernel takes more, and how much is not known. Or an estimate: oneDNN's
    workspaces on a CPU, and those of recurrent layers on a GPU, that they were not checked on.
    """


class Origin(NamedTuple):
    """What made an allocation: module path, operator and source line, each "" where unknown."""

    phase: Phase
    module: str = ""
    operator: str = ""
    line: str = ""
    recomputed: bool = False
    """Whether a checkpoint computes its forward again in a backward."""


class Allocation(NamedTuple):
    """One storage, or one kernel's workspace, of ``nbytes`` bytes."""

    nbytes: int
    kind: Kind
    origin: Origin
    shape: tuple[int, ...] = ()
    dtype: str = ""
    label: str = ""
    """The name of a parameter, buffer or input, or of a library whose workspace stays."""
    confidence: Confidence = Confidence.EXACT
    """How sure the bytes are; only what a library decides on can be less than exact."""

    @property
    def tensor(self) -> str:
        """Type and shape, "" for what is no tensor."""
        return f"{self.dtype}{list(self.shape)}" if self.dtype else ""


class Timeline(NamedTuple):
    """Every allocation of one device in order.

    ``events`` holds ``index + 1`` where ``allocations[index]`` was made and ``-(index + 1)`` where
    it was freed. ``phases`` holds ``(position in events, phase)`` for every change of phase, in
    order; the first begins at 0. A forward follows another where a step without backward begins.
    ``module_calls`` holds the positions of the calls of one module: the one that the program itself
    called most often, if it did so repeatedly.
    """

    allocations: tuple[Allocation, ...] = ()
    events: tuple[int, ...] = ()
    phases: tuple[tuple[int, Phase], ...] = ()
    module_calls: tuple[int, ...] = ()

    def peaks(self) -> dict[Phase, tuple[int, int]]:
        """Return for each phase that ran its peak in bytes and the events' count when reached.

        What is live when a phase begins counts for that phase.
        """
        peaks: dict[Phase, tuple[int, int]] = {}
        for phase, peak, _ in self.course():
            if phase not in peaks or peak[0] > peaks[phase][0]:
                peaks[phase] = peak
        return peaks

    def peak(self, phase: Phase | None = None) -> tuple[int, int]:
        """Return the peak of a phase, by default the highest; ``(0, 0)`` where it did not run."""
        peaks = self.peaks()
        if phase is not None:
            return peaks.get(phase, (0, 0))
        return max(peaks.values(), default=(0, 0), key=itemgetter(0))

    def course(self) -> Iterator[tuple[Phase, tuple[int, int], int]]:
        """Yield the phase, the peak and the bytes at the end of each of ``spans()``."""
        live = self.live()
        for start, stop, phase in self.spans():
            part = live[start : stop + 1]
            highest = max(part)
            yield phase, (highest, start + part.index(highest)), live[stop]

    def changes(self) -> array[int]:
        """Return the bytes that each event changes what is live by, with the event as index.

        That of what is freed is negative, and so are its bytes.
        """
        sizes = [allocation.nbytes for allocation in self.allocations]
        return array("q", [0, *sizes, *[-nbytes for nbytes in reversed(sizes)]])

    def live_at(self, position: int) -> list[Allocation]:
        """Return what was alive after the first ``position`` events, largest first."""
        return sorted(self.live_in_order(position), key=lambda allocation: -allocation.nbytes)

    def live_in_order(self, position: int) -> list[Allocation]:
        """Return what was alive after the first ``position`` events, in the order of making."""
        return [self.allocations[index] for index in self.live_indices([position])[position]]

    def live_indices(self, positions: Collection[int]) -> dict[int, list[int]]:
        """Return which allocations are alive after so many events each, in the order of making."""
        live: dict[int, None] = {}
        found: dict[int, list[int]] = {}
        at = 0
        for position in sorted(set(positions)):
            for event in self.events[at:position]:
                if event > 0:
                    live[event - 1] = None
                else:
                    live.pop(-event - 1, None)
            at = position
            found[position] = list(live)
        return found

    def live_bytes(self) -> list[int]:
        """Return the bytes live after each event."""
        return [*self.live()[1:]]

    def live(self) -> array[int]:
        """Return the bytes live before the first event, which are none, and after each."""
        changes = map(self.changes().__getitem__, self.events)
        return array("q", accumulate(changes, initial=0))

    def spans(self) -> Iterator[tuple[int, int, Phase]]:
        """Yield where among the events each time in a phase starts and stops."""
        if not self.phases:
            return
        starts = [start for start, _ in self.phases[1:]] + [len(self.events)]
        for (start, phase), stop in zip(self.phases, starts, strict=True):
            yield start, stop, phase

    def steps(self) -> list[int]:
        """Return for each of ``spans()`` the number of its step, from 0.

        A step begins with a forward that is not the first, after a backward or another forward.
        """
        steps: list[int] = []
        step, ran, last = 0, False, None
        for _, _, phase in self.spans():
            if phase is Phase.BACKWARD:
                ran = True
            elif phase is Phase.FORWARD and (ran or last is Phase.FORWARD):
                step, ran = step + 1, False
            steps.append(step)
            last = phase
        return steps


AllocationKey = Callable[[Allocation], str]
"""Says what an allocation is counted with."""


def totals_by(allocations: Iterable[Allocation], key: AllocationKey) -> dict[str, int]:
    """Return the bytes of allocations by what ``key`` says of them, largest first."""
    totals: dict[str, int] = {}
    for allocation in allocations:
        name = key(allocation)
        totals[name] = totals.get(name, 0) + allocation.nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


class Role(str, Enum):
    """What an allocation is to the step, in the words of reports."""

    __hash__ = str.__hash__

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    SAVED = "saved for backward"
    """Made in the forward and freed by the backward."""
    ACTIVATION = "activation"
    """Made in the forward and freed in it."""
    HELD = "held by the program"
    """Made in the forward and not freed by the backward."""
    EARLIER = "from an earlier step"
    """Made in the forward of a step, and still alive in a later one."""
    RECOMPUTED = "recomputed"
    """Made in the backward by a checkpoint."""
    GRADIENT = "gradient"
    """Made in the backward and not freed in it, as those of parameters."""
    GRADIENT_TEMPORARY = "temporary gradient"
    """Made in the backward and freed in it."""
    OPTIMIZER_STATE = "optimizer state"
    OPTIMIZER_TEMPORARY = "optimizer temporary"
    """Made in an optimizer's step and freed in it."""
    WORKSPACE = "workspace"
    LIBRARY = "library buffer"
    """A library's workspace that stays, such as that of cuBLAS."""
    OTHER = "other"


_SAME = (Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.WORKSPACE)
_BY_KIND = {kind: Role(kind.value) for kind in _SAME}


class Lifetimes(NamedTuple):
    """When the allocations of a timeline were made and freed, as places in its ``spans()``."""

    phases: tuple[Phase, ...]
    """The phase of each span."""
    steps: tuple[int, ...]
    """The step of each span."""
    made: tuple[int, ...]
    """By the allocation's index; -1 for what was never made."""
    freed: tuple[int, ...]
    """-1 for what is alive at the end."""

    @classmethod
    def of(cls, timeline: Timeline) -> Lifetimes:
        """Return the lifetimes of a timeline's allocations."""
        count = len(timeline.allocations)
        made, freed = [-1] * count, [-1] * count
        phases: list[Phase] = []
        events = timeline.events
        for place, (start, stop, phase) in enumerate(timeline.spans()):
            phases.append(phase)
            for event in events[start:stop]:
                if event > 0:
                    made[event - 1] = place
                else:
                    freed[-event - 1] = place
        return cls(tuple(phases), tuple(timeline.steps()), tuple(made), tuple(freed))

    def role(self, index: int, allocation: Allocation, step: int | None = None) -> Role:
        """Return what the allocation of an ``index`` is to the step, seen from ``step``."""
        kind = allocation.kind
        if kind is Kind.WORKSPACE and allocation.label:
            return Role.LIBRARY
        known = _BY_KIND.get(kind)
        made, freed = self.made[index], self.freed[index]
        if known is not None or made < 0:
            return known or Role.OTHER
        then = self.phases[made]
        if kind is Kind.OPTIMIZER_STATE and then is not Phase.OPTIMIZER:  # it was loaded
            return Role.OPTIMIZER_STATE
        end = self.phases[freed] if freed >= 0 else None
        if then is Phase.BACKWARD and allocation.origin.recomputed:
            return Role.RECOMPUTED
        if then is Phase.FORWARD:
            if step is not None and self.steps[made] < step:
                return Role.EARLIER
            if end is Phase.FORWARD and self.steps[freed] == self.steps[made]:
                return Role.ACTIVATION
            return Role.SAVED if end is Phase.BACKWARD else Role.HELD
        if then is Phase.BACKWARD:
            return Role.GRADIENT_TEMPORARY if freed == made else Role.GRADIENT
        if then is Phase.OPTIMIZER:
            return Role.OPTIMIZER_TEMPORARY if freed == made else Role.OPTIMIZER_STATE
        return Role.OTHER

    def step_at(self, timeline: Timeline, position: int) -> int:
        """Return the step that the event before ``position`` belongs to."""
        for place, (start, stop, _) in enumerate(timeline.spans()):
            if start < position <= stop or (position == 0 and place == 0):
                return self.steps[place]
        return self.steps[-1] if self.steps else 0


GRAPH_NODE: ContextVar[str] = ContextVar("graph node", default="")
"""The node of a graph whose operators run, where a graph is run node by node."""


class Work(Protocol):
    """What one call of an operator has a device do."""

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition as two."""

    @property
    def read(self) -> int:
        """Bytes of the arguments that the kernel reads, each once."""

    @property
    def written(self) -> int:
        """Bytes of what the kernel returns or writes to, each once."""


class KnownWork(NamedTuple):
    flops: int = 0
    read: int = 0
    written: int = 0


class OperatorCall(NamedTuple):
    """One call of an operator, with what its body called."""

    start: int
    """How many events there were when it began."""
    stop: int
    """And when it returned."""
    origin: Origin
    node: int
    """Of a call that autograd recorded: one more than the sequence number of its node. Of a call
    that the autograd engine's node made: minus one more than that node's sequence number. 0 for
    any other."""
    node_name: str
    """The name of the autograd node that made the call, where no recorded call has its number."""
    reads: tuple[int, ...]
    """Its arguments' allocations, as events number them (index + 1), in order."""
    work: Work
    label: str = ""
    """The node of a graph that the call belongs to, where one is run node by node."""


class OperatorStep(NamedTuple):
    """One call of an operator, or what happened before the next one; figures are bytes."""

    origin: Origin
    call: OperatorCall | None
    """``None`` for what happened outside of operators."""
    made: tuple[int, ...]
    """The allocations that it left alive, as events number them (index + 1)."""
    temporary: int
    """What it held at its peak beyond what was alive when it returned."""
    peak: int
    """The most that was alive on the device while it ran."""


def operator_steps(timeline: Timeline, calls: Sequence[OperatorCall]) -> Iterator[OperatorStep]:
    """Yield the calls in order, and between them the events that belong to none.

    What is alive when a phase begins counts for its first step: the highest ``peak`` of a phase's
    steps is the phase's own. Where all that happens between two of them is that storages are freed,
    there is no step: nothing is needed for it.
    """
    events, live = timeline.events, timeline.live()
    starts = iter(timeline.phases)
    begins, coming = next(starts, _NEVER)
    position, last = 0, None
    """How many events have happened, and the phase of the last step."""
    outside: Origin | None = None
    """That of what belongs to no operator."""

    def step(stop: int, origin: Origin, call: OperatorCall | None = None) -> OperatorStep:
        nonlocal position, last
        stop = max(stop, position)
        made, peak = events[position:stop], live[stop]
        if made and min(made) < 0:
            peak = max(live[position : stop + 1])
            freed = {-event for event in made if event < 0}
            made = tuple([event for event in made if event > 0 and event not in freed])
        position, last = stop, origin.phase
        return OperatorStep(origin, call, made, peak - live[stop], peak)

    for call in chain(calls, (None,)):
        stop = len(events) if call is None else call.start
        while begins <= stop and coming is not None:
            if outside is not None and begins > position:
                yield step(begins, outside)
            begun, outside = begins >= position, Origin(coming)
            begins, coming = next(starts, _NEVER)
            if begun:
                yield step(position, outside)
        if stop > position and outside is not None:
            if last is outside.phase and max(events[position:stop]) < 0:
                position = stop
            else:
                yield step(stop, outside)
        if call is not None:
            yield step(call.stop, call.origin, call)


_NEVER: tuple[int, Phase | None] = sys.maxsize, None
"""When no other phase begins."""


class Later(NamedTuple):
    """What a field is computed by when it is first read."""

    compute: Callable[[], Any]


class ComputedLater:
    """The base of a frozen dataclass with slots, some of whose fields may be ``Later``.

    It needs a field ``_later`` with an empty dictionary, and calls ``_put_off`` in its
    ``__post_init__``. Copies and pickles have the values.
    """

    __slots__ = ()
    if TYPE_CHECKING:
        _later: dict[str, Later]
    else:

        def __getattr__(self, name: str) -> Any:
            # Python asks here for a field that has no value.
            later = self._later.get(name) if name != "_later" else None
            if later is not None:
                object.__setattr__(self, name, later.compute())
                self._later.pop(name, None)  # another thread may have computed it as well
                return getattr(self, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _put_off(self, *names: str) -> None:
        """Take the value of each field of ``names`` that is ``Later`` off it, until it is read."""
        for name in names:
            if type(found := getattr(self, name)) is Later:
                self._later[name] = found
                object.__delattr__(self, name)


@contextmanager
def without_collections() -> Iterator[None]:
    """Have no garbage collected in between.

    While millions of objects are made, and kept, the collector goes through all of them again and
    again (Modules/gcmodule.c, ``gc_collect_generations``): most of the time of a large report.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def equal_parts(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yield where equal parts of a stretch start and stop."""
    length = stop - start
    for number in range(parts):
        yield start + number * length // parts, start + (number + 1) * length // parts


def phases(timeline: Timeline) -> list[tuple[int, int, Phase]]:
    """Return where each time in a phase starts and stops, without those in which nothing was."""
    return [span for span in timeline.spans() if span[1] > span[0]]
