"""Record what a real GPU's allocator counts in the steps of many models.

python -m benchmarks.truth.record OUT                      all models, as long as --seconds allows
python -m benchmarks.truth.record OUT                      again: what is missing
python -m benchmarks.truth.record OUT --only 'cnn/.*/float32$'
python -m benchmarks.truth.record --list
python -m benchmarks.truth.record OUT --device cpu --tiny  runs everything and counts nothing

It needs torch alone. Each case has a process of its own, which makes the model and counts two
steps. ``benchmarks/truth/recording.py`` describes what is written, and reads it.
"""

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import command
from benchmarks.truth.recording import (
    COUNTERS,
    STEPS,
    Bound,
    Recording,
    RecordingError,
    Requests,
    load,
    numbered,
)
from benchmarks.truth.settings import Case, build_inputs, build_model, cases, optimizer_of, run_step

_HISTORY = 4_000_000


class Meter(Protocol):
    """What counts."""

    device: torch.device

    def statistics(self) -> Mapping[str, int] | None:
        """Return what ``torch.cuda.memory_stats`` gives; None where nothing counts."""

    def reset_peaks(self) -> None:
        """Begin the peaks anew."""

    def start_history(self) -> None:
        """Write down requests from now on."""

    def history(self) -> Sequence[Any]:
        """Return what was written down so far."""

    def stop_history(self) -> None:
        """Write down no more."""


class CudaMeter:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def statistics(self) -> Mapping[str, int]:
        """Return the allocator's statistics, once all that was launched is done."""
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()

    def reset_peaks(self) -> None:
        """Begin the peaks anew."""
        torch.cuda.reset_peak_memory_stats()

    def start_history(self) -> None:
        """Write down requests from now on, without stacks."""
        torch.cuda.memory._record_memory_history(
            "all", context=None, max_entries=_HISTORY, clear_history=True
        )

    def history(self) -> Sequence[Any]:
        """Return the entries of this device."""
        found: Sequence[Any] = torch.cuda.memory._snapshot()["device_traces"][self.device.index]
        return found

    def stop_history(self) -> None:
        """Write down no more."""
        torch.cuda.memory._record_memory_history(None)


class NoMeter:
    """The CPU, where nothing counts."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def statistics(self) -> None:
        """Return nothing."""

    def reset_peaks(self) -> None:
        """Do nothing."""

    def start_history(self) -> None:
        """Do nothing."""

    def history(self) -> Sequence[Any]:
        """Return nothing."""
        return ()

    def stop_history(self) -> None:
        """Do nothing."""


def counted_steps(case: Case, meter: Meter, tiny: bool) -> tuple[dict[str, Any], Requests | None]:
    """Make a case's model and count two steps of it."""
    found: dict[str, Any] = {}
    marks: list[Bound] = []

    def mark(step: str, phase: str) -> None:
        now = meter.statistics()
        if now is None:
            return
        peaks, ends = _counted(now, "peak"), _counted(now, "current")
        if phase == "baseline":
            found[phase] = ends
        else:
            found.setdefault(step, {}).update({phase: peaks, f"{phase}_end": ends})
        marks.append((step, phase, len(meter.history())))
        meter.reset_peaks()

    meter.reset_peaks()
    meter.start_history()
    try:
        found["parameters"] = _run(case, meter, tiny, mark)
        history = meter.history()
    finally:
        meter.stop_history()
    return found, numbered(history, marks) if marks else None


def _run(case: Case, meter: Meter, tiny: bool, mark: Any) -> int:
    torch.manual_seed(0)
    with torch.device(meter.device):
        model, inputs = build_model(case, tiny), build_inputs(case, tiny)
    optimizer = optimizer_of(model.parameters()) if case.setting.train else None
    gc.collect()
    mark("first", "baseline")
    for step in STEPS:
        if step == "second" and optimizer is not None:
            optimizer.zero_grad()
            mark("first", "zero_grad")
        run_step(model, inputs, optimizer, lambda phase, step=step: mark(step, phase))  # type: ignore[misc]
    return sum(parameter.numel() for parameter in model.parameters())


