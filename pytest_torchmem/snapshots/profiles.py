"""What a snapshot would hold of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pytest_torchmem.profile.later import Later
from pytest_torchmem.profile.outline import outline_of
from pytest_torchmem.snapshots.alive import Alive, alive_of
from pytest_torchmem.snapshots.format import Entry, Key, Measured

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


def entry_of(
    key: Key,
    profile: MemoryProfile,
    alive: Callable[[], Alive] | None = None,
    measured: Mapping[str, Measured] | None = None,
) -> Entry:
    """Return the entry of a profile, whose explanation is computed when it is read.

    ``alive`` tells what was alive at the profile's moments, if that may be known already.
    """

    def shortened() -> Alive | None:
        found = alive_of(profile) if alive is None else alive()
        return found.shortened() if found.moments else None

    return Entry(
        key,
        torch=profile.torch_version.partition("+")[0],
        workload=profile.workload,
        figures=profile.figures(),
        alive=cast(Any, Later(shortened)),
        facts=cast(Any, Later(lambda: profile.facts)),
        timeline=cast(Any, Later(partial(outline_of, profile.timeline))),
        measured=measured or {},
    )
