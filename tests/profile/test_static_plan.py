"""Properties of timelines, whose peaks a replay has, and of plans: what is alive never overlaps."""

import time
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pytest_torchmem import trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile import static_plan
from pytest_torchmem.profile.static_plan import StaticPlan, plan_of
from pytest_torchmem.profile.timeline import Allocation, Kind, Origin, Phase, Timeline

ORIGIN = Origin(Phase.FORWARD)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    sizes = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=20))
    events: list[int] = []
    live: list[int] = []
    for index in range(1, len(sizes) + 1):
        events.append(index)
        live.append(index)
        while live and draw(st.booleans()):
            events.append(-live.pop(draw(st.integers(0, len(live) - 1))))
    cuts = sorted(draw(st.sets(st.integers(1, len(events)), max_size=4)))
    drawn = st.lists(st.sampled_from(list(Phase)), min_size=len(cuts), max_size=len(cuts))
    phases = [(0, Phase.FORWARD), *zip(cuts, draw(drawn), strict=True)]
    allocations = tuple(Allocation(size, Kind.OTHER, ORIGIN) for size in sizes)
    return Timeline(allocations, tuple(events), tuple(phases))


@given(timelines())
def test_peaks_are_what_a_replay_gives(timeline: Timeline) -> None:
    assert max(peak for peak, _ in timeline.peaks().values()) == max(0, *timeline.live_bytes())
    for peak, position in timeline.peaks().values():
        assert sum(allocation.nbytes for allocation in timeline.live_at(position)) == peak
    live = [0, *timeline.live_bytes()]
    peaks = timeline.peaks()
    both = zip(timeline.spans(), timeline.course(), strict=True)
    for (start, _, _), (phase, (peak, _), _) in both:
        assert peaks[phase][0] >= peak >= live[start]


def check(plan: StaticPlan) -> None:
    for one, other in combinations(plan.storages, 2):
        together = one.start < other.stop and other.start < one.stop
        apart = one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
        assert apart or not together
    for one in plan.storages:
        assert one.offset % plan.alignment == one.nbytes % plan.alignment == 0
        assert 0 <= one.offset <= plan.arena - one.nbytes
        assert one.nbytes >= one.allocation.nbytes
    assert plan.live_peak <= plan.arena == min(plan.arenas.values())
    assert plan.arenas["no reuse"] == sum(one.nbytes for one in plan.storages)


@given(timelines(), st.sampled_from([1, 64, 512]), st.booleans())
def test_no_two_storages_that_live_at_once_overlap(timeline, alignment, outputs):
    check(plan_of(timeline, alignment, outputs=outputs))


@given(timelines())
def test_few_are_searched_and_the_others_lie_above(timeline: Timeline) -> None:
    searched, static_plan._SEARCHED = static_plan._SEARCHED, 3
    try:
        check(plan_of(timeline, 64))
    finally:
        static_plan._SEARCHED = searched


@given(timelines())
def test_without_alignment_the_bound_is_what_lives_at_once(timeline: Timeline) -> None:
    begin = next((at for at, phase in timeline.phases if phase is not Phase.BASELINE), None)
    plan = plan_of(timeline, 1, outputs=True)
    if begin == 0:
        assert (plan.live_peak, plan.outside) == (max(0, *timeline.live_bytes()), 0)


@given(timelines(), st.booleans())
def test_everything_is_in_the_arena_or_outside(timeline: Timeline, outputs: bool) -> None:
    plan = plan_of(timeline, 1, outputs=outputs)
    total = sum(allocation.nbytes for allocation in timeline.allocations)
    if timeline.phases[-1][1] is not Phase.BASELINE or len(timeline.phases) > 1:
        steps = (start for start, phase in timeline.phases if phase is not Phase.BASELINE)
        before = timeline.events[: next(steps, len(timeline.events))]
        gone = sum(timeline.allocations[event - 1].nbytes for event in before if event > 0)
        assert plan.outside + plan.arenas["no reuse"] == total
        assert plan.outside >= gone


def test_a_step_is_planned_as_tight_as_it_lives(device: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    profile = trace(model, torch.randn(16, 64), device=device, optimizer=torch.optim.AdamW)
    plan = profile.plan()
    check(plan)
    assert plan.overhead <= 0.05
    assert plan.alignment == (512 if device == "cuda" else 64)
    assert plan.outside >= profile.baseline
    assert {one.allocation.kind for one in plan.storages} >= {Kind.ACTIVATION, Kind.GRADIENT}
    with_outputs = profile.plan(outputs=True)
    assert with_outputs.outside == profile.baseline
    assert len(with_outputs.storages) > len(plan.storages)
    if device == "cuda":
        assert plan.saved == profile.reserved_peak - plan.planned_peak  # type: ignore[operator]
        assert "reserved by the caching allocator" in plan.table()
    else:
        assert plan.saved is None
    assert len(plan.plain()["storages"]) == len(plan.storages)


def test_views_and_what_is_made_in_place_have_no_place_of_their_own() -> None:
    def program() -> None:
        x = torch.ones(4, 4)
        x.t()[:, 0].add_(x[0])
        x.view(16).mul_(x.view(16))
        torch.relu_(x)

    [only] = trace(program).plan().storages
    assert only.nbytes == 64


def test_fifty_thousand_storages_take_less_than_two_seconds() -> None:
    events: list[int] = []
    allocations: list[Allocation] = []
    kept: list[int] = []
    for layer in range(5000):
        for size in (1 << 20, 3 << 16, 4096 + layer, 1 << 14, 8, 1 << 18, 1 << 19, 2 << 20):
            allocations.append(Allocation(size, Kind.ACTIVATION, ORIGIN))
            events.append(len(allocations))
            if size > 1 << 18:
                kept.append(len(allocations))
            else:
                events.append(-len(allocations))
    for index in reversed(kept[:-1]):
        if len(allocations) < 50_000:
            allocations.append(Allocation(1 << 17, Kind.GRADIENT, ORIGIN))
            events += [len(allocations), -len(allocations)]
        events.append(-index)
    timeline = Timeline(tuple(allocations), tuple(events), ((0, Phase.FORWARD),))
    start = time.process_time()
    plan = plan_of(timeline, 512)
    assert time.process_time() - start < 2
    assert plan.overhead < 0.05


def test_an_alignment_is_a_power_of_two() -> None:
    with pytest.raises(UsageError, match="power of two"):
        trace(nn.Linear(2, 2), torch.ones(1, 2)).plan(alignment=48)
