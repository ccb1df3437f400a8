"""Recorded steps beside traces of the same programs: the requests in order, and the peaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import pytest_torchmem as torchmem
from benchmarks.truth.published import programs
from benchmarks.truth.published.programs import MARK, Program, small
from benchmarks.truth.published.snapshots import History

PROGRAMS: Mapping[str, tuple[Program, str]] = {
    **{
        f"Wedsonlin/assignment2-systems results/medium_{length}_{kind}_memory_snapshot.pickle": (
            make(programs.Sizes(1024, 4096, 24, 16, length), autocast),  # the course's medium
            "a100",
        )
        for kind, make, settings in (
            ("inference", programs.inference, {128: False, 256: False, 512: True, 1024: False}),
            ("training", programs.training, {128: False, 256: False, 512: True, 1024: True}),
        )
        for length, autocast in settings.items()
    },
    **{
        "bolongcheng/assignment2-systems benchmarks/memory_snapshot_xl_fwd_"
        f"cl{length}_dtypetorch.{dtype}.pickle": (
            programs.forwards(
                programs.Sizes(2560, 10240, 32, 32, length),  # the course's xl
                dtype == "bfloat16",
                gradients,
            ),
            "a100",
        )
        for length, dtype, gradients in (
            (128, "float32", False),
            (2048, "float32", False),
            (512, "float32", True),
            (512, "bfloat16", True),
        )
    },
    "Charan6924/assignment2-systems cs336_systems/memory_snapshot.pickle": (
        programs.evaluations(small(512)),
        "a100",
    ),
    "MAGMA27/assignment2-systems memory_snapshot.pickle": (
        programs.accumulating(small(256, batch=32)),
        "a100",
    ),
    "HugePandaCoder/octree-nca-groupeq mem_snapshots/traditional_single_step.pickle": (
        programs.cell(),
        "a100",
    ),
    "shreyansh26/MLSys-Experiments model_memory_usage/profile_grad.pkl": (
        programs.linear(with_gradients=True),
        "h100",
    ),
    "shreyansh26/MLSys-Experiments model_memory_usage/profile_no_grad.pkl": (
        programs.linear(with_gradients=False),
        "h100",
    ),
}
"""Programs by repository and path, and a GPU of the kind that the recording shows.

None of these sources names its GPU. It decides nothing in these programs but cuBLAS's buffer, and
that is in the recordings: 8.125 MiB in all but the last two, which have the 32 MiB of sm90.
"""


PARTS = frozenset(
    {"HugePandaCoder/octree-nca-groupeq mem_snapshots/traditional_single_step.pickle"}
)
"""Recordings of which the program is the recorded part alone, and not what went before."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded step and its trace; bytes where nothing else is said."""

    requests: tuple[int, int]
    """How many were made: traced, recorded."""
    same: int
    """How many of them are the same, in order."""
    peak: tuple[int, int]
    """Of what was requested, above what was there when the recording began."""
    reserved: tuple[int, int]
    """The most that the process reserved until the recording's end: its trace begins with the
    process, and so with no segments."""
    unknown: tuple[str, ...]
    """Operators whose workspace the trace does not know."""


def compare(program: Program, gpu: str, history: History) -> Comparison:
    """Trace a program and compare it with its recording."""
    traced, reserved, unknown = traced_events(program, gpu, history.options)
    sign = {"alloc": 1, "free_completed": -1}
    recorded = [event.size * sign[event.action] for event in history.events if event.action in sign]
    ours, theirs = ([size for size in events if size > 0] for events in (traced, recorded))
    matching = SequenceMatcher(None, ours, theirs, autojunk=False)
    return Comparison(
        (len(ours), len(theirs)),
        sum(block.size for block in matching.get_matching_blocks()),
        (highest(traced), highest(recorded)),
        (reserved, sum(segment.size for segment in history.segments)),
        unknown,
    )


def traced_events(
    program: Program, gpu: str, allocator: str = ""
) -> tuple[list[int], int, tuple[str, ...]]:
    """Return what a trace requests (bytes) and frees (minus bytes) between a program's marks.

    And the process's reserved peak, and the operators whose workspace is not known.
    """
    profile = torchmem.trace(
        program, device="cuda", gpu=gpu, memory="unlimited", allocator=allocator
    )
    timeline = profile.timeline
    sizes = [
        timeline.allocations[abs(event) - 1].nbytes * (1 if event > 0 else -1)
        for event in timeline.events
    ]
    begin, end = (position for position, size in enumerate(sizes) if size == MARK)
    assert profile.reserved_peak is not None
    found = [size for size in sizes[begin + 2 : end] if size]
    return found, profile.reserved_peak, profile.unknown_workspaces


def highest(events: Sequence[int]) -> int:
    """Return the most bytes that were alive above those at the beginning."""
    live = most = 0
    for size in events:
        live += size
        most = max(most, live)
    return most
