"""What became of a program: the classes of the table, from what its process left behind."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Outcome(Enum):
    """What became of a traced program."""

    RUNS = "runs"
    ONE_SENTENCE = "one sentence"
    FAILS_BADLY = "fails badly"
    CRASH = "crash"
    TOO_LONG = "too long or too large"
    WRONG_BRANCH = "wrong branch"
    NOT_FOR_REAL = "not runnable for real either"


@dataclass(frozen=True)
class Run:
    """How one process of a program ended."""

    ended: str
    """``"ok"``, ``"raised"``, ``"signal"``, ``"limit"`` or ``"lost"`` (no word of how it went)."""
    error: str = ""
    """The class of the exception and the first lines of its message."""
    by_torchmem: bool = False
    """Whether the exception that reached the caller is one of this package, raised on purpose."""
    where: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] | None = None
    note: str = ""


def classify(real: Run, traced: Run, difference: str = "") -> Outcome:
    """Return what became of a program that ended so for real and so in a trace.

    ``difference`` says where the lines of the traced run part from those of the real one.
    """
    if real.ended != "ok":
        return Outcome.NOT_FOR_REAL
    if traced.ended in ("signal", "lost"):
        return Outcome.CRASH
    if traced.ended == "limit":
        return Outcome.TOO_LONG
    if traced.ended == "raised":
        return Outcome.ONE_SENTENCE if traced.by_torchmem else Outcome.FAILS_BADLY
    return Outcome.WRONG_BRANCH if difference else Outcome.RUNS
