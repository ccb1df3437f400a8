"""What is found decides the outcome, without pytest; reports make the text of it."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from pytest_torchmem.checks.request import Limit
from pytest_torchmem.checks.result import (
    Changed,
    CheckResult,
    Finding,
    Missing,
    Outcome,
    OverBudget,
    SnapshotResult,
    overruns,
)
from pytest_torchmem.figures import (
    ALLOCATOR_PEAKS,
    FIGURES,
    HOST,
    JUDGED,
    MEASURED,
    PEAKS,
    PHASE_PEAKS,
    SELECTORS,
)
from pytest_torchmem.profile.facts import Stretch
from pytest_torchmem.profile.timeline import Later
from pytest_torchmem.reports.text import advice, message
from pytest_torchmem.snapshots.alive import Alive
from pytest_torchmem.snapshots.compare import compare
from pytest_torchmem.snapshots.format import Entry, Key
from pytest_torchmem.snapshots.tolerance import BUILT_IN, find_rule

KEY = Key("test_it", device="cpu")
NEW = Finding(outcome=Outcome.NEW, fails=False)
UPDATED = Finding(outcome=Outcome.UPDATED, fails=False)
MISSING = Missing(file="__torchmem__/test_net.json")
OVER = OverBudget(overruns=overruns((Limit("peak", 1, "1"),), {"peak": 2}))


def grown(now: dict[str, int], before: dict[str, int]) -> Changed:
    entries = (Entry(KEY, "2.13.0", "w", figures) for figures in (before, now))
    return Changed(outcome=Outcome.GREW, comparison=compare(*entries, [BUILT_IN]))


@pytest.mark.parametrize(
    ("findings", "outcome", "failed", "accepted"),
    [
        ((), Outcome.PASSED, False, False),
        ((NEW,), Outcome.NEW, False, True),
        ((UPDATED,), Outcome.UPDATED, False, True),
        ((UPDATED, OVER), Outcome.OVER_BUDGET, True, False),
        ((OVER, MISSING), Outcome.OVER_BUDGET, True, False),
        (CheckResult(KEY).unchecked().findings, Outcome.NOT_CHECKED, False, False),
    ],
)
def test_the_first_failure_decides(findings, outcome, failed, accepted):
    result = CheckResult(KEY, findings)
    assert (result.outcome, result.failed, result.accepted) == (outcome, failed, accepted)
    sent = pickle.loads(pickle.dumps(result.light()))
    assert (sent.outcome, sent.failed, sent.accepted) == (outcome, failed, accepted)


def test_every_finding_has_its_text_and_the_first_says_what_to_do() -> None:
    assert message(CheckResult(KEY, (OVER, MISSING))) == (
        "2 B peak exceeds the budget of 1 B by 1 B (+100.0 %), cpu\n\n"
        "cpu: there is no snapshot of this check in __torchmem__/test_net.json"
    )
    assert not advice(CheckResult(KEY, (OVER, MISSING)), "pytest")
    assert advice(CheckResult(KEY, (MISSING,)), "pytest") == "To create it: pytest"
    assert message(CheckResult(KEY, (NEW,))) == ""


def test_a_phase_that_did_not_run_is_named() -> None:
    found = grown({"peak": 5}, {"peak": 5, "optimizer_peak": 5, "retained": 5})
    text = message(CheckResult(KEY, (found,)))
    first, *others = [part for part in text.split("\n\n") if "not checked" in part]
    assert first == (
        "cpu: not checked: the snapshot has an optimizer peak, but this run never reached an "
        "optimizer step"
    )
    assert others == [
        "not checked: the snapshot has memory retained after the forward pass, but this run never "
        "reached a forward pass"
    ]


@pytest.mark.parametrize(
    ("peak", "allocated", "shown"), [(400, 402, False), (100, 100, False), (100, 150, True)]
)
def test_the_allocated_peak_is_told_only_where_it_alone_grew(peak, allocated, shown):
    before = {"peak": 100 << 20, "allocated_peak": 100 << 20, "reserved_peak": 100 << 20}
    now = {"peak": peak << 20, "allocated_peak": allocated << 20, "reserved_peak": 400 << 20}
    text = message(CheckResult(KEY, (grown(now, before),)))
    assert "reserved peak" in text
    assert ("allocated peak" in text) is shown


def test_one_table_says_what_a_figure_is() -> None:
    assert set(SELECTORS.values()) == set(JUDGED) == set(FIGURES) - {"baseline"}
    assert set(PHASE_PEAKS) < set(PEAKS) < set(MEASURED) < set(JUDGED)
    rules = {name: str(find_rule([BUILT_IN], "cuda", name).tolerance) for name in JUDGED}
    assert {rules.pop(name) for name in ALLOCATOR_PEAKS} == {"1%+20MiB"}
    assert rules.pop(HOST) == "1%+64KiB"
    assert set(rules.values()) == {"1%"}


def test_what_explains_an_entry_is_computed_when_it_is_read() -> None:
    asked: list[str] = []

    def later(name: str, value: Any) -> Any:
        return Later(lambda: asked.append(name) or value)

    course = (Stretch("forward", 2, (0, 1000)),)
    now = Entry(
        KEY,
        "2.13.0",
        "w",
        {"peak": 1},
        alive=later("alive", Alive()),
        facts=later("facts", {"inputs": {"x": "float32[2]"}}),
        timeline=later("timeline", course),
    )
    snapshot = SnapshotResult("test_net.json", now, before=now)
    light = CheckResult(KEY, snapshot=snapshot).light(explained=False)
    sent = pickle.loads(pickle.dumps(light)).snapshot
    assert (sent.entry.figures, sent.entry.timeline, asked) == ({"peak": 1}, (), [])
    for result in (CheckResult(KEY, (OVER,)), CheckResult(KEY, (NEW,))):
        kept = replace(result, snapshot=snapshot).light(explained=False)
        assert pickle.loads(pickle.dumps(kept)).snapshot.entry.timeline == course
    assert asked == ["alive", "facts", "timeline"]
