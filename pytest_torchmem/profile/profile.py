"""What a trace or a measurement found: peaks by phase, and what explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from pytest_torchmem.allocator.recorded import Peaks
from pytest_torchmem.figures import FIGURES
from pytest_torchmem.targets.calibration import Question
from pytest_torchmem.units import format_size


class Phase(str, Enum):
    """Where a program is in its training step; found from what runs, never declared."""

    BASELINE = "baseline"
    FORWARD = "forward"
    BACKWARD = "backward"
    BETWEEN = "between"
    OPTIMIZER = "optimizer"


class Kind(str, Enum):
    """What an allocation is to the training step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    WORKSPACE = "workspace"
    OTHER = "other"


class Confidence(str, Enum):
    """How sure the bytes of an allocation are; from the most certain to the least."""

    EXACT = "exact"
    """Computed as the source of the kernel computes them."""
    CALIBRATED = "calibrated"
    """Measured on the GPU that is named, for this operator and geometry."""
    BOUNDED = "bounded"
    """At most these."""
    UNKNOWN = "unknown"
    """At least these: the kernel takes more, and how much is not known."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What made an allocation: module path, operator and source line, each "" where unknown."""

    phase: Phase
    module: str = ""
    operator: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One storage, or one kernel's workspace, of ``nbytes`` bytes."""

    nbytes: int
    kind: Kind
    origin: Origin
    shape: tuple[int, ...] = ()
    dtype: str = ""
    label: str = ""
    """The name of a parameter, buffer or input, such as ``"encoder.0.weight"``, or of a library
    whose workspace stays."""
    confidence: Confidence = Confidence.EXACT
    """How sure the bytes are; only what a library decides on can be less than exact."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Every allocation of one device in order.

    ``events`` holds ``index + 1`` where ``allocations[index]`` was made and ``-(index + 1)`` where
    it was freed. ``phases`` holds ``(position in events, phase)`` for every change of phase, in
    order; the first begins at 0.
    """

    allocations: tuple[Allocation, ...] = ()
    events: tuple[int, ...] = ()
    phases: tuple[tuple[int, Phase], ...] = ()

    def peaks(self) -> dict[Phase, tuple[int, int]]:
        """Return for each phase that ran its peak in bytes and the events' count when reached.

        What is live when a phase begins counts for that phase.
        """
        peaks: dict[Phase, tuple[int, int]] = {}
        live = 0
        for start, stop, phase in self._spans():
            best = peaks.get(phase, (-1, 0))
            if live > best[0]:
                best = (live, start)
            for position in range(start, stop):
                event = self.events[position]
                if event > 0:
                    live += self.allocations[event - 1].nbytes
                    if live > best[0]:
                        best = (live, position + 1)
                else:
                    live -= self.allocations[-event - 1].nbytes
            peaks[phase] = best
        return peaks

    def live_at(self, position: int) -> list[Allocation]:
        """Return what was alive after the first ``position`` events, largest first."""
        live: dict[int, Allocation] = {}
        for event in self.events[:position]:
            if event > 0:
                live[event] = self.allocations[event - 1]
            else:
                live.pop(-event, None)
        return sorted(live.values(), key=lambda allocation: -allocation.nbytes)

    def live_bytes(self) -> list[int]:
        """Return the bytes live after each event."""
        live, result = 0, []
        for event in self.events:
            nbytes = self.allocations[abs(event) - 1].nbytes
            live += nbytes if event > 0 else -nbytes
            result.append(live)
        return result

    def _spans(self) -> Iterable[tuple[int, int, Phase]]:
        if not self.phases:
            return
        starts = [start for start, _ in self.phases[1:]] + [len(self.events)]
        for (start, phase), stop in zip(self.phases, starts, strict=True):
            yield start, stop, phase


