"""How long reports of a profile with millions of events take, and how much memory.

    python -m benchmarks.large_profiles --events 1000000

A step of a small network is traced once; its events and calls are repeated until there are so many,
as a long rollout has them. Each report is asked for in a process of its own, which has the profile
from the beginning, but for ``load``, which makes it. Processor time, and the most memory that such
a process has held.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tabulate import tabulate
from torch import nn

import pytest_torchmem as torchmem
from benchmarks import command as parser_of
from benchmarks.conformance.report import machine
from pytest_torchmem.profile.profile import MemoryProfile, figures_of
from pytest_torchmem.profile.timeline import Allocation, OperatorCall, Phase, Timeline


def repeated(step: MemoryProfile, events: int) -> MemoryProfile:
    """Return the profile of a step whose course is repeated until it has ``events`` events."""
    timeline = step.timeline
    start = next(place for place, phase in timeline.phases if phase is not Phase.BASELINE)
    before, course = timeline.events[:start], list(timeline.events[start:])
    freed = {-event for event in course if event < 0}
    course += [-event for event in course if event > 0 and event not in freed]
    born = sum(event > 0 for event in before)
    made = len(timeline.allocations) - born
    phases = [one for one in timeline.phases if one[0] >= start]
    calls = [call for call in step.calls or () if call.start >= start]
    nodes = max((abs(call.node) for call in calls), default=0)
    allocations: list[Allocation] = list(timeline.allocations)
    all_events, all_calls = list(before), list[OperatorCall]()
    all_phases = [one for one in timeline.phases if one[0] < start]
    for turn in range((events - len(before)) // len(course)):
        number, place = turn * made, turn * len(course)
        if turn:
            allocations += timeline.allocations[born:]
        all_events += [_moved(event, number, born) for event in course]
        all_phases += [(one + place, phase) for one, phase in phases]
        all_calls += [
            call._replace(
                start=call.start + place,
                stop=call.stop + place,
                reads=tuple(_moved(index, number, born) for index in call.reads),
                node=_moved(call.node, turn * nodes, 0) if call.node else 0,
            )
            for call in calls
        ]
    whole = Timeline(tuple(allocations), tuple(all_events), tuple(all_phases))
    return replace(step, timeline=whole, calls=tuple(all_calls), **figures_of(whole))


def _moved(event: int, number: int, born: int) -> int:
    """Return an event of a later repetition; what was there before is the same in all of them."""
    if abs(event) <= born:
        return event
    return event + number if event > 0 else event - number


def reports(profile: MemoryProfile, directory: Path) -> dict[str, Callable[[], object]]:
    """Return what is asked of a profile, by name."""
    return {
        "live_at_peak": profile.live_at_peak,
        "by_module": profile.by_module,
        "by_line": profile.by_line,
        "plan": profile.plan,
        "node_table": profile.node_table,
        "save": lambda: profile.save(directory / "profile.json"),
        "to_csv": lambda: profile.to_csv(directory / "profile.csv"),
        "to_trace_events": lambda: profile.to_trace_events(directory / "trace.json"),
        "to_html": lambda: profile.to_html(directory / "page.html"),
        "to_memory_snapshot": lambda: profile.to_memory_snapshot(directory / "snapshot.pickle"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how long each report takes."""
    parser = parser_of("large_profiles", __doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--only", nargs="*", help="some reports, by name")
    parser.add_argument("--load", type=Path, help="only read this file, and print JSON")
    options = parser.parse_args(arguments)
    if options.load:
        found = _taken(lambda: torchmem.MemoryProfile.load(options.load))
        print(json.dumps(found))
        return 0
    network = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    step = torchmem.trace(network, torch.zeros(16, 64))
    profile = repeated(step, options.events)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{len(profile.timeline.events):,} events, {len(profile.calls or ()):,} calls")
    rows = [("the profile itself", "", f"{_resident():.2f}")]
    with TemporaryDirectory() as folder:
        for name, report in reports(profile, Path(folder)).items():
            wanted = not options.only or name in options.only
            loads = name == "save" and (not options.only or "load" in options.only)
            if wanted or loads:
                rows.append(_row(name, *_in_own_process(report)))
            if loads:  # in a process that has nothing else
                command = [sys.executable, "-m", "benchmarks.large_profiles", "--load"]
                told = subprocess.check_output([*command, str(Path(folder) / "profile.json")])
                rows.append(_row("load", *json.loads(told.splitlines()[-1])))
    headers = ("report", "seconds", "most held, GiB")
    print(tabulate(rows, headers=headers, disable_numparse=True, stralign="right"))
    return 0


def _row(name: str, seconds: float, held: float) -> tuple[str, str, str]:
    return name, f"{seconds:.2f}", f"{held:.2f}"


def _in_own_process(report: Callable[[], object]) -> tuple[float, float]:
    """Return what a report takes in a process that this one forks: seconds and GiB."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(_taken(report)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        seconds, held = json.loads(answer.read())
    os.waitpid(child, 0)
    return seconds, held


def _taken(report: Callable[[], object]) -> tuple[float, float]:
    start = time.process_time()
    made = report()
    seconds = time.process_time() - start
    del made
    return seconds, _resident()


def _resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    sys.exit(main())
