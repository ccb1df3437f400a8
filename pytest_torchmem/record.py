"""What one check on one device came to, as it travels from a worker to the controller."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from pytest_torchmem.snapshot.compare import Change, Comparison, Verdict
from pytest_torchmem.snapshot.format import Entry, Key, entry_from_plain

_TUPLES = ("warnings", "unknown_workspaces", "grew")


class Outcome(str, Enum):
    """What a check on one device came to."""

    PASSED = "passed"
    SHRANK = "shrank"
    NEW = "new"
    UPDATED = "updated"
    GREW = "grew"
    MISSING = "no snapshot"
    OVER_BUDGET = "over budget"
    UNKNOWN_BYTES = "unknown bytes"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Record:
    """One check on one device. ``to_plain`` gives builtin types only: xdist sends nothing else."""

    nodeid: str
    file: str
    """The snapshot file, relative to the root with ``/``; empty where the check has none."""
    key: Key
    outcome: Outcome
    failed: bool = False
    figures: dict[str, int] = field(default_factory=dict)
    entry: Entry | None = None
    """What the snapshot would hold now; ``None`` where the check has no snapshot."""
    accepted: bool = False
    """An update may write ``entry``, once the test has passed."""
    changes: tuple[Change, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    headroom: int | None = None
    """What the GPU has left beyond the reserved peak; ``None`` where no GPU is named."""
    torch: str = ""
    torch_before: str = ""
    workload_changed: bool = False
    warnings: tuple[str, ...] = ()
    unknown_workspaces: tuple[str, ...] = ()
    """Operators whose kernels take what is not counted; one of the warnings names them too."""
    grew: tuple[dict[str, Any], ...] = ()
    """The modules and operators that grew, with their source lines."""
    message: str = ""
    advice: str = ""
    """What to do about it, often the same for several devices."""
    location: tuple[str, int] = ("", 0)
    """The file, relative to the root, and the line that reports point at."""

    def with_comparison(self, comparison: Comparison) -> Record:
        """Return this record with what a comparison found."""
        return replace(
            self,
            changes=comparison.changes,
            torch_before=comparison.torch_before,
            workload_changed=comparison.workload_changed,
        )

    def change(self, figure: str) -> Change | None:
        """Return how ``figure`` changed, ``None`` where nothing was compared."""
        return next((change for change in self.changes if change.figure == figure), None)

    def to_plain(self) -> dict[str, Any]:
        """Return this record of builtin types."""
        plain = asdict(replace(self, entry=None, changes=()))
        plain["outcome"] = self.outcome.value
        plain["entry"] = self.entry.to_plain() if self.entry is not None else None
        plain["changes"] = [
            {**asdict(change), "verdict": change.verdict.value} for change in self.changes
        ]
        plain["location"] = list(self.location)
        for name in _TUPLES:
            plain[name] = list(plain[name])
        return plain


def record_from_plain(plain: dict[str, Any]) -> Record:
    """Return the record that ``Record.to_plain`` gave."""
    changes = (
        Change(**{**change, "verdict": Verdict(change["verdict"])}) for change in plain["changes"]
    )
    return Record(
        **{
            **plain,
            "key": Key(**plain["key"]),
            "outcome": Outcome(plain["outcome"]),
            "entry": entry_from_plain(plain["entry"]) if plain["entry"] is not None else None,
            "changes": tuple(changes),
            **{name: tuple(plain[name]) for name in _TUPLES},
            "location": (plain["location"][0], plain["location"][1]),
        }
    )
