"""From an allocator's events or history to a timeline with phases and names of storages.

Those of the real CPU allocator are what torch.profiler records, without the events of others.

The profiler writes down what recorded threads do. The total that c10 reports beside each event is
the process's (``all_threads_counted``): what any thread takes is added to it, and what it releases
is subtracted.

Dynamo records what it does as ranges of the profiler that end in ``(dynamo_timed)``
(torch/_dynamo/utils.py, ``dynamo_timed``). In there it keeps the states of random generators (5,056
bytes each), tries patterns on tensors, and folds constants. What outlives a compilation, such as
the state of an optimizer, is the program's. A program that calls AOTAutograd itself, without
``torch.compile``, has that in its step.

c10's ``ProfiledCPUMemoryReporter`` (c10/core/CPUAllocator.cpp) reports every request and every
release of the thread that records, with the requested bytes, unrounded (``with_other_threads``
adds what others do). oneDNN takes its buffers from the same allocator
(aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), so they are among the events. A block allocated
before the recording began is not known to the reporter, and its release is not reported; whatever
belongs to a step must therefore be allocated inside the recording.
"""

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.nn.parameter import is_lazy

from pytest_torchmem.errors import UsageError
from pytest_torchmem.journal.journal import variables
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline
from pytest_torchmem.step.step import StepPhases, engine_runs, outermost_module_calls
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private import devices
from pytest_torchmem.torch_private.tensors import is_wrapper, wrapped_tensors

_CANDIDATES, _SUMS = 64, 4096
"""How many blocks, and how many sums of their sizes, are tried."""
_ELSEWHERE = "another thread"


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One request (``nbytes`` above 0) or release (below 0) of the block at ``pointer``."""

    time: int
    nbytes: int
    pointer: int
    path: tuple[str, ...]
    """The recorded functions it happened in, outermost first."""
    total: int
    """The bytes that the process has after it, by what c10 counted."""

    @property
    def maps_file(self) -> bool:
        """Whether it is a file that is mapped, which c10 reports without a total and does not count
        (``MapAllocator::initializeAlloc``, aten/src/ATen/MapAllocator.cpp).
        """
        return self.nbytes > 0 and self.total == 0


def with_other_threads(events: Sequence[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events in order of time, and before each what other threads did since the last.

    Which blocks these released is told by their sizes. Of several that it may be, the newest is
    taken. What they took and released between two events is not there, nor what was seen in the
    course of one operator alone: each worker of a kernel may take memory of its own, and whether
    two of them have it at once is chance (``dsum`` in ``cpu_flash_attention_backward``,
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
    """
    if not events:
        return []
    unreleased, unrequested, reusing = _unmatched(events)
    counted = next((event for event in events if not event.maps_file), events[0])
    others = _OtherThreads({}, counted.total - counted.nbytes, events[0].time)
    mapped: set[int] = set()
    result: list[MemoryEvent] = []
    for index, event in enumerate(events):
        unmaps = event.total == 0 != others.total + event.nbytes and index in unrequested
        if event.maps_file or event.pointer in mapped or unmaps:
            mapped ^= {event.pointer}
            result.append(event)
            continue
        result += others.before(event, index in reusing)
        result.append(others.released(event) if index in unrequested else event)
        if index in unreleased:
            others.live[event.pointer] = event
    return _without_workers(result)


def _without_workers(events: Sequence[MemoryEvent]) -> list[MemoryEvent]:
    """Leave out what other threads had in the course of one operator alone."""

    def within_operator(begin: int, end: int) -> bool:
        if events[begin].path != (_ELSEWHERE,):
            return False
        # The event before says that the operator was under way when the block was taken.
        recorded = [one.path for one in events[max(begin - 1, 0) : end]]
        operators = {_operator_of(path) for path in recorded if path != (_ELSEWHERE,)}
        return len(operators) == 1 and () not in operators

    return _without_blocks(events, within_operator)


