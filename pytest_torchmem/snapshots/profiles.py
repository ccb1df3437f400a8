"""What a snapshot would hold of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pytest_torchmem.profile.outline import outline_of
from pytest_torchmem.snapshots.alive import Alive, alive_of
from pytest_torchmem.snapshots.format import Entry, Key, Measured

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


def entry_of(
    key: Key,
    profile: MemoryProfile,
    alive: Alive | None = None,
    measured: Mapping[str, Measured] | None = None,
) -> Entry:
    """Return the entry of a profile; ``alive`` is what was alive at its moments, if it is known."""
    found = alive_of(profile) if alive is None else alive
    return Entry(
        key,
        torch=profile.torch_version.partition("+")[0],
        workload=profile.workload,
        figures=profile.figures(),
        alive=found.shortened() if found.moments else None,
        facts=profile.facts,
        timeline=outline_of(profile.timeline),
        measured=measured or {},
    )
