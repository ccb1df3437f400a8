"""The result of a trace or a measurement: peaks by phase, and what explains or would lower them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_torchmem.errors import UsageError
from pytest_torchmem.figures import ALLOCATOR_PEAKS, FIGURES, HOST
from pytest_torchmem.printable import Tabular
from pytest_torchmem.profile.facts import Facts, outline_of, read_facts
from pytest_torchmem.profile.timeline import (
    Allocation,
    ComputedLater,
    Confidence,
    Kind,
    Later,
    OperatorCall,
    Origin,
    Phase,
    Timeline,
    totals_by,
    without_collections,
)

if TYPE_CHECKING:
    from pytest_torchmem.allocator.caching import Peaks
    from pytest_torchmem.profile.node_table import NodeTable
    from pytest_torchmem.profile.static_plan import StaticPlan
    from pytest_torchmem.targets.gpus import LibraryAnswer, WorkspaceKey

# What a profile is turned into is imported when it is asked for: most are asked for figures alone.

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
PEAK_FIELDS = {f"{phase.value}_peak": phase for phase in _PHASES}
"""The fields of a profile that are the peak of a phase."""

#: Communicators and their channels: NCCL allocates by itself (``ncclCommInitRank``).
NCCL = "memory that NCCL takes for itself"
MOST_DRAWN = 200_000
"""Allocations of which a page has the plan and the operators."""

Suggest: TypeAlias = "Callable[..., list[Suggestion]]"
"""Called with the profile of a step, and the bytes that its peak has to fit, if any."""


@dataclass(frozen=True, slots=True)
class MemoryProfile(ComputedLater, Tabular):
    """The memory of one step on one device. All figures are bytes alive on that device."""

    device: str
    """``"cpu"`` or ``"cuda"``."""
    gpu: str | None
    """The GPU by its name in the catalogue; ``None`` on the CPU."""
    host: str | None
    """The CPU: ``"reference"`` or ``"here"``."""
    baseline: int
    """What is alive before the forward: parameters, buffers, inputs. Of a callable, what it uses
    that was there before it was called, and what fixtures have put on the fake GPU."""
    forward_peak: int | None
    """The peak of the forward; ``None`` if it did not run."""
    backward_peak: int | None
    """The peak of the backward; ``None`` if it did not run."""
    optimizer_peak: int | None
    """The peak of the optimizer's step; ``None`` if it did not run. Of its closure the forward and
    the backward belong to these."""
    peak: int
    """The peak of the whole step."""
    retained: int | None
    """What is alive at the end of the forward."""
    end: int
    """What is alive at the end of the step."""
    allocated_peak: int | None = None
    """The peak in blocks of the caching allocator (cuda), as
    ``torch.cuda.max_memory_allocated()``; computed when it is read."""
    reserved_peak: int | None = None
    """The peak in segments of the caching allocator (cuda), as
    ``torch.cuda.max_memory_reserved()``; computed when it is read."""
    host_peak: int | None = None
    """The peak of the host's memory, where a step on cuda has tensors there, or one on cpu has some
    that torch's allocator did not make (numpy's arrays, shared memory)."""
    torch_version: str = ""
    """The version of torch that ran."""
    workload: str = ""
    """The fingerprint of the step: input shapes, dtypes and parameter bytes."""
    warnings: tuple[str, ...] = ()
    """What the figures leave out or assume."""
    unknown_workspaces: tuple[str, ...] = ()
    """Operators of the step whose workspace is unknown, sorted."""
    values: str = ""
    """Which values of tensors were computed in a trace: ``"real"`` (all), ``"in part"`` (as far as
    the budget went, or but for what a warning names) or ``"none"`` (small integer and boolean
    tensors); ``"guessed"`` where unknown values decided sizes: the largest possible ones were
    taken, so no figure is larger."""
    level: str = "eager"
    """How compiled code ran: ``"eager"``, ``"aot"`` or ``"inductor"``."""
    calibrated_workspaces: tuple[str, ...] = ()
    """Operators of the step whose workspace was measured on the GPU, sorted."""
    library_workspaces: tuple[str, ...] = ()
    """Operators of the step whose workspace cuDNN told for this GPU, sorted."""
    library_answers: tuple[LibraryAnswer, ...] = field(default=(), repr=False)
    """What cuDNN was asked, and what it told; those without an answer included."""
    questions: tuple[WorkspaceKey, ...] = field(default=(), repr=False)
    """The workspaces of the step that a calibration can measure."""
    facts: Facts = field(default_factory=dict, repr=False)
    """What the step was run with: text by topic and name."""
    broadcasts: tuple[tuple[Origin, str], ...] = field(default=(), repr=False, compare=False)
    """Operators whose result is larger than their inputs, with the shapes of these."""
    callers: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    """Outermost modules of installed libraries, and the lines of the program that call them."""
    library_lines: Mapping[tuple[str, str], str] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Lines of the program by the modules and lines of installed libraries that they call."""
    functions: tuple[tuple[Origin, str], ...] = field(default=(), repr=False, compare=False)
    """Functions that the program's source calls where operators of other names run."""
    timeline: Timeline = field(default=Timeline(), repr=False)
    """All allocations and frees, in order."""
    host_timeline: Timeline = field(default=Timeline(), repr=False)
    """The allocations in the host's memory, of which ``host_peak`` is the peak."""
    calls: tuple[OperatorCall, ...] | None = field(default=None, repr=False, compare=False)
    """The operators that ran, in order; ``None`` for a measurement."""
    graphs: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    """The graphs (``torch.fx.GraphModule``) that ran in the place of a module, forward first."""
    replay: Callable[[], Mapping[str, Peaks]] | None = field(
        default=None, repr=False, compare=False
    )
    """Replays the caching allocator; ``None`` for cpu."""
    advised: Suggest | None = field(default=None, repr=False, compare=False)
    """Traces changes of the step; ``None`` for a measurement, and for what was read from a file."""
    others: tuple[MemoryProfile, ...] = field(default=(), repr=False)
    """The profiles of the other GPUs, where the program sees several."""
    world_size: int | None = None
    """How many processes the program runs in, if that was said."""
    rank: int | None = None
    """Which of them this one is."""
    _later: dict[str, Later] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What computes ``facts``, ``functions``, ``calls`` and the allocator's peaks when read."""

    def __post_init__(self) -> None:
        if self.replay is not None:
            for name, counts in ALLOCATOR_PEAKS.items():
                object.__setattr__(self, name, Later(partial(_replayed, self.replay, counts)))
        self._put_off("facts", "functions", "calls", *ALLOCATOR_PEAKS)

    if not TYPE_CHECKING:

        def __getstate__(self) -> dict[str, Any]:
            state = {entry.name: getattr(self, entry.name) for entry in fields(self)}
            return state | {"replay": None, "graphs": (), "advised": None}

        def __setstate__(self, state: dict[str, Any]) -> None:
            for name, value in state.items():
                object.__setattr__(self, name, value)

    @property
    def devices(self) -> dict[str, MemoryProfile]:
        """Return the profiles of all devices by name: ``"cpu"``, or that of this one's GPU
        (``"cuda:0"`` without ranks), and the others.
        """
        others = {other.device: other for other in self.others}
        if self.device != "cuda":
            return {self.device: self, **others}
        names = (f"cuda:{index}" for index in range(len(others) + 1))
        return {next(name for name in names if name not in others): self, **others}

    def allocator_peaks(self) -> Mapping[str, Peaks]:
        """Return the caching allocator's peaks, by name; empty for cpu.

        The names are ``"forward_peak"``, ``"backward_peak"`` and ``"optimizer_peak"`` of the phases
        that ran, and ``"peak"``. Each has ``requested``, ``allocated``
        (``torch.cuda.max_memory_allocated``), ``reserved`` (``torch.cuda.max_memory_reserved``) and
        ``unallocated``, the part of the reserved peak that was not in use.
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
        return self.timeline.live_at(self._position_of_peak(phase))

    def by_module(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by module path, largest first."""
        return totals_by(self.live_at_peak(phase), lambda allocation: allocation.origin.module)

    def by_operator(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by the operator that made them, largest first."""
        return totals_by(self.live_at_peak(phase), lambda allocation: allocation.origin.operator)

    def by_line(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by source line (``"model.py:12"``), largest first."""
        return totals_by(self.live_at_peak(phase), lambda allocation: allocation.origin.line)

    def by_kind(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes alive at a peak by kind (``"parameter"``, …), largest first."""
        return totals_by(self.live_at_peak(phase), lambda allocation: allocation.kind.value)

    def by_confidence(self, phase: str | None = None) -> dict[str, int]:
        """Return the bytes of workspaces alive at a peak, by how sure they are, largest first.

        ``"exact"`` (computed), ``"calibrated"`` (measured), ``"library"`` (told by cuDNN),
        ``"bounded"`` (at most these) and ``"unknown"`` (at least these). What cuDNN keeps for
        the backward is included. Everything else that is alive is a tensor, whose bytes are exact.
        """
        return totals_by(
            (
                found
                for found in self.timeline.live_in_order(self._position_of_peak(phase))
                if found.kind is Kind.WORKSPACE or found.confidence is not Confidence.EXACT
            ),
            lambda allocation: allocation.confidence.value,
        )

    def _position_of_peak(self, phase: str | None) -> int:
        """Return after how many events a peak is reached; raises ``KeyError``."""
        return self.timeline.peak(None if phase is None else PEAK_FIELDS[f"{phase}_peak"])[1]

    def node_table(self) -> NodeTable:
        """Return what each operator needs in forward and backward, in the order of the step.

        Raises ``UsageError`` for a measurement, which knows no operators.
        """
        from pytest_torchmem.profile.node_table import node_table_of

        if self.calls is None:
            raise UsageError(
                "this profile has no operators: it was measured, or read from a file; trace() the "
                "step for its table"
            )
        return node_table_of(self.timeline, self.calls)

    def plan(self, alignment: int | None = None, outputs: bool = False) -> StaticPlan:
        """Return the offsets of one arena for all that the step makes and gives back.

        ``alignment`` is that of storages in bytes, by default the device's own: 64 on cpu, 512 on
        cuda. With ``outputs``, what outlives the step (gradients, optimizer state) is in the arena
        too. Raises ``UsageError`` for an alignment that is no power of two.
        """
        from pytest_torchmem.profile.static_plan import ALIGNMENT, plan_of

        if alignment is None:
            alignment = ALIGNMENT[self.device.partition(":")[0]]
        return plan_of(self.timeline, alignment, self.reserved_peak, outputs)

    def suggestions(self, budget: int | str | None = None) -> list[Suggestion]:
        """Return changes of the step that lower its peak, each traced, the best first.

        What ``pytest_torchmem.advise`` returns for the same step, which is traced again with what
        it was given. ``budget`` is what the peak has to fit (``"2 GiB"``): changes that do come
        first, those that cost the fewest operations before others. Raises ``UsageError`` for a
        measurement, for a profile that was read from a file, and for another ``budget`` than bytes.
        """
        if self.advised is None:
            raise UsageError(
                "this profile has no step to change: it was measured, or read from a file; "
                "trace() the step, or advise()"
            )
        return self.advised(self, budget)

    def table(self, largest: int = 10) -> str:
        """Return the peaks by phase and the ``largest`` things alive at the peak, as text.

        What is alike in the layers of a model is one of these.

        The last lines say how sure the workspace of kernels is, what is not counted, and what the
        profile warns of where nothing was allocated.
        """
        from pytest_torchmem.profile import tables

        parts = [tables.figures_table(self.name, self.figures())]
        if live := tables.alike(self.live_at_peak())[:largest]:
            parts.append(tables.allocations_table(live))
            parts += tables.workspace_lines(self.by_confidence(), self.unknown_workspaces)
        else:
            parts += self.warnings
        parts += [f"not counted: {', '.join(self.not_counted)}"] if self.not_counted else []
        return "\n\n".join(parts)

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What takes memory of the GPU outside of PyTorch's allocator, and is in no figure."""
        apart = self.device.startswith("cuda") and (self.world_size or 0) > 1
        return (NCCL,) if apart else ()

    # -- files and pictures ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The device as people read it: ``"cpu"``, or ``"cuda (h100)"``, and the rank if any."""
        device = f"{self.device} ({self.gpu})" if self.gpu else self.device
        if self.world_size is None:
            return device
        return f"{device}, rank {self.rank} of {self.world_size}"

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile as JSON, compressed where the name ends in ``.gz``.

        ``MemoryProfile.load`` reads it. Left out are ``calls`` and what libraries were asked.
        """
        with without_collections():
            text = json.dumps({"kind": SAVED, "schema": SCHEMA, **self._plain()})
        if Path(path).suffix == ".gz":
            Path(path).write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MemoryProfile:
        """Return the profile that ``save`` wrote, or that of a recording of a GPU
        (``torch.cuda.memory._dump_snapshot``). Raises ``UsageError`` for any other file.
        """
        from pytest_torchmem.profile.formats.saved import PICKLE, read_recording

        content = Path(path).read_bytes()
        try:
            if content[:1] == PICKLE:
                timeline = read_recording(content)
                return cls("cuda", None, None, timeline=timeline, **figures_of(timeline))
            if content[:2] == _GZIP:
                content = gzip.decompress(content)
            with without_collections():
                plain = json.loads(content, parse_constant=_refused)
                return cls._of_plain(_checked(plain))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        except (EOFError, OSError, RecursionError) as error:
            reason = str(error)
        raise UsageError(
            f"{path} is not a profile saved by pytest-torchmem, nor a recording of a GPU "
            f"({reason:.200})"
        )

    def _plain(self) -> dict[str, Any]:
        from pytest_torchmem.profile.formats.saved import escaped, plain_timeline

        plain = {name: getattr(self, name) for name in _TEXTS + _FIGURES + _RANK}
        lists = {name: list(getattr(self, name)) for name in _LISTS}
        facts = json.loads(json.dumps(self.facts))
        peaks = {name: found._asdict() for name, found in self.allocator_peaks().items()}
        return {
            **escaped({**plain, **lists, "facts": facts}),
            "allocator_peaks": peaks,
            "timeline": plain_timeline(self.timeline),
            "host_timeline": plain_timeline(self.host_timeline),
            "others": [other._plain() for other in self.others],
        }

    @classmethod
    def _of_plain(cls, plain: dict[str, Any]) -> MemoryProfile:
        from pytest_torchmem.allocator.caching import Peaks
        from pytest_torchmem.profile.formats import saved

        plain = {HOST: None, "host_timeline": saved.plain_timeline(Timeline()), **plain}
        saved.check_plain(plain)
        if saved.escaped(plain["facts"]) != plain["facts"]:
            raise ValueError("its facts have text that would move a terminal's cursor")
        timeline, on_host = map(saved.read_timeline, (plain["timeline"], plain["host_timeline"]))
        peaks = {name: Peaks(**found) for name, found in plain["allocator_peaks"].items()}
        values: dict[str, Any] = {name: plain[name] for name in _TEXTS + _FIGURES + _RANK}
        found = figures_of(timeline) | {HOST: host_peak_of(on_host)}
        if any(values[name] != found[name] for name in found) or (peaks and "peak" not in peaks):
            raise ValueError("its figures are not those of its timeline")
        values |= {name: tuple(plain[name]) for name in _LISTS}
        others = tuple(map(cls._of_plain, plain["others"]))
        values |= {"facts": read_facts(plain["facts"]), "others": others}
        values |= {"timeline": timeline, "host_timeline": on_host}
        return cls(**values, replay=(lambda: MappingProxyType(peaks)) if peaks else None)

    def to_html(
        self,
        path: str | PathLike[str] | None = None,
        *,
        title: str = "",
        before: MemoryProfile | None = None,
    ) -> str:
        """Return one page for browsers, which needs no network; write it to ``path`` too.

        It shows the bytes alive by kind, module or operator in the course of the step, with phases
        and the peak, what is alive under the pointer, the peak by module, the plan of an arena, and
        what each operator needs (of a trace; none of these two for more than 200,000 allocations).
        With ``before``, another profile's timeline and figures stand beside those of this one.
        """
        from pytest_torchmem.profile.pictures.page import SAMPLES, Content, page

        content = Content(
            title or f"Memory on {self.name}",
            self.timeline,
            self.figures(),
            lines=[f"{self.name}, torch {self.torch_version}"] if self.torch_version else [],
            notes=notes_of(self),
            before=before.figures() if before is not None else None,
            before_outline=outline_of(before.timeline, SAMPLES) if before is not None else (),
            **drawn(self),
        )
        return _written(path, page(content))

    def to_svg(self, path: str | PathLike[str] | None = None, *, title: str = "") -> str:
        """Return the bytes alive by kind as an SVG, 800 by 280 pixels; write it to ``path`` too."""
        from pytest_torchmem.profile.pictures.svg import svg

        return _written(path, svg(title or f"Memory on {self.name}", self.timeline))

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """Return a row of comma-separated values for each allocation; write them to ``path`` too.

        ``made`` and ``freed`` are positions among the events of the step; sizes are bytes.
        """
        from pytest_torchmem.profile.formats.exports import allocations_csv

        return _written(path, allocations_csv(self.timeline))

    def to_trace_events(self, path: str | PathLike[str] | None = None) -> str:
        """Return the timeline for Perfetto and ``chrome://tracing`` (JSON); write it to ``path``.

        An event of the timeline is a microsecond.
        """
        from pytest_torchmem.profile.formats.exports import trace_events

        return _written(path, trace_events(self.name, self.timeline))

    def to_memory_snapshot(self, path: str | PathLike[str], *, allocator: str = "") -> None:
        """Write what ``torch.cuda.memory._dump_snapshot`` writes, for PyTorch's visualizer.

        The requests are replayed on one stream, with the options ``allocator``, as in
        ``PYTORCH_ALLOC_CONF``. Open the file at https://pytorch.org/memory_viz.
        """
        from pytest_torchmem.profile.formats.exports import write_memory_snapshot

        with without_collections(), Path(path).open("wb") as file:
            write_memory_snapshot(self.timeline, file, allocator)

    def sparkline(self, width: int = 40) -> str:
        """Return the course of the step in ``width`` characters, the highest at the peak."""
        from pytest_torchmem.profile.sampled import sparkline

        return sparkline(self.timeline, width)


SAVED, SCHEMA = "pytest-torchmem profile", 2
_GZIP = b"\x1f\x8b"
_TEXTS = ("device", "gpu", "host", "torch_version", "workload", "values")
_FIGURES = tuple(name for name in FIGURES if name not in ALLOCATOR_PEAKS)
_LISTS = ("warnings", "unknown_workspaces", "calibrated_workspaces", "library_workspaces")
_RANK = ("world_size", "rank")


def _refused(number: str) -> Any:
    raise ValueError(f"{number} is no size")


def _checked(plain: Any) -> Any:
    kind = plain.get("kind", "unknown") if isinstance(plain, dict) else "unknown"
    if kind != SAVED:
        raise ValueError(f"it is of kind {kind!r:.60}")
    if plain["schema"] != SCHEMA or plain["schema"] is True:
        raise ValueError(f"its schema is {plain['schema']!r:.20}, and this version reads {SCHEMA}")
    return plain


def _written(path: str | PathLike[str] | None, text: str) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def notes_of(profile: MemoryProfile) -> list[str]:
    """Return what a page says below the timeline: warnings, and what is in no figure."""
    apart = profile.not_counted
    return [*profile.warnings, *([f"not counted: {', '.join(apart)}"] if apart else [])]


def drawn(profile: MemoryProfile) -> dict[str, Any]:
    """Return what a page shows beside the timeline, unless that would take long."""
    if len(profile.timeline.allocations) > MOST_DRAWN:
        return {}
    from pytest_torchmem.profile.formats.exports import layout

    table = profile.node_table() if profile.calls is not None else None
    laid = layout(profile.timeline) if profile.device.startswith("cuda") else None
    if laid is not None and profile.reserved_peak not in (None, laid.reserved):
        laid = None  # of an allocator with other options, or of several streams
    return {"layout": laid, "plan": profile.plan(), "table": table}


def _replayed(replay: Callable[[], Mapping[str, Peaks]], counts: str) -> Any:
    return getattr(replay()["peak"], counts)


def figures_of(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a profile that follow from its timeline, by their fields."""
    peaks: dict[Phase, int] = {}
    ends: dict[Phase, list[int]] = {}
    end = 0
    for phase, (peak, _), end in timeline.course():
        peaks[phase] = max(peak, peaks.get(phase, 0))
        ends.setdefault(phase, []).append(end)
    return {name: peaks.get(phase) for name, phase in PEAK_FIELDS.items()} | {
        "baseline": ends.get(Phase.BASELINE, [0])[0],
        "peak": max(peaks.values(), default=0),
        "retained": max(ends.get(Phase.FORWARD, ()), default=None),
        "end": end,
    }


def host_peak_of(timeline: Timeline) -> int | None:
    """Return the host's peak, ``None`` where only single numbers are there, as of optimizers."""
    if not any(allocation.shape and allocation.nbytes for allocation in timeline.allocations):
        return None
    return timeline.peak()[0]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change of the step, and what a trace of the changed step gave."""

    change: str
    """What to do, in words."""
    saved: int
    """Bytes by which ``figure`` falls."""
    flops: int
    """Floating-point operations that the step then does more."""
    figure: str
    """``"peak"``, or ``"reserved_peak"`` for a change of the caching allocator."""
    profile: MemoryProfile
    """The profile of the changed step."""
