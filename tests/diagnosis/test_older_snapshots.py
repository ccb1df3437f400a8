"""Snapshots that were written before: of schema 3, and under other names of modules."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pytest_torchmem.diagnosis.names import with_names_of
from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.profile.facts import Calls, Geometry, Layer, Topic
from pytest_torchmem.snapshots.alive import Alive, Group, What
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
    found = dict(profile_of(build(False), key.device).facts)
    settings = found.pop(Topic.SETTINGS, {})  # version 3 knew of none of torch.compile()
    settings = {n: one for n, one in settings.items() if not n.startswith("torch.compile")}
    found |= {Topic.SETTINGS: settings} if settings else {}
    lines = (Topic.BACKWARD, Topic.CALLS, Topic.COMPILED)  # which move with the programs
    assert entry.facts.keys() == found.keys()
    assert [t for t in found if t not in lines and found[t] != entry.facts[t]] == []
    for topic in lines:
        numbers = ({n: c.number for n, c in e.get(topic, {}).items()} for e in (found, entry.facts))
        assert next(numbers) == next(numbers)


def test_facts_that_no_version_wrote_are_refused() -> None:
    text = OLDER.read_text()
    for bad in ('"inputs": 7', '"inputs": {"x": 7}', '"layers": {"x": "?"}', '"calls": {"x": "y"}'):
        name = bad.partition(":")[0]
        with pytest.raises(SnapshotError, match="facts"):
            load(text.replace(f"{name}: {{", f'{bad}, {name[:-1]} ": {{', 1))


LAYER = (Layer("nn.Linear", {"in_features": 4}, "0-3"),)
NET = (Layer("Net", {}),)
GIVEN = (Geometry("float32", (4,)),)


@pytest.mark.parametrize(
    ("now", "module"),
    [
        ({"Net": NET, "Net.blocks.*": LAYER}, "Net.blocks.*"),
        ({"Model": NET, "Model.layers.*": LAYER}, "Model.layers.*"),
        ({"All": NET, "All.net": NET, "All.net.layers.*": LAYER}, "All.net.layers.*"),
        ({"Net": NET, "Net.blocks.*": (LAYER[0]._replace(numbers="0-7"),)}, "Net.blocks.*"),
        ({"Net": NET, "Net.blocks.*": (LAYER[0]._replace(kind="nn.Conv2d"),)}, "Net.layers.*"),
        ({"Net": NET, "Net.a.*": LAYER, "Net.b.*": LAYER}, "Net.layers.*"),
        ({"Net": NET, "Net.layers_a.*": LAYER, "Net.b.*": LAYER}, "Net.layers_a.*"),
    ],
    ids=["an attribute", "a class", "wrapper", "deeper", "another", "one of two", "like one"],
)
def test_modules_of_a_snapshot_have_the_names_of_today(now, module):
    what = What("parameter", "Net.layers.*", "weight", "float32", (4, 4), "", 64)
    facts = {
        Topic.LAYERS: {"Net": NET, "Net.layers.*": LAYER},
        Topic.CALLS: {"Net": Calls(1)},
        Topic.INPUTS: {"input of Net": GIVEN},
        Topic.TIED: {"Net.layers.*": "Net.layers.*"},
    }
    alive = Alive((Group(what, {"peak": 1}),))
    before = Entry(Key("test"), "2.13.0", "", {}, alive=alive, facts=facts)
    found, *_ = with_names_of(before, replace(before, facts={Topic.LAYERS: now}))
    assert found.alive.groups[0].what.module == module
    root = module.partition(".layers")[0].partition(".blocks")[0]
    assert found.facts[Topic.CALLS] == {root: Calls(1)}
    assert found.facts[Topic.INPUTS] == {f"input of {root}": GIVEN}
    assert found.facts[Topic.TIED] == {module: module}
