"""Compare recordings of a real GPU with traces of the same steps; no GPU is needed.

python -m benchmarks.truth.compare DIR                     all recorded cases
python -m benchmarks.truth.compare DIR --only 'cnn/'       those whose name matches
python -m benchmarks.truth.compare DIR --replay            the allocator's replay alone

Each case runs in a trace as ``benchmarks.truth.record`` runs it on the GPU, and is asked for the
same counters. An error is traced minus recorded, of what was recorded. The recorded requests also
go through the replay of the caching allocator, which has to give the recorded peaks to the byte
where its segments lie at the recorded addresses; where they lie as a trace takes them to lie, most.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks import command
from benchmarks.comparison import percentile
from benchmarks.truth.record import counted_steps
from benchmarks.truth.recording import (
    COUNTERS,
    PHASES,
    STEPS,
    Recording,
    RecordingError,
    Requests,
    Segment,
    load,
)
from benchmarks.truth.settings import Case, cases
from pytest_torchmem import Gpu
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.device_memory import Addresses, DriverAddresses, parse_options
from pytest_torchmem.measurement.device import known_gpu, name_of
from pytest_torchmem.targets.gpus import gpu_names, registered_gpus

#: The bars: of the peaks of forward and backward in requested bytes, and of reserved ones.
LIMITS = {"requested_bytes": 0.05, "reserved_bytes": 0.10}


@dataclass(frozen=True, slots=True)
class Error:
    """How far a traced figure is from the recorded one."""

    case: str
    family: str
    step: str
    phase: str
    counter: str
    traced: int
    recorded: int

    @property
    def relative(self) -> float:
        """The difference as a share of what was recorded."""
        return (self.traced - self.recorded) / max(1, self.recorded)


class TracedMeter:
    """The fake GPU of the trace that is running, asked as a real one is."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)

    def statistics(self) -> Mapping[str, int]:
        """Return the replayed allocator's statistics."""
        return torch.cuda.memory_stats()

    def reset_peaks(self) -> None:
        """Begin the peaks anew."""
        torch.cuda.reset_peak_memory_stats()

    def start_history(self) -> None:
        """Do nothing: the trace has its timeline."""

    def history(self) -> Sequence[Any]:
        """Return nothing."""
        return ()

    def stop_history(self) -> None:
        """Do nothing."""


def recorded_gpu(machine: Mapping[str, Any]) -> Gpu:
    """Return the GPU of a recording; raises ``RecordingError`` where none was recorded."""
    try:
        major, minor = machine["capability"]
        name, memory, sms, threads = (
            machine[key] for key in ("gpu", "memory", "sms", "threads_per_sm")
        )
    except KeyError as missing:
        why = f"the recording says nothing of {missing}: it was not made on a GPU"
        raise RecordingError(why) from None
    return known_gpu(Gpu(name_of(name), name, (major, minor), memory, sms, threads))


