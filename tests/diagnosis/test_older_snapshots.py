"""Snapshots of schema 3, whose facts are texts: read as what the same programs have today."""

from pathlib import Path

import pytest
import torch

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.profile.facts import Topic
from pytest_torchmem.snapshots.format import Entry, Key, load
from tests.diagnosis.planted import PLANTED
from tests.diagnosis.test_planted import profile_of

OLDER = Path(__file__).with_name("schema_3.json")
"""The facts of planted programs before their regressions, as version 3 of the format had them."""


def _programs() -> list[object]:
    entries = load(OLDER.read_text()).entries
    return [pytest.param(key, entry, id=key.test) for key, entry in entries.items()]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="layers say other things")
@pytest.mark.parametrize(("key", "entry"), _programs())
def test_facts_are_those_of_the_program_today(key: Key, entry: Entry) -> None:
    build = next(one.build for one in PLANTED if one.name == key.test)
    found = profile_of(build(False), key.device).facts
    lines = (Topic.BACKWARD, Topic.CALLS, Topic.COMPILED)  # which move with the programs
    assert entry.facts.keys() == found.keys()
    assert {t: found[t] for t in found if t not in lines} == {
        t: entry.facts[t] for t in found if t not in lines
    }
    for topic in lines:
        numbers = ({n: c.number for n, c in e.get(topic, {}).items()} for e in (found, entry.facts))
        assert next(numbers) == next(numbers)


def test_facts_that_no_version_wrote_are_refused() -> None:
    text = OLDER.read_text()
    for wrong in (
        '"inputs": 7',
        '"inputs": {"x": 7}',
        '"layers": {"x": "?"}',
        '"calls": {"x": "y"}',
    ):
        name = wrong.partition(":")[0]
        with pytest.raises(SnapshotError, match="facts"):
            load(text.replace(f"{name}: {{", f'{wrong}, {name[:-1]} ": {{', 1))
