"""Programs by the seed they are drawn with, so that every run has the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings

from benchmarks.isolation.sample import Sample
from benchmarks.programs.program import Program
from benchmarks.programs.strategies import programs

QUIET = (HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The programs that one seed gives."""

    seed: int
    count: int

    @property
    def case(self) -> str:
        """Return the chunk's name within a run."""
        return f"{self.seed}"


def drawn(start: int, count: int) -> list[Program]:
    """Return ``count`` different programs of a seed."""
    found: dict[Program, None] = {}

    @seed(start)
    @settings(
        max_examples=2 * count, phases=[Phase.generate], database=None, suppress_health_check=QUIET
    )
    @given(programs())
    def collect(program: Program) -> None:
        found[program] = None

    collect()
    return list(found)[:count]


def samples(chunk: Chunk, limit: int = 0) -> Iterator[Sample]:
    """Yield the chunk's programs as steps."""
    for index, program in enumerate(drawn(chunk.seed, chunk.count)):
        yield Sample(index, program, detail=str(program))