def _without_blocks(
    events: Sequence[MemoryEvent], are_left_out: Callable[[int, int], bool]
) -> list[MemoryEvent]:
    """Leave out blocks for whose request and release, by their indices, ``are_left_out`` is so."""
    left_out: set[int] = set()
    taken: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.nbytes > 0:
            taken[event.pointer] = index
        elif event.pointer in taken:
            begin = taken.pop(event.pointer)
            if are_left_out(begin, index):
                left_out |= {begin, index}
    return [event for index, event in enumerate(events) if index not in left_out]


def _operator_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the outermost operator that an event happened in, with what calls it."""
    names = (index for index, name in enumerate(path, start=1) if name.startswith("aten::"))
    return path[: next(names, 0)] or path


def _unmatched(events: Sequence[MemoryEvent]) -> tuple[set[int], set[int], set[int]]:
    """Return which events, by their index, have no counterpart at their address: requests without
    a release, releases without a request, and requests that get the address of one without a
    release.
    """
    unreleased, unrequested, reusing = set[int](), set[int](), set[int]()
    live: dict[int, int] = {}
    for index, event in enumerate(events):
        before = live.pop(event.pointer, None)
        if event.nbytes < 0:
            if before is None:
                unrequested.add(index)
            continue
        live[event.pointer] = index
        if before is not None:
            unreleased.add(before)
            reusing.add(index)
    return unreleased.union(live.values()), unrequested, reusing


@dataclass(slots=True)
class _OtherThreads:
    live: dict[int, MemoryEvent]
    """What has no recorded release, by address; what they took has addresses below 0."""
    total: int
    """The bytes that the process has, by the events that are known."""
    time: int
    """That of the last event: what was released since counts as released at once."""
    unexplained: int = 0
    acted: bool = False

    def before(self, event: MemoryEvent, reuses: bool) -> list[MemoryEvent]:
        """Return what they did between the last event and this one."""
        gone = [self.live.pop(event.pointer)] if reuses and event.pointer in self.live else []
        missing = self.total + event.nbytes - event.total - sum(block.nbytes for block in gone)
        taken: list[MemoryEvent] = []
        if missing > 0 and missing != self.unexplained:
            blocks = _adding_up_to(missing, list(self.live.values())[::-1])
            for block in blocks:
                del self.live[block.pointer]
            gone += blocks
            self.unexplained = 0 if blocks else missing
        elif missing < 0:
            address = min([0, *self.live]) - 1
            taken = [replace(event, nbytes=-missing, pointer=address, path=(_ELSEWHERE,))]
            self.live[address] = taken[0]
        place, total = (_ELSEWHERE,), event.total
        freed = [MemoryEvent(self.time, -one.nbytes, one.pointer, place, total) for one in gone]
        self.time = event.time
        self.total += event.nbytes + sum(one.nbytes for one in [*freed, *taken])
        self.acted = self.acted or bool(freed or taken)
        return [*freed, *taken]

    def released(self, event: MemoryEvent) -> MemoryEvent:
        """Return a release of what another thread took, at the address that it has in the record.

        It may have taken as much as it released in between: then that block seems to live on.
        """
        same = [block for block in self.live.values() if block.nbytes == -event.nbytes]
        if not self.acted or not same:  # from before the recording
            return event
        return replace(event, pointer=self.live.pop(same[-1].pointer).pointer)


def _adding_up_to(nbytes: int, blocks: Sequence[MemoryEvent]) -> list[MemoryEvent]:
    """Return blocks, the first possible ones, that have so many bytes together; [] if none have."""
    sums: dict[int, tuple[MemoryEvent, ...]] = {0: ()}
    for block in [block for block in blocks if block.nbytes <= nbytes][:_CANDIDATES]:
        for total, chosen in tuple(sums.items()):
            if len(sums) < _SUMS and total + block.nbytes <= nbytes:
                sums.setdefault(total + block.nbytes, (*chosen, block))
        if nbytes in sums:
            return list(sums[nbytes])
    return []


_MARK = " (dynamo_timed)"
_AUTOGRAD_ALONE = f"create_aot_dispatcher_function{_MARK}"


def without_compilations(
    events: Sequence[MemoryEvent], spans: Sequence[tuple[int, int]]
) -> list[MemoryEvent]:
    """Return the events without what one compilation both took and released. ``spans`` are the
    times in which something was compiled, beginning and end; they may be nested.
    """
    outermost: list[tuple[int, int]] = []
    for start, stop in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not outermost or start > outermost[-1][1]:
            outermost.append((start, stop))
    starts = [start for start, _ in outermost]

    def in_one_compilation(begin: int, end: int) -> bool:
        first, last = events[begin].time, events[end].time
        span = bisect_right(starts, first) - 1
        return span >= 0 and outermost[span][0] <= last <= outermost[span][1]

    return _without_blocks(events, in_one_compilation)


STEP = "torchmem::step"
ENGINE = "torchmem::engine"
ENGINE_NODE = "autograd::engine::evaluate_function"
MODULE = "torchmem::module"
OPTIMIZER_STEP = "Optimizer.step#"
MARKS = (STEP, ENGINE, ENGINE_NODE, MODULE, OPTIMIZER_STEP)


@dataclass(slots=True)
class Range:
    start: int
    stop: int
    name: str


@dataclass(slots=True)
class Recording:
    """The memory events of the recording thread in order, and the ranges that tell the phases."""

    events: list[MemoryEvent] = field(default_factory=list)
    ranges: list[Range] = field(default_factory=list)


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the allocations of the thread that enters this; they are there afterwards."""
    if devices.profiler_runs():
        raise UsageError("cannot record allocations while another profiler runs: stop it first")
    recorded, profiler = Recording(), profile(profile_memory=True)
    with ExitStack() as stack:
        # Kineto reads its log level once, at a process' first recording, and else logs every one.
        level = os.environ.get("KINETO_LOG_LEVEL", "99")
        stack.enter_context(variables({"KINETO_LOG_LEVEL": level}, all_of_them=False))
        # A run that a C++ extension starts is known by the nodes that the engine evaluates.
        stack.enter_context(engine_runs(lambda: devices.mark(ENGINE)))
        stack.enter_context(outermost_module_calls(lambda: devices.mark(MODULE)))
        stack.enter_context(profiler)
        stack.enter_context(devices.all_threads_counted())
        yield recorded
    results: Any = profiler.kineto_results
    _read(results.experimental_event_tree(), recorded)


