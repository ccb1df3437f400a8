"""Runs the programs, each in processes of its own with limits, and gathers what became of them."""

import functools
import json
import multiprocessing
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.programs_of_others.classify import Outcome, Run, classify
from benchmarks.programs_of_others.fetch import FetchError, fetch
from benchmarks.programs_of_others.lines import first_difference
from benchmarks.programs_of_others.manifest import HERE, Entry


@dataclass(frozen=True)
class Limits:
    """What one process may take."""

    seconds: float = 180.0
    resident: int = 4 << 30


@dataclass
class Settings:
    """How the corpus is run."""

    cache: Path
    mirrors: Path | None = None
    modes: tuple[str, ...] = ("cuda",)
    limits: Limits = field(default_factory=Limits)
    trace_options: dict[str, Any] = field(default_factory=dict)
    fresh: bool = False
    """Whether the real runs are made again where the cache remembers them."""


@dataclass(frozen=True)
class Verdict:
    """What became of one program in one mode."""

    name: str
    group: str
    mode: str
    outcome: Outcome
    error: str
    where: str
    seconds: float
    real_seconds: float
    peak: int | None
    warnings: int
    note: str
    """Where a program's lines on a GPU are others than on the CPU, though the trace is right."""


def run_all(
    entries: list[Entry], settings: Settings, jobs: int, tell: Callable[[Verdict], None]
) -> list[Verdict]:
    """Run every program for real and in each mode, ``jobs`` at a time."""
    verdicts: list[Verdict] = []

    def one(entry: Entry) -> None:
        for verdict in judge(entry, settings):
            verdicts.append(verdict)
            tell(verdict)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, entries))
    order = {entry.name: index for index, entry in enumerate(entries)}
    return sorted(verdicts, key=lambda verdict: order[verdict.name])


def judge(entry: Entry, settings: Settings) -> list[Verdict]:
    """Return what became of one program in each mode."""
    try:
        files = settings.cache
        if not entry.source.is_package:
            files = fetch(entry, settings.cache, settings.mirrors)
    except FetchError as error:
        lost = Run("raised", str(error))
        return [_verdict(entry, mode, lost, Run("lost"), "") for mode in settings.modes]
    real, real_lines = _real(entry, files, settings)
    verdicts = []
    for mode in settings.modes:
        if real.ended != "ok":
            verdicts.append(_verdict(entry, mode, real, Run("lost"), ""))
            continue
        traced, lines = start(entry, mode, files, settings)
        if entry.suite and mode == "cuda" and traced.ended == "ok":  # without markers, then with
            traced, _ = start(entry, "cpu", files, settings)
        difference = ""
        if entry.compare and mode != "pytest" and traced.ended == "ok":
            traced, difference = _compared(entry, mode, files, settings, real_lines, traced, lines)
        verdicts.append(_verdict(entry, mode, real, traced, difference))
    return verdicts


def _compared(
    entry: Entry,
    mode: str,
    files: Path,
    settings: Settings,
    real_lines: dict[str, Any],
    traced: Run,
    lines: dict[str, Any],
) -> tuple[Run, str]:
    """Return where the traced run parted from the real one, and notes on where it may.

    A program may do other things on a GPU: it errs if it parts on the fake CPU too.
    """

    def difference(where: str, found: dict[str, Any]) -> str:
        parted = first_difference(_placed(real_lines, files), _placed(found, files))
        if not parted:
            return ""
        # Some lines run once in a process: they fill a cache, or warn. A trace that runs a program
        # again with values may have been through these before. So both are compared once more in
        # processes that have been through the program for real, where it can be run twice.
        real, warm_lines = start(entry, "real warm", files, settings)
        warm, found = start(entry, f"{where} warm", files, settings)
        if real.ended != "ok" or warm.ended != "ok":
            return parted
        return first_difference(_placed(warm_lines, files), _placed(found, files))

    parted = difference(mode, lines)
    if parted and mode == "cuda":
        on_cpu, cpu_lines = start(entry, "cpu", files, settings)
        if on_cpu.ended == "ok":
            note = parted
            parted = difference("cpu", cpu_lines)
            if not parted:
                traced = replace(traced, note=note)
    return traced, parted