PEAK_FIELDS = {
    "forward_peak": Phase.FORWARD,
    "backward_peak": Phase.BACKWARD,
    "optimizer_peak": Phase.OPTIMIZER,
}
"""The fields of a profile that are the peak of a phase."""
_PHASE_FIELDS = {
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
}


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The memory of one step on one device. All figures are bytes live on that device.

    ``baseline`` is what was live before the forward (parameters, buffers, inputs), ``retained``
    what was live when the forward ended, ``end`` what was live when the step ended. A phase that
    did not run has ``None``. ``reserved_peak`` is the most that the caching allocator would have
    reserved (cuda only); of a trace it is worked out when it is first read.
    """

    device: str
    gpu: str | None
    host: str | None
    baseline: int
    forward_peak: int | None
    backward_peak: int | None
    optimizer_peak: int | None
    peak: int
    retained: int | None
    end: int
    reserved_peak: int | None = None
    torch_version: str = ""
    workload: str = ""
    """A digest of input shapes, dtypes and parameter bytes: tells another workload apart."""
    warnings: tuple[str, ...] = ()
    unknown_workspaces: tuple[str, ...] = ()
    """Operators that ran and whose kernels take a workspace of unknown size, in order of name."""
    calibrated_workspaces: tuple[str, ...] = ()
    """Operators that ran and whose workspace was measured on the GPU, in order of name."""
    questions: tuple[Question, ...] = field(default=(), repr=False)
    """The workspaces that no formula gives exactly: what a calibration was asked, or would be."""
    timeline: Timeline = field(default=Timeline(), repr=False)
    replay: Callable[[], Mapping[str, Peaks]] | None = field(
        default=None, repr=False, compare=False
    )
    """Works out what the caching allocator counted; ``None`` where that was not traced."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Python asks here for a field that has no value: a trace's, until it is read.
            if name == "reserved_peak" and self.replay is not None:
                object.__setattr__(self, name, self.replay()["peak"].reserved)
                return self.reserved_peak
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __getstate__(self) -> dict[str, Any]:
            state = {entry.name: getattr(self, entry.name) for entry in fields(self)}
            return state | {"replay": None}

        def __setstate__(self, state: dict[str, Any]) -> None:
            for name, value in state.items():
                object.__setattr__(self, name, value)

    def allocator_peaks(self) -> Mapping[str, Peaks]:
        """Return what the caching allocator counted at its most, by the name of the peak.

        ``"forward_peak"``, ``"backward_peak"`` and ``"optimizer_peak"`` for phases that ran, and
        ``"peak"``. Each has ``requested``, ``allocated`` (``torch.cuda.max_memory_allocated``),
        ``reserved`` (``torch.cuda.max_memory_reserved``) and ``unallocated``, what of the reserved
        peak was not in use. Empty for cpu.
        """
        return self.replay() if self.replay is not None else MappingProxyType({})

    def figures(self) -> dict[str, int]:
        """Return the figures by name (``"forward_peak"``, …), without those that are ``None``."""
        values = ((name, getattr(self, name)) for name in FIGURES)
        return {name: value for name, value in values if value is not None}

    def live_at_peak(self, phase: str | None = None) -> list[Allocation]:
        """Return what was alive at the peak of ``phase``, or of the whole step, largest first.

        ``phase`` is ``"forward"``, ``"backward"``, ``"optimizer"`` or ``None``. Raises ``KeyError``
        for another name; a phase that did not run gives an empty list.
        """
        peaks = self.timeline.peaks()
        if phase is None:
            peak = max(peaks.values(), default=(0, 0), key=lambda found: found[0])
        else:
            peak = peaks.get(_PHASE_FIELDS[phase], (0, 0))
        return self.timeline.live_at(peak[1])

    def by_module(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by module path, largest first."""
        return _totals(self.live_at_peak(phase), lambda allocation: allocation.origin.module)

    def by_operator(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by the operator that made them, largest first."""
        return _totals(self.live_at_peak(phase), lambda allocation: allocation.origin.operator)

    def by_line(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by source line (``"model.py:12"``), largest first."""
        return _totals(self.live_at_peak(phase), lambda allocation: allocation.origin.line)

    def by_kind(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by kind (``"parameter"``, …), largest first."""
        return _totals(self.live_at_peak(phase), lambda allocation: allocation.kind.value)

    def by_confidence(self, phase: str | None = None) -> dict[str, int]:
        """Return what libraries decide on of the bytes alive at a peak, by how sure they are.

        Workspaces, and what cuDNN keeps for the backward: ``"exact"`` (computed), ``"calibrated"``
        (measured), ``"bounded"`` (at most these) and ``"unknown"`` (at least these), largest first.
        Everything else that is alive is a tensor, whose bytes are exact.
        """
        return _totals(
            (
                found
                for found in self.live_at_peak(phase)
                if found.kind is Kind.WORKSPACE or found.confidence is not Confidence.EXACT
            ),
            lambda allocation: allocation.confidence.value,
        )

    def table(self, largest: int = 10) -> str:
        """Return the peaks by phase and the ``largest`` things alive at the peak, as text.

        What kernels take for themselves is told by how sure it is: computed, measured, not known.
        """
        device = f"{self.device} ({self.gpu})" if self.gpu else self.device
        figures = [
            (name.replace("_", " "), format_size(size), f"{size:,}")
            for name, size in self.figures().items()
        ]
        live = self.live_at_peak()[:largest]
        things = [
            (
                format_size(allocation.nbytes),
                describe_kind(allocation),
                describe(allocation),
                allocation.origin.operator,
                allocation.origin.line,
            )
            for allocation in live
        ]
        peaks = tabulate(
            figures, headers=(device, "", "bytes"), colalign=("left", "right", "right")
        )
        if not things:
            return peaks
        alive = tabulate(
            things,
            headers=("alive at the peak", "kind", "what", "operator", "line"),
            colalign=("right", "left", "left", "left", "left"),
        )
        return "\n\n".join((peaks, alive, *self._taken_by_kernels()))

    def _taken_by_kernels(self) -> Iterator[str]:
        """Tell how sure is what kernels take for themselves, where there is any."""
        words = (
            f"{format_size(size)} {_WORDS[name]}" for name, size in self.by_confidence().items()
        )
        told = [", ".join(words)]
        if self.unknown_workspaces:
            told.append(f"not known of {', '.join(self.unknown_workspaces)}")
        if any(told):
            yield f"taken by kernels for themselves at the peak: {'; '.join(filter(None, told))}"


def summarise(
    timeline: Timeline,
    *,
    device: str,
    gpu: str | None,
    host: str | None,
    torch_version: str,
    workload: str = "",
    warnings: tuple[str, ...] = (),
    unknown_workspaces: tuple[str, ...] = (),
    calibrated_workspaces: tuple[str, ...] = (),
    questions: tuple[Question, ...] = (),
    replay: Callable[[], Mapping[str, Peaks]] | None = None,
) -> MemoryProfile:
    """Return the profile of what a timeline tells, and what ``replay`` tells of the allocator."""
    peaks = {phase: peak for phase, (peak, _) in timeline.peaks().items()}
    live = [0, *timeline.live_bytes()]
    ends = [start for start, _ in timeline.phases[1:]] + [len(timeline.events)]
    retained = [
        live[end]
        for (_, phase), end in zip(timeline.phases, ends, strict=True)
        if phase is Phase.FORWARD
    ]
    baselines = [
        live[end]
        for (_, phase), end in zip(timeline.phases, ends, strict=True)
        if phase is Phase.BASELINE
    ]
    profile = MemoryProfile(
        device=device,
        gpu=gpu,
        host=host,
        baseline=baselines[0] if baselines else 0,
        forward_peak=peaks.get(Phase.FORWARD),
        backward_peak=peaks.get(Phase.BACKWARD),
        optimizer_peak=peaks.get(Phase.OPTIMIZER),
        peak=max(peaks.values(), default=0),
        retained=max(retained) if retained else None,
        end=live[-1],
        torch_version=torch_version,
        workload=workload,
        warnings=warnings,
        unknown_workspaces=unknown_workspaces,
        calibrated_workspaces=calibrated_workspaces,
        questions=questions,
        timeline=timeline,
        replay=replay,
    )
    if replay is not None:
        object.__delattr__(profile, "reserved_peak")
    return profile


def describe(allocation: Allocation) -> str:
    """Return what an allocation is in a few words: its label or module, and its geometry."""
    name = allocation.label or allocation.origin.module
    geometry = f"{allocation.dtype}{list(allocation.shape)}" if allocation.dtype else ""
    return " ".join(part for part in (name, geometry) if part)


_WORDS = {
    "exact": "computed",
    "calibrated": "measured",
    "bounded": "at most",
    "unknown": "at least",
}
_SURE = {
    Confidence.EXACT: "",
    Confidence.CALIBRATED: ", measured",
    Confidence.BOUNDED: ", at most",
    Confidence.UNKNOWN: ", at least",
}


def describe_kind(allocation: Allocation) -> str:
    """Return what an allocation is to the step, and how sure its bytes are if they are not."""
    return allocation.kind.value + _SURE[allocation.confidence]


def _totals(allocations: Iterable[Allocation], key: Callable[[Allocation], str]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for allocation in allocations:
        name = key(allocation)
        totals[name] = totals.get(name, 0) + allocation.nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