def traced_figures(case: Case, gpu: Gpu, tiny: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what a trace counts in a case, and the operators whose workspace it does not know."""
    found: dict[str, Any] = {}

    def program() -> None:
        found.update(counted_steps(case, TracedMeter(), tiny)[0])

    profile = torchmem.trace(program, device="cuda", gpu=gpu.name, memory="unlimited")
    return found, tuple(profile.unknown_workspaces)


def errors_of(case: Case, traced: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[Error]:
    """Return the error of every figure that both have."""
    return [
        Error(
            case.key,
            case.network.family,
            step,
            phase,
            counter,
            traced[step][phase][counter],
            recorded[step][phase][counter],
        )
        for step in STEPS
        for phase in PHASES
        for counter in COUNTERS
        if phase in recorded.get(step, ()) and phase in traced.get(step, ())
    ]


class RecordedAddresses(Addresses):
    """Segments lie where they were recorded."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        super().__init__()
        self._recorded = (address for _, address, nbytes in segments if nbytes > 0)

    def take(self, size: int) -> int:
        """Return the next recorded address."""
        return next(self._recorded, None) or super().take(size)

    def give_back(self, address: int, size: int) -> None:
        """Do nothing."""


def replayed(
    requests: Requests, allocator: CachingAllocator
) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the peaks of allocated and reserved bytes that the replay has in every phase."""
    statistics = allocator.statistics
    blocks: list[Any] = [None]
    peaks: dict[tuple[str, str], tuple[int, int]] = {}
    begin = 0
    for step, phase, end in requests.bounds:
        statistics.reset_peaks()
        for event in requests.events[begin:end]:
            if event > 0:
                blocks.append(allocator.allocate(event))
            else:
                allocator.free(blocks[-event])
        counts = statistics.all
        peaks[step, phase] = (counts.allocated_bytes.peak, counts.reserved_bytes.peak)
        begin = end
    return peaks


def replay_differences(
    key: str, requests: Requests, recorded: Mapping[str, Any], allocator: CachingAllocator
) -> list[tuple[str, str, int, int]]:
    """Return the figures of a case that the replay does not give to the byte."""
    different = []
    for (step, phase), peaks in replayed(requests, allocator).items():
        figures = recorded.get(step, {}).get(phase)
        if figures is None:
            continue
        for counter, replayed_peak in zip(COUNTERS[1:], peaks, strict=True):
            if figures[counter] != replayed_peak:
                name = f"{key} {step} {phase}"
                different.append((name, counter, replayed_peak, figures[counter]))
    return different


def error_table(errors: Iterable[Error]) -> str:
    """Return the distribution of errors by family and counter, and of all families."""
    groups: dict[tuple[str, str], list[Error]] = {}
    for error in errors:
        for family in ("all", error.family):
            groups.setdefault((family, error.counter), []).append(error)
    rows = []
    for family, counter in sorted(
        groups, key=lambda group: (group[0] != "all", group[0], COUNTERS.index(group[1]))
    ):
        found = groups[family, counter]
        sizes = [abs(error.relative) for error in found]
        worst = max(found, key=lambda error: abs(error.relative))
        rows.append(
            (
                family,
                counter.removesuffix("_bytes"),
                len(found),
                sum(not size for size in sizes),
                sum(size <= 0.01 for size in sizes),
                *(f"{percentile(sizes, share):.2%}" for share in (0.5, 0.9, 0.99)),
                f"{worst.relative:+.2%} {worst.case}",
            )
        )
    headers = ("family", "counter", "figures", "exact", "within 1 %", "p50", "p90", "p99", "worst")
    return tabulate(rows, headers=headers, disable_numparse=True)


def compare(
    recording: Recording, wanted: Sequence[Case]
) -> tuple[list[Error], dict[str, tuple[str, ...]], list[tuple[str, str]]]:
    """Trace the recorded cases; return errors, unknown operators by case, and what failed."""
    gpu = recorded_gpu(recording.machine)
    tiny = bool(recording.machine.get("tiny"))
    errors, unknown, failed = list[Error](), dict[str, tuple[str, ...]](), list[tuple[str, str]]()
    with registered_gpus(*(() if gpu.name in gpu_names() else (gpu,))):
        for case in wanted:
            recorded = recording.figures(case.key)
            if recorded is None:
                continue
            try:
                traced, unknown[case.key] = traced_figures(case, gpu, tiny)
            except Exception as error:
                failed.append((case.key, f"{type(error).__name__}: {error}"[:160]))
                continue
            errors += errors_of(case, traced, recorded)
    return errors, unknown, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; return 1 where something is beyond its limit."""
    parser = command("truth.compare", __doc__)
    parser.add_argument("recording", type=Path, help="directory that record wrote")
    parser.add_argument("--only", default="", help="regular expression for the cases")
    parser.add_argument("--replay", action="store_true", help="replay the requests, trace nothing")
    options = parser.parse_args(arguments)
    try:
        recording = load(options.recording)
        wanted = [case for case in cases() if re.search(options.only, case.key)]
        print(", ".join(f"{name} {value}" for name, value in recording.machine.items()))
        different, figures, elsewhere = _replay(recording, options.only)
        print(
            f"\n{figures} figures of recorded requests replayed: with the recorded addresses "
            f"{len(different)} figures differ, with a trace's {elsewhere}"
        )
        if different:
            print(tabulate(different, headers=("step", "counter", "replayed", "recorded")))
        if options.replay:
            return int(bool(different))
        errors, unknown, failed = compare(recording, wanted)
    except RecordingError as error:
        parser.error(str(error))
    print(f"\n{error_table(errors)}")
    beyond = [e for e in errors if abs(e.relative) > LIMITS.get(e.counter, float("inf"))]
    if beyond:
        rows = [
            (
                f"{error.case} {error.step} {error.phase}",
                error.counter.removesuffix("_bytes"),
                f"{error.traced:,}",
                f"{error.recorded:,}",
                f"{error.relative:+.2%}",
                ", ".join(unknown.get(error.case, ())) or "-",
            )
            for error in beyond
        ]
        headers = ("step", "counter", "traced", "recorded", "error", "workspaces not known")
        print(f"\nBeyond the limit\n{tabulate(rows, headers=headers, disable_numparse=True)}")
    if failed:
        print(f"\nNot traced\n{tabulate(failed, headers=('case', 'error'))}")
    return int(bool(different or beyond or failed or not errors))


def _replay(recording: Recording, only: str) -> tuple[list[tuple[str, str, int, int]], int, int]:
    """Return what differs with recorded addresses, the figures' number, what a trace's miss."""
    different: list[tuple[str, str, int, int]] = []
    count = elsewhere = 0
    options = recording.machine.get("alloc_conf") or ""
    for key, requests in recording.requests():
        figures = recording.figures(key)
        if figures is None or not re.search(only, key):
            continue
        count += 2 * sum(phase in figures.get(step, ()) for step, phase, _ in requests.bounds)
        own = CachingAllocator(parse_options(options))
        if str(recording.machine.get("torch", "")).startswith("2.11."):
            own.addresses = DriverAddresses()
        elsewhere += len(replay_differences(key, requests, figures, own))
        there = CachingAllocator(parse_options(options))
        there.addresses = RecordedAddresses(requests.segments)
        different += replay_differences(key, requests, figures, there)
    return different, count, elsewhere


if __name__ == "__main__":
    sys.exit(main())
