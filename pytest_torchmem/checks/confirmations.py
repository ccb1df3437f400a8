"""What checks came to in processes in which torch's own CUDA code runs on the stand-in.

Such a process runs the same tests, measures their checks on cuda, and leaves what it measured in
files, from which the run that was asked for takes them.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_torchmem.checks.gpu import RealRun, not_measured
from pytest_torchmem.snapshots.format import Key

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


@dataclass(frozen=True, slots=True)
class Confirmations:
    """A directory with what was measured of each check, and with what became of each test."""

    directory: Path
    gpu: str = ""
    """The GPU that this process measures for, "" where it only reads."""

    def of(
        self, test: str, key: Key, traced: MemoryProfile, measure: Callable[[], RealRun | None]
    ) -> RealRun | None:
        """Return what was measured of a check, or measure it; a process measures for one GPU.

        ``test`` is the test's node id.
        """
        path = self._path("check", test, key.name, key.gpu)
        if self.gpu and self.gpu != key.gpu:
            self._path("gpu", key.gpu).write_text(key.gpu, encoding="utf-8")
            return None
        if self.gpu:
            found = measure()
            _write(path, pickle.dumps(found))
            return found
        if not path.is_file():
            why = self.why_not(test, key.gpu) or "the test did not come to this check there"
            return not_measured(key.gpu, why, on_stand_in=True)
        run: RealRun | None = pickle.loads(path.read_bytes())
        if run is None or not run.measurement.figures:
            return run
        estimate = dict(traced.figures())
        return replace(run, measurement=replace(run.measurement, estimate=estimate))

    def gpus(self) -> list[str]:
        """Return the GPUs that checks named, and that no process has measured for yet."""
        found = sorted(path.read_text(encoding="utf-8") for path in self.directory.glob("gpu-*"))
        return [gpu for gpu in found if not self._path("done", gpu).exists()]

    def finish(self, gpu: str) -> None:
        """Take note that everything is measured for a GPU."""
        self._path("done", gpu).touch()

    def begin(self, test: str) -> None:
        """Take note that a test begins."""
        _write(self._path("test", test, self.gpu), test.encode())

    def has_begun(self, test: str) -> bool:
        """Tell whether a test has begun: if its process is gone, the test ended it."""
        return self._path("test", test, self.gpu).exists()

    def ended(self, test: str) -> bool:
        """Tell whether it is known how a test ended."""
        return self._path("why", test, self.gpu).exists()

    def end(self, test: str, why: str) -> None:
        """Take note of how a test ended: "" if it passed."""
        _write(self._path("why", test, self.gpu), why.encode())

    def why_not(self, test: str, gpu: str) -> str:
        """Return how a test ended, "" where nothing is known of it."""
        path = self._path("why", test, gpu)
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def lost(self, gpu: str, why: str) -> int:
        """Let tests that began and did not end have ended so; return how many have begun."""
        serving = replace(self, gpu=gpu)
        begun = [path.read_text(encoding="utf-8") for path in self.directory.glob("test-*")]
        begun = [test for test in begun if serving.has_begun(test)]
        for test in begun:
            if not serving.ended(test):
                serving.end(test, why)
        return len(begun)

    def last_sign(self, since: float) -> float:
        """Return when a test last began or ended since then; infinite before the first one."""
        signs = (path.stat().st_mtime for path in self.directory.glob("[tw]*-*"))
        return max((sign for sign in signs if sign >= since), default=math.inf)

    def _path(self, kind: str, *parts: str) -> Path:
        return self.directory / f"{kind}-{sha256(repr(parts).encode()).hexdigest()[:24]}"


def _write(path: Path, content: bytes) -> None:
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.write_bytes(content)
    whole.replace(path)
