"""Runs units in worker processes, restarts them when they crash or hang, and keeps every result."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.comparison import Comparison, Status
from benchmarks.isolation.sample import Source, Unit
from benchmarks.isolation.worker import Run, work


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of everything a run may take."""

    samples: int = 0
    """Samples per unit, 0 for all."""
    seconds: float = 60.0
    """Time for one sample, the worker's start included."""
    threads: int = 2
    """Threads that torch uses in a worker; kernels' buffers depend on it."""
    units_per_process: int = 60


class Supervisor:
    """Hands units to worker processes and calls ``keep`` with each comparison."""

    def __init__(
        self,
        found: Sequence[Unit],
        source: Source,
        limits: Limits,
        keep: Callable[[Comparison], None],
        run: Run | None = None,
    ) -> None:
        self._waiting = deque(found)
        self._source = source
        self._limits = limits
        self._keep = keep
        self._run_sample = run
        self._lock = threading.Lock()

    def run(self, processes: int) -> None:
        """Run all units and return when the last has finished."""
        threads = [threading.Thread(target=self._attend) for _ in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _next(self) -> Unit | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _attend(self) -> None:
        worker = _Worker(self._source, self._limits, self._run_sample)
        try:
            while (unit := self._next()) is not None:
                first: int | None = 0
                while first is not None:
                    if worker.left <= 0:
                        worker.stop()
                        worker = _Worker(self._source, self._limits, self._run_sample)
                    first = self._run(worker, unit, first)
                    if first is not None:
                        worker.stop()
                        worker = _Worker(self._source, self._limits, self._run_sample)
        finally:
            worker.stop()

    def _run(self, worker: _Worker, unit: Unit, first: int) -> int | None:
        """Run a unit from sample ``first`` on, and return where to go on if the worker is lost."""
        case, detail, start = f"{unit.case}/samples", "", time.monotonic()
        lost = Status.CRASHED
        try:
            worker.begin(unit, first)
            while True:
                if not worker.connection.poll(self._limits.seconds):
                    raise TimeoutError
                message: tuple[str, Any, str] = worker.connection.recv()
                if message[0] == "done":
                    return None
                if message[0] == "begin":
                    case, detail, start = message[1], message[2], time.monotonic()
                    lost = Status.SKIPPED  # the real step comes first: it is torch that crashes
                elif message[0] == "measured":
                    lost = Status.CRASHED
                else:
                    with self._lock:
                        self._keep(Comparison.from_json(message[1]))
        except TimeoutError:
            error = f"no answer in {self._limits.seconds:.0f} s"
        except (EOFError, OSError):
            worker.process.join(5)
            error = f"the process ended with {worker.process.exitcode}"
        seconds = round(time.monotonic() - start, 4)
        with self._lock:
            self._keep(Comparison(case, lost, error=error, seconds=seconds, detail=detail))
        index = case.rpartition("/")[2]
        return int(index) + 1 if index.isdigit() else None


class _Worker:
    """One spawned process and the pipe to it."""

    def __init__(self, source: Source, limits: Limits, run: Run | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, source, limits.samples, limits.threads, run)
        self.process = context.Process(target=work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.left = limits.units_per_process

    def begin(self, unit: Unit, first: int) -> None:
        self.left -= 1
        self.connection.send((unit, first))

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