def _read(roots: list[Any], recorded: Recording) -> None:
    """Flatten the profiler's event tree; the order of events is that of their time stamps."""
    events, ranges = recorded.events, recorded.ranges
    compilations: list[tuple[int, int]] = []

    pending: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in reversed(roots)]
    while pending:
        node, path = pending.pop()
        if node.tag == devices.EventType.Allocation:
            fields = node.extra_fields
            if fields.device.type == "cpu":
                time, size = node.start_time_ns, fields.alloc_size
                total = fields.total_allocated
                events.append(MemoryEvent(time, size, fields.ptr, path, total))
            continue
        name = node.name
        if name.endswith(_MARK) and name != _AUTOGRAD_ALONE:
            compilations.append((node.start_time_ns, node.end_time_ns))
        if name.startswith(MARKS):
            ranges.append(Range(node.start_time_ns, node.end_time_ns, name))
        inner = (*path, name)
        pending.extend((child, inner) for child in reversed(node.children))
    events.sort(key=lambda event: event.time)
    recorded.events = without_compilations(with_other_threads(events), compilations)
    ranges.sort(key=lambda found: (found.start, -found.stop))


class Label(NamedTuple):
    """What a storage is to the model, in the words of ``Allocation``."""

    kind: Kind
    label: str
    shape: tuple[int, ...]
    dtype: str