def _verdict(entry: Entry, mode: str, real: Run, traced: Run, difference: str) -> Verdict:
    outcome = classify(real, traced, difference)
    failed = real if outcome is Outcome.NOT_FOR_REAL else traced
    figures = traced.figures or {}
    return Verdict(
        name=entry.name,
        group=entry.group,
        mode=mode,
        outcome=outcome,
        error=difference or failed.error,
        where=failed.where,
        seconds=round(traced.seconds, 1),
        real_seconds=round(real.seconds, 1),
        peak=figures.get("peak"),
        warnings=len(figures.get("warnings", ())),
        note=traced.note,
    )


def _real(entry: Entry, files: Path, settings: Settings) -> tuple[Run, dict[str, Any]]:
    """Return the real run, from the cache if it has one of this entry and the code that runs it."""
    code = (HERE / "data.py").read_bytes() if entry.data else b""
    if entry.driver:
        code += (HERE / "drivers" / f"{entry.driver.partition(':')[0]}.py").read_bytes()
    key = f"{zlib.crc32(repr(entry).encode() + code):016x}"
    remembered = settings.cache / "real" / f"{entry.name}-{key}.json"
    if remembered.exists() and not settings.fresh:
        return _read(json.loads(remembered.read_text(encoding="utf-8")))
    real, lines = start(entry, "real", files, settings)
    if real.ended == "ok":
        remembered.parent.mkdir(parents=True, exist_ok=True)
        content = {"ended": "ok", "seconds": real.seconds, "lines": lines}
        remembered.write_text(json.dumps(content), encoding="utf-8")
    return real, lines


def start(entry: Entry, mode: str, files: Path, settings: Settings) -> tuple[Run, dict[str, Any]]:
    """Run one program in one mode in a process of its own."""
    work = settings.cache / "work" / f"{entry.name}-{mode.replace(' ', '-')}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    started = time.monotonic()
    process = processes().Process(
        target=_run_one, args=(entry, mode, files, work, settings.trace_options)
    )
    process.start()
    limit = _wait(process, settings.limits)
    seconds = time.monotonic() - started
    if limit:
        return Run("limit", limit, seconds=seconds), {}
    result = work / "result.json"
    if not result.exists():
        text = (work / "log.txt").read_text(encoding="utf-8", errors="replace")[-1500:]
        code = process.exitcode or 0
        error = f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}\n{text}"
        return Run("signal" if code < 0 else "raised", error, seconds=seconds), {}
    return _read(json.loads(result.read_text(encoding="utf-8")))


@functools.cache
def processes() -> ForkServerContext:
    """Return what starts processes, each a copy of one that has imported the large packages."""
    os.environ.update(
        PYTHONHASHSEED="0",
        MPLBACKEND="Agg",
        HF_HUB_OFFLINE="1",
        WANDB_MODE="disabled",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1",  # many programs are older than this default
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.programs_of_others.preloaded"])
    return context


def _run_one(*arguments: Any) -> None:
    from benchmarks.programs_of_others.one import main

    main(*arguments)


def _read(content: dict[str, Any]) -> tuple[Run, dict[str, Any]]:
    lines = content.pop("lines", {})
    return Run(**content), {
        name: {int(k): v for k, v in rows.items()} for name, rows in lines.items()
    }


def _wait(process: BaseProcess, limits: Limits) -> str:
    """Wait for the process, and end it if it takes more than its limits."""
    end = time.monotonic() + limits.seconds
    while process.is_alive():
        process.join(0.1)
        reason = ""
        if time.monotonic() > end:
            reason = f"longer than {limits.seconds:.0f} s"
        elif _resident(process.pid or 0) > limits.resident:
            reason = f"more than {limits.resident >> 30} GiB of memory"
        if reason:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
            return reason
    return ""


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _placed(lines: dict[str, Any], files: Path) -> dict[str, Any]:
    """Return the record with the files' full names, so that their text can be read."""
    return {
        name if name.startswith("/") else str(files / name): rows for name, rows in lines.items()
    }
