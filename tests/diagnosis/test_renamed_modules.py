"""Snapshots that were written under other names of modules."""

from dataclasses import replace

import pytest

from pytest_torchmem.diagnosis.names import with_names_of
from pytest_torchmem.profile.facts import Calls, Geometry, Layer, Topic
from pytest_torchmem.snapshots.alive import Alive, Group, What
from pytest_torchmem.snapshots.format import Entry, Key

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
    ],
    ids=["an attribute", "a class", "a wrapper", "deeper", "another layer", "one of two"],
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