def labels_before(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, Label]:
    """Name what a step begins with: parameters, buffers, gradients from before and inputs."""
    labels: dict[int, Label] = {}
    if isinstance(target, nn.Module):
        _label_module(labels, target, "")
    inputs = {f"args[{position}]": value for position, value in enumerate(args)} | dict(kwargs)
    for name, value in inputs.items():
        if isinstance(value, nn.Module):
            _label_module(labels, value, name)
            continue
        for tensor in tensors_in(value):
            _label(labels, tensor, Kind.INPUT, name)
    return labels


def labels_after(target: Any, outliving: object) -> dict[int, Label]:
    """Name what the step made and left behind: gradients and the optimizer's state."""
    labels: dict[int, Label] = {}
    if not isinstance(target, nn.Module):
        return labels
    names: dict[int, str] = {}
    for name, parameter in target.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            _label(labels, parameter.grad, Kind.GRADIENT, name)
    if isinstance(outliving, torch.optim.Optimizer):
        for key, state in outliving.state.items():
            for tensor in tensors_in(state):
                _label(labels, tensor, Kind.OPTIMIZER_STATE, names.get(id(key), ""))
    return labels


def _label_module(labels: dict[int, Label], module: nn.Module, prefix: str) -> None:
    for name, parameter in module.named_parameters(prefix):
        _label(labels, parameter, Kind.PARAMETER, name)
        if parameter.grad is not None:
            _label(labels, parameter.grad, Kind.GRADIENT, name)
    for name, buffer in module.named_buffers(prefix):
        _label(labels, buffer, Kind.BUFFER, name)


def _label(labels: dict[int, Label], tensor: Tensor, kind: Kind, name: str) -> None:
    if is_wrapper(tensor):
        for inner in wrapped_tensors(tensor):
            _label(labels, inner, kind, name)
    elif (
        tensor.layout is torch.strided and not is_lazy(tensor) and tensor.untyped_storage().nbytes()
    ):
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        labels.setdefault(tensor.untyped_storage().data_ptr(), Label(kind, name, shape, dtype))


_PHASES = {ENGINE: Phase.BACKWARD, ENGINE_NODE: Phase.BACKWARD, OPTIMIZER_STEP: Phase.OPTIMIZER}
_FACTORIES = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
    )
)
"""Operators that only take memory: what called them is what made the allocation."""


def build_timeline(
    recorded: Recording, before: Mapping[int, Label], after: Mapping[int, Label]
) -> Timeline:
    """Return the timeline of the recorded step.

    The first events are what was live when the step began. ``before`` names the storages of the
    model and the inputs by address, ``after`` the gradients and optimizer state at the step's end.

    Raises ``UsageError`` where a profiler of the program's own ended the recording.
    """
    step = next((found for found in recorded.ranges if found.name == STEP), None)
    if step is None:
        raise UsageError(
            "the step runs torch.profiler itself, which ends the recording of its allocations: "
            "remove the profiler from the measured step, or use trace()"
        )
    live: dict[int, MemoryEvent] = {}
    during: list[MemoryEvent] = []
    for event in recorded.events:
        if event.time > step.stop:
            break
        if event.time >= step.start:
            during.append(event)
        elif event.nbytes > 0:
            live[event.pointer] = event
        else:
            live.pop(event.pointer, None)
    happened = (
        (event.time, event.pointer, event.nbytes, _made_in(event.path))
        for event in [*live.values(), *during]
    )
    changes = [(0, Phase.BASELINE), *_phase_changes(recorded.ranges, step)]
    return _timeline(happened, changes, before, after)


