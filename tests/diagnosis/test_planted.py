"""Every rule recognises its planted regression, on both devices, from what a snapshot keeps."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pytest_torchmem import trace
from pytest_torchmem.checks.findings import Changed, Outcome
from pytest_torchmem.checks.result import CheckResult, SnapshotResult
from pytest_torchmem.diagnosis.diagnose import Diagnosis, diagnose, grown_moment
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.reports.text import message
from pytest_torchmem.snapshots.alive import alive_of
from pytest_torchmem.snapshots.compare import compare
from pytest_torchmem.snapshots.format import Entry, Key, Snapshot, dump, load
from pytest_torchmem.snapshots.profiles import entry_of
from pytest_torchmem.snapshots.tolerance import BUILT_IN
from tests.diagnosis.planted import PLANTED, Planted, Program


def profile_of(step: tuple[Any, ...], device: str) -> MemoryProfile:
    target, args, options = step
    if isinstance(target, Program):
        return trace(functools.partial(target.run, device), device=device)
    return trace(target, *args, **options, device=device)


def stored(entry: Entry) -> Entry:
    """Return an entry as it comes back from its file."""
    return load(dump(Snapshot({entry.key: entry}))).entries[entry.key]


def told(planted: Planted, device: str) -> tuple[str, Diagnosis]:
    key = Key("test_it", device=device, gpu="a100-80gb" if device == "cuda" else "")
    before = stored(entry_of(key, profile_of(planted.build(False), device)))
    profile = profile_of(planted.build(True), device)
    alive = alive_of(profile)
    now = entry_of(key, profile, alive)
    comparison = compare(before, now, [BUILT_IN])
    moment = grown_moment(comparison)
    assert moment, comparison
    found = diagnose(before, now, moment, alive, dict(profile.broadcasts))
    finding = Changed(outcome=Outcome.GREW, comparison=comparison, diagnosis=found)
    snapshot = SnapshotResult("file", now, comparison, before, found)
    return message(CheckResult(key, (finding,), snapshot=snapshot)), found


@pytest.mark.parametrize(
    ("planted", "device"),
    [
        pytest.param(one, device, id=f"{one.name}-{device}")
        for one in PLANTED
        for device in one.devices
    ],
)
def test_the_first_two_lines_name_cause_module_operator_and_line(
    planted: Planted, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    text, found = told(planted, device)
    first, second = text.splitlines()[:2]
    print(text)
    assert first.startswith("+")
    assert [one.rule for one in found.causes][:1] == [planted.rule]
    assert planted.words in first
    assert planted.module in second
    assert planted.operator in second
    assert second.endswith(planted.line)
    difference = found.difference
    assert sum(row.change for row in difference.rows) + difference.rest == difference.change
