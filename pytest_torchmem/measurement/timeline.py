"""From an allocator's events or history to a timeline with phases and names of storages."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_torchmem.errors import UsageError
from pytest_torchmem.measurement import events as recorded
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline
from pytest_torchmem.step.step import StepPhases
from pytest_torchmem.step.trees import tensors_in
from pytest_torchmem.torch_private.tensors import is_wrapper, wrapped_tensors


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


_PHASES = {
    recorded.ENGINE: Phase.BACKWARD,
    recorded.ENGINE_NODE: Phase.BACKWARD,
    recorded.OPTIMIZER_STEP: Phase.OPTIMIZER,
}
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
    recording: recorded.Recording, before: Mapping[int, Label], after: Mapping[int, Label]
) -> Timeline:
    """Return the timeline of the recorded step.

    The first events are what was live when the step began. ``before`` names the storages of the
    model and the inputs by address, ``after`` the gradients and optimizer state at the step's end.

    Raises ``UsageError`` where a profiler of the program's own ended the recording.
    """
    step = next((found for found in recording.ranges if found.name == recorded.STEP), None)
    if step is None:
        raise UsageError(
            "the step runs torch.profiler itself, which ends the recording of its allocations: "
            "remove the profiler from the measured step, or use trace()"
        )
    live: dict[int, recorded.MemoryEvent] = {}
    during: list[recorded.MemoryEvent] = []
    for event in recording.events:
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
    changes = [(0, Phase.BASELINE), *_phase_changes(recording.ranges, step)]
    return _timeline(happened, changes, before, after)


def _made_in(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the functions that an allocation is of, outermost first.

    Factories are left out unless there is nothing else. An allocation that no operator made has the
    name of the autograd node or ``record_function`` that it was made in.
    """
    names = tuple(name for name in path if not name.startswith(recorded.MARKS))
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


def _phase_changes(
    ranges: Iterable[recorded.Range], step: recorded.Range
) -> list[tuple[int, Phase]]:
    phases = StepPhases()
    bounds: list[tuple[int, int, Callable[[], None]]] = []
    for found in ranges:
        if found.name == recorded.MODULE and step.start <= found.start:
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
