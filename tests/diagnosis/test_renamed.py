"""A rename is no cause: snapshots are compared under the names that modules have now."""

from __future__ import annotations

import pytest

from pytest_torchmem.diagnosis.renamed import with_names_of
from pytest_torchmem.profile.facts import CALLS, INPUTS, LAYERS, PARAMETERS
from pytest_torchmem.snapshots.alive import Alive, Group, What
from pytest_torchmem.snapshots.format import Entry, Key

LAYER = "Linear(in_features=4) @0-3"


@pytest.mark.parametrize(
    ("now", "module"),
    [
        ({"Net": "Net", "Net.blocks.*": LAYER}, "Net.blocks.*"),
        ({"Model": "Model", "Model.layers.*": LAYER}, "Model.layers.*"),
        ({"All": "All", "All.net": "Net", "All.net.layers.*": LAYER}, "All.net.layers.*"),
        ({"Net": "Net", "Net.blocks.*": LAYER.replace("4", "8")}, "Net.layers.*"),
        ({"Net": "Net", "Net.a.*": LAYER, "Net.b.*": LAYER}, "Net.layers.*"),
    ],
    ids=["an attribute", "a class", "a wrapper", "another layer", "one of two"],
)
def test_modules_of_a_snapshot_have_the_names_of_today(now: dict[str, str], module: str) -> None:
    what = What("parameter", "Net.layers.*", "weight", "float32", (4, 4), "", 64)
    facts = {
        LAYERS: {"Net": "Net", "Net.layers.*": LAYER},
        CALLS: {"Net": "1"},
        INPUTS: {"input of Net": "float32[4]"},
        PARAMETERS: {"Net.layers.*": "is Net.layers.*"},
    }
    before = Entry(
        Key("test"), "2.13.0", "", {}, alive=Alive((Group(what, {"peak": 1}),)), facts=facts
    )
    found = with_names_of(before, {LAYERS: now})
    assert found.alive is not None
    assert found.alive.groups[0].what.module == module
    root = module.partition(".layers")[0].partition(".blocks")[0]
    assert found.facts[CALLS] == {root: "1"}
    assert found.facts[INPUTS] == {f"input of {root}": "float32[4]"}
    assert found.facts[PARAMETERS] == {module: f"is {module}"}
