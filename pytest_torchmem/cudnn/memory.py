"""Answers on disk, one file for each version of cuDNN: a line for each question and GPU.

Several processes add lines to one file. A line that cannot be read, such as the half of one that
another process is writing, counts as an answer that is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from pytest_torchmem.cudnn.answers import Answer, ExecutionPlan
from pytest_torchmem.cudnn.installed import Version, version_text

_FORMAT = 1
"""To be counted up when questions, or what is taken from cuDNN's answers, change."""

Place = tuple[str, str, str]
"""A GPU, an operator and a geometry."""


def folder() -> Path:
    """Return where answers are kept, as the XDG base directory specification has it."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if named else Path.home() / ".cache") / "pytest-torchmem"


class DiskMemory:
    """The answers of one version of cuDNN, read when the first is asked for."""

    def __init__(self, version: Version) -> None:
        try:
            self._path: Path | None = folder() / f"cudnn-{version_text(version)}-v{_FORMAT}.jsonl"
        except RuntimeError:  # there is no home directory
            self._path = None
        self._found: dict[Place, Answer] | None = None

    def get(self, place: Place) -> Answer | None:
        """Return a remembered answer."""
        if self._found is None:
            self._found = self._read()
        return self._found.get(place)

    def add(self, place: Place, answer: Answer, on_disk: bool = True) -> None:
        """Remember an answer; where nothing can or shall be written, for this process alone."""
        if self._found is None:
            self._found = self._read()
        self._found[place] = answer
        plans = [[plan.workspace, plan.engine, plan.notes] for plan in answer.plans]
        line = json.dumps([*place, plans, answer.why], separators=(",", ":")) + "\n"
        if self._path is not None and on_disk:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab", buffering=0) as file:  # one write, at the end
                    file.write(line.encode())

    def _read(self) -> dict[Place, Answer]:
        found: dict[Place, Answer] = {}
        if self._path is None:
            return found
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return found
        for line in lines:
            with contextlib.suppress(ValueError, TypeError):
                gpu, operator, geometry, plans, why = json.loads(line)
                found[gpu, operator, geometry] = read_answer(plans, why)
        return found


def read_answer(plans: object, why: object) -> Answer:
    """Return an answer from what JSON has of it; raises ``TypeError`` and ``ValueError``."""
    if not isinstance(plans, list) or not isinstance(why, str):
        raise TypeError("not an answer")
    return Answer(
        tuple(
            ExecutionPlan(int(workspace), int(engine), tuple(map(str, notes)))
            for workspace, engine, notes in plans
        ),
        why,
    )