def _counted(statistics: Mapping[str, int], part: str) -> dict[str, int]:
    return {name: statistics.get(f"{name}.all.{part}", 0) for name in COUNTERS}


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on, and when they were taken."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": gpu.name,
            "capability": [gpu.major, gpu.minor],
            "sms": gpu.multi_processor_count,
            "threads_per_sm": gpu.max_threads_per_multi_processor,
            "memory": gpu.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def record(
    recording: Recording, wanted: Sequence[Case], processes: int, device: str, seconds: float
) -> int:
    """Record the cases that are missing, and return how many are left when the time is up."""
    missing = [case for case in wanted if case.key not in recording.truth]
    begun = time.monotonic()
    left = 0
    with ThreadPoolExecutor(processes) as pool:

        def run(case: Case) -> dict[str, Any] | None:
            if time.monotonic() - begun > seconds:
                return None
            return _in_a_process(case, device, recording.machine["tiny"])

        for case, found in zip(missing, pool.map(run, missing), strict=True):
            if found is None:
                left += 1
                continue
            requests = found.pop("requests", None)
            recording.truth["machine"] |= found.pop("machine", {})
            if requests is not None:
                recording.append(case.key, requests)
            recording.truth[case.key] = found
            recording.save()
            print(f"{case.key:58s} {_line(found)}", flush=True)
    return left


def _in_a_process(case: Case, device: str, tiny: bool) -> dict[str, Any]:
    """Return the figures of a case, the machine's and the requests; or why there are none."""
    command = [sys.executable, "-m", "benchmarks.truth.record", "--case", case.key]
    command += ["--device", device, *(["--tiny"] if tiny else [])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:]
        return {"error": (last or [f"the process ended with {ended.returncode}"])[0][:300]}
    return json.loads(ended.stdout.splitlines()[-1])


def _line(found: Mapping[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])[:100]
    step = found.get("second", {})
    peaks = (
        f"{phase} {step[phase]['requested_bytes'] / 2**20:9.1f}"
        for phase in ("forward", "backward", "optimizer")
        if phase in step
    )
    return " ".join(peaks) + " MiB" if step else "ran"


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, and return 3 where cases are left for another run."""
    parser = command("truth.record", __doc__)
    parser.add_argument("out", type=Path, nargs="?", help="directory of the recording")
    parser.add_argument("--only", default="", help="regular expression for the cases")
    parser.add_argument("--seconds", type=float, default=450.0, help="begin no case after these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models that a test can afford")
    parser.add_argument("--processes", type=int, default=4, help="cases at a time")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    wanted = [case for case in cases() if re.search(options.only, case.key)]
    if options.case:  # in this process, for the one that records them all
        meter: Meter = CudaMeter() if options.device == "cuda" else NoMeter()
        case = next(case for case in wanted if case.key == options.case)
        found, requests = counted_steps(case, meter, options.tiny)
        found["machine"] = machine(meter.device)
        print(json.dumps(found | ({"requests": asdict(requests)} if requests else {})))
        return 0
    if options.list:
        print("\n".join(case.key for case in wanted))
        return 0
    if options.out is None:
        parser.error("name the directory of the recording")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu counts nothing")
    recording = Recording(options.out)
    if options.out.exists():
        try:
            recording = load(options.out)
        except RecordingError as error:
            print(f"begun anew: {error}")
    if recording.machine.get("tiny", options.tiny) != options.tiny:
        parser.error(f"{options.out} has models of another size: name another directory")
    recording.truth.setdefault("machine", {})["tiny"] = options.tiny
    left = record(recording, wanted, options.processes, options.device, options.seconds)
    if left:
        print(f"{left} cases are left: run it again with the same directory")
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
