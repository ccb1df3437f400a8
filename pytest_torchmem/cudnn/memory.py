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
    """Return where answers are kept, as the XDG base directory specification has it.

    Raises ``RuntimeError`` where there is no home directory.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "pytest-torchmem"


class DiskMemory:
    """The answers of one version of cuDNN, read when the first is asked for.

    A line is looked at when its answer is wanted: a file may have those of many projects.
    """

    def __init__(self, version: Version) -> None:
        try:
            self._path: Path | None = folder() / f"cudnn-{version_text(version)}-v{_FORMAT}.jsonl"
        except RuntimeError:  # there is no home directory
            self._path = None
        self._found: dict[Place, Answer] = {}
        self._lines: dict[str, str] | None = None

    def get(self, place: Place) -> Answer | None:
        """Return a remembered answer."""
        found = self._found.get(place)
        if found is None:
            if self._lines is None:
                self._lines = self._read()
            line = self._lines.pop(_beginning(place), None)
            found = None if line is None else _answer_of(line)
            if found is not None:
                self._found[place] = found
        return found

    def add(self, place: Place, answer: Answer, on_disk: bool = True) -> None:
        """Remember an answer; where nothing can or shall be written, for this process alone."""
        self._found[place] = answer
        plans = [[plan.workspace, plan.engine, plan.notes] for plan in answer.plans]
        line = json.dumps([*place, plans, answer.why], separators=(",", ":")) + "\n"
        if self._path is not None and on_disk:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab", buffering=0) as file:  # one write, at the end
                    file.write(line.encode())

    def _read(self) -> dict[str, str]:
        """Return the lines by what they begin with; of several, the last."""
        if self._path is None:
            return {}
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return {}
        return {line.partition(_PLANS)[0]: line for line in text.split("\n")}


_PLANS = '",['
"""What stands between a geometry and its plans, and nowhere before it: quotation marks in a text
are escaped."""


def _beginning(place: Place) -> str:
    return json.dumps(place, separators=(",", ":"))[:-2]


def _answer_of(line: str) -> Answer | None:
    try:
        *_, plans, why = json.loads(line)
        return read_answer(plans, why)
    except (ValueError, TypeError, RecursionError):
        return None


def read_answer(plans: object, why: object) -> Answer:
    """Return an answer from what JSON has of it; raises ``TypeError`` and ``ValueError``."""
    if not isinstance(plans, list) or not isinstance(why, str):
        raise TypeError("not an answer")
    return Answer(tuple(_read_plan(*plan) for plan in plans), why)


def _read_plan(workspace: object, engine: object, notes: list[object]) -> ExecutionPlan:
    if not isinstance(workspace, int) or not isinstance(engine, int) or workspace < 0:
        raise ValueError("not a plan")
    return ExecutionPlan(workspace, engine, tuple(map(str, notes)))