def _made_in(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the functions that an allocation is of, outermost first.

    Factories are left out unless there is nothing else. An allocation that no operator made has the
    name of the autograd node or ``record_function`` that it was made in.
    """
    names = tuple(name for name in path if not name.startswith(MARKS))
    return tuple(name for name in names if name not in _FACTORIES) or names[-1:]


def _timeline(
    happened: Iterable[tuple[int, int, int, tuple[str, ...]]],
    changes: Iterable[tuple[int, Phase]],
    before: Mapping[int, Label],
    after: Mapping[int, Label],
) -> Timeline:
    """Return the timeline of requests and releases: when they were, address, bytes (of a release
    below 0), and what a request was made in. ``changes`` tell when phases began.

    A release is that of the last request at its address.
    """
    waiting = deque(changes)
    phases: list[tuple[int, Phase]] = []
    allocations: list[Allocation] = []
    events: list[int] = []
    live: dict[int, int] = {}

    def begin() -> None:
        phases.append((len(events), waiting.popleft()[1]))

    for time, address, nbytes, path in happened:
        while waiting and waiting[0][0] <= time:
            begin()
        if nbytes > 0:
            phase = phases[-1][1]
            label = before.get(address) if phase is Phase.BASELINE else None
            unnamed = {"kind": Kind.OTHER, "label": " > ".join(path)}
            known = unnamed if label is None else label._asdict()
            origin = Origin(phase, operator=path[-1] if path else "")
            live[address] = len(allocations)
            allocations.append(Allocation(nbytes, origin=origin, **known))
            events.append(len(allocations))
        elif nbytes and address in live:
            events.append(-(live.pop(address) + 1))
    while waiting:
        begin()
    for address, label in after.items():  # of what is alive at the end and has no name yet
        index = live.get(address)
        if index is not None and allocations[index].kind is Kind.OTHER:
            allocations[index] = allocations[index]._replace(**label._asdict())
    return Timeline(tuple(allocations), tuple(events), tuple(phases))


def _phase_changes(ranges: Iterable[Range], step: Range) -> list[tuple[int, Phase]]:
    phases = StepPhases()
    bounds: list[tuple[int, int, Callable[[], None]]] = []
    for found in ranges:
        if found.name == MODULE and step.start <= found.start:
            bounds.append((found.start, 2, phases.module_called))
        phase = next((one for name, one in _PHASES.items() if found.name.startswith(name)), None)
        if phase is not None and step.start <= found.start and found.stop <= step.stop:
            bounds.append((found.start, 1, partial(phases.begin, phase)))
            bounds.append((found.stop, 0, phases.end))
    changes = [(step.start, phases.phase)]
    for time, _, take_note in sorted(bounds, key=lambda bound: bound[:2]):
        take_note()
        if phases.phase is not changes[-1][1]:
            changes.append((time, phases.phase))
    return changes


REQUEST, ASKED_BACK, RELEASE = "alloc", "free_requested", "free_completed"


def timeline_of(
    history: Sequence[Mapping[str, Any]],
    boundaries: Sequence[tuple[int, Phase]],
    before: Mapping[int, Label],
    after: Mapping[int, Label],
) -> Timeline:
    """Return the timeline of what ``torch.cuda.memory._snapshot`` has of one device.

    An entry has ``action``, ``addr`` and ``size``, of a request and its release the bytes asked for
    (c10/cuda/CUDACachingAllocator.cpp, ``record_trace``). ``boundaries`` tell how many requests and
    releases (as asked for) came before each phase; ``before`` and ``after`` name storages by
    address, at the beginning of the step and at its end. A block that was there before the history
    began is not part of it.
    """

    def happened() -> Iterator[tuple[int, int, int, tuple[str, ...]]]:
        counted = 0
        for entry in history:
            action, address, nbytes = entry["action"], entry["addr"], entry["size"]
            if action in (REQUEST, ASKED_BACK):
                yield counted, address, nbytes if action == REQUEST else 0, ()
                counted += 1
            elif action == RELEASE:
                yield counted - 1, address, -nbytes, ()

    return _timeline(happened(), boundaries, before, after)
