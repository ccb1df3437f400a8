"""Properties of timelines: peaks are what a replay of the events gives."""

from hypothesis import given
from hypothesis import strategies as st

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
    for (start, _, _), (phase, (peak, _), _) in zip(
        timeline.spans(), timeline.course(), strict=True
    ):
        assert peaks[phase][0] >= peak >= live[start]
