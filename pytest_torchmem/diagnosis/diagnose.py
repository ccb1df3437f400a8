"""One growth explained: the moment, what is different there, and the causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_torchmem.diagnosis import rules  # noqa: F401
from pytest_torchmem.diagnosis.causes import OF_BACKWARD, Cause, Evidence, Watched, find_causes
from pytest_torchmem.diagnosis.difference import MomentDifference, Row, difference, with_names_of
from pytest_torchmem.diagnosis.provenance import NOTHING_RAN, Provenance
from pytest_torchmem.diagnosis.rules.setup import shown_geometries
from pytest_torchmem.figures import PEAK
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.timeline import Origin
from pytest_torchmem.snapshots.alive import Alive
from pytest_torchmem.snapshots.format import Entry

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


class Told(NamedTuple):
    """What a run said of a growth: the figure, its bytes before and now, why, and where."""

    moment: str
    before: int
    now: int
    why: str
    where: str

    def is_of(self, found: MomentDifference) -> bool:
        """Tell whether it is about this growth."""
        return self[:3] == (found.moment, found.before, found.now)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What grew at the moment that grew most, and why where it can be told."""

    difference: MomentDifference
    causes: tuple[Cause, ...] = ()
    inputs: tuple[tuple[str, str, str], ...] = field(default=())
    """Inputs that changed: name, then and now."""
    callers: Mapping[str, str] = field(default_factory=dict)
    """Outermost modules of installed libraries, and the program's lines that call them."""
    library_lines: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By modules and lines of installed libraries: the program's that call them."""
    functions: Mapping[tuple[str, str, str], str] = field(default_factory=dict)
    """By module, operator and line: the function of another name that the source calls there."""
    written: Origin | None = None
    """The operator of the forward whose backward made what stands for the growth."""
    told: Told | None = None
    """What the run said of this very growth, which knew more than its report."""

    @property
    def leading_row(self) -> Row | None:
        """The row that stands for the growth: that of the first cause, else the largest."""
        for cause in self.causes[:1]:
            if cause.row is not None:
                return cause.row
        return next(iter(self.difference.came), None)

    @property
    def origin(self) -> Origin | None:
        """Who is to blame, where that is another one than who made the leading row."""
        named = next((cause.origin for cause in self.causes[:1]), None)
        return named or self.written


def _with_peak(entry: Entry) -> Entry:
    """Return an entry with what was alive at the overall peak, where that was a phase's."""
    alive, figures = entry.alive, entry.figures
    if alive is None or PEAK in alive.moments or PEAK not in figures:
        return entry
    same = next((name for name in alive.moments if figures.get(name) == figures[PEAK]), None)
    return entry if same is None else replace(entry, alive=alive.with_moment(PEAK, same))


def diagnose(
    before: Entry,
    now: Entry,
    moment: str,
    alive: Alive | None = None,
    profile: MemoryProfile | None = None,
    watched: Watched | None = None,
    told: Told | None = None,
) -> Diagnosis:
    """Return what grew at ``moment`` and why.

    ``alive`` is everything that is alive now, where more is known than the entry keeps, and
    ``profile`` what ran; ``told`` is what a run said of its growth, if it is this one.
    """
    whole = alive or now.alive or Alive()
    before = _with_peak(before) if moment == PEAK else before
    before = with_names_of(before, now.facts)
    found = difference(before, whole, moment)
    ran = NOTHING_RAN
    if profile is not None:
        ran = Provenance(profile.timeline, profile.calls or (), dict(profile.broadcasts))
    evidence = Evidence(before, now, found, whole, ran, watched or Watched())
    inputs = [change for change in evidence.facts if change.topic == "inputs"]
    said = Diagnosis(
        found,
        find_causes(evidence),
        tuple((c.name, shown_geometries(c.before), shown_geometries(c.now)) for c in inputs),
        dict(profile.callers) if profile is not None else {},
        profile.library_lines if profile is not None else {},
        _functions_of(profile) if profile is not None else {},
        told=told if told is not None and told.is_of(found) else None,
    )
    row = said.leading_row
    if row is None or row.what.role not in OF_BACKWARD or not row.what.line:
        return said
    return replace(said, written=ran.written(row.what.module, row.what.source, row.what.line))


def _functions_of(profile: MemoryProfile) -> dict[tuple[str, str, str], str]:
    found: dict[tuple[str, str, str], str] = {}
    for origin, name in profile.functions:
        found.setdefault((fold(origin.module)[0], origin.operator, origin.line), name)
    return found
