"""Programs as hypothesis draws them, and by the seed that they are drawn with."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.isolation.sample import Sample
from benchmarks.programs.operators import BINARY, UNARY, UPDATES, VIEWS
from benchmarks.programs.program import DTYPES, Program, Step

QUIET = (HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large)
_NAMES: dict[str, tuple[str, ...]] = {
    "unary": tuple(UNARY),
    "binary": tuple(BINARY),
    "weighted": tuple(BINARY),
    "view": tuple(VIEWS),
    "update": tuple(UPDATES),
    "updated_sum": tuple(UPDATES),
    "drop": ("",),
    "function": ("",),
    "hook": ("observes", "replaces", "retains"),
    "backward": ("dense", "mean", "truncated"),
    "gradient": ("plain", "differentiable"),
}
_PURE = ("unary", "binary", "weighted", "view", "updated_sum", "function")
_NESTED: dict[str, tuple[str, ...]] = {
    "branch": ("",),
    "checkpointed": ("reentrant", "rerun"),
    "quiet": ("",),
    "saved": ("on_cpu", "cloned"),
}


def plain_steps(kinds: Iterable[str] = tuple(_NAMES)) -> st.SearchStrategy[Step]:
    """Return steps of the given kinds, without steps inside."""
    index = st.integers(0, 7)
    return st.one_of(
        [
            st.builds(Step, st.just(kind), st.sampled_from(_NAMES[kind]), index, index)
            for kind in kinds
        ]
    )


def nested_steps() -> st.SearchStrategy[Step]:
    """Return steps that run others: branches, checkpoints, ``no_grad`` and hooks on saved ones."""
    index = st.integers(0, 7)
    inner = st.lists(plain_steps(_PURE), min_size=1, max_size=4).map(tuple)
    return st.one_of(
        [
            st.builds(Step, st.just(kind), st.sampled_from(names), index, index, inner)
            for kind, names in _NESTED.items()
        ]
    )


def programs(
    sizes: tuple[int, ...] = (16, 34, 64),
    dtypes: tuple[str, ...] = tuple(DTYPES),
    most_steps: int = 12,
) -> st.SearchStrategy[Program]:
    """Return programs of matrices of one size and dtype; shrinking leads to fewer, simpler steps.

    Not every program can run: an update may destroy what a backward needs, which torch reports.
    """
    steps = st.lists(
        st.one_of(plain_steps(_PURE), plain_steps(), nested_steps()),
        min_size=1,
        max_size=most_steps,
    ).map(tuple)
    return st.builds(
        Program, st.sampled_from(sizes), st.sampled_from(dtypes), st.integers(1, 3), steps
    )


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
