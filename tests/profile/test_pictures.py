"""Pictures show the figures of the profile."""

import itertools
import json
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pytest_torchmem import MemoryProfile, trace
from pytest_torchmem.printable import printable_lines
from pytest_torchmem.profile.facts import FULL, bytes_along, outline_of
from pytest_torchmem.profile.node_table import node_table_of
from pytest_torchmem.profile.pictures.page import Content, flame, page, page_data
from pytest_torchmem.profile.pictures.svg import svg
from pytest_torchmem.profile.sampled import (
    Alike,
    by_kind,
    by_module_of,
    by_operator,
    samples,
    sparkline,
    stacked,
)
from pytest_torchmem.profile.static_plan import plan_of
from pytest_torchmem.profile.timeline import (
    Allocation,
    Kind,
    KnownWork,
    OperatorCall,
    Origin,
    Phase,
    Timeline,
)
from tests.profile.test_static_plan import timelines

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>alert(1)</script>\u2028<!--'\"&{{data}}\n"


@pytest.fixture(scope="module")
def profile() -> MemoryProfile:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    return trace(model, torch.randn(32, 64), device="cuda", gpu="h100")


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


@given(timelines(), st.integers(1, 40))
def test_samples_are_few_and_show_every_peak(timeline: Timeline, most: int) -> None:
    positions = samples(timeline, most)
    assert positions == sorted(set(positions))
    assert {0, len(timeline.events)} <= set(positions)
    assert {position for _, position in timeline.peaks().values()} <= set(positions)
    assert len(positions) <= max(most, len(timeline.peaks()) + 3)


@given(timelines(), st.integers(1, 4), st.sampled_from([by_kind, by_operator, by_module_of(1)]))
def test_groups_add_up_to_what_is_alive(timeline: Timeline, most: int, key: Any) -> None:
    positions = samples(timeline, 30)
    stack = stacked(Alike(timeline), positions, key, most)
    live = [0, *timeline.live_bytes()]
    sums = [sum(column) for column in zip(*stack.series, strict=True)] or [0] * len(positions)
    assert sums == [live[position] for position in positions]
    assert len(stack.names) <= most


@given(timelines())
def test_the_page_has_what_is_alive_at_each_sample(timeline: Timeline) -> None:
    data = page_data(Content("", timeline, {}))
    live = [0, *timeline.live_bytes()]
    groups = [[0, 0] for _ in data["groups"]]
    for position, changes in zip(data["positions"], data["changes"], strict=True):
        for group, count, nbytes in zip(*[iter(changes)] * 3, strict=True):
            groups[group][0] += count
            groups[group][1] += nbytes
        assert sum(nbytes for _, nbytes in groups) == live[position]
    assert data["peak"]["nbytes"] == max(live)
    assert data["flame"]["b"] == max(live)


@given(timelines())
def test_branches_of_the_flame_graph_are_no_wider_than_their_stem(timeline: Timeline) -> None:
    def check(node: dict[str, Any]) -> None:
        assert sum(child["b"] for child in node["c"]) <= node["b"]
        for child in node["c"]:
            check(child)

    check(flame(timeline.allocations))


def test_a_page_shows_the_profile_and_needs_no_network(profile, tmp_path):
    text = profile.to_html(tmp_path / "page.html", title="A model")
    assert (tmp_path / "page.html").read_text() == text
    data = data_of(text)
    assert data["peak"]["nbytes"] == profile.peak
    assert data["figures"] == profile.figures()
    assert data["plan"]["arena"] == profile.plan().arena
    segments = data["segments"]
    assert segments["arena"] == profile.reserved_peak == sum(one[1] for one in segments["segments"])
    assert segments["live"] == profile.allocated_peak
    placed = sorted(segments["boxes"], key=lambda box: box[0])
    for one, other in itertools.combinations(placed, 2):  # neither at once nor in the same place
        apart = one[0] + one[1] <= other[0] or one[3] <= other[2] or other[3] <= one[2]
        assert apart
    for offset, nbytes, start, stop, name in data["plan"]["boxes"]:
        assert 0 <= offset < offset + nbytes <= data["plan"]["arena"]
        assert 0 <= start < stop <= data["events"]
        assert data["plan"]["names"][name]
    peaks = [
        row[data["operators"]["columns"].index("bwd_peak")] for row in data["operators"]["rows"]
    ]
    assert max(peaks) == profile.backward_peak
    script_free = re.sub(r"<!--.*?-->|<script.*?</script>", "", text, flags=re.S)
    assert not re.search(r"https?://|src=|@import", script_free)
    assert "Permission is hereby granted" in text  # the licence of the chart


def test_the_course_of_a_step_beside_another(profile: MemoryProfile) -> None:
    """Beside itself it is what it is; an outline in few numbers is never below a sample of it."""
    data = data_of(profile.to_html(before=profile))
    at = data["positions"].index(data["peak"]["position"])
    assert data["earlier"][at] == profile.peak
    few = outline_of(profile.timeline, 24)
    assert [one.phase for one in few] == ["baseline", "forward", "backward"]
    assert max(share for one in few for share in one.shares) == FULL
    drawn = bytes_along(few, profile.peak, profile.timeline, data["positions"])
    assert all(a + 1 >= b for a, b in zip(drawn, data["totals"], strict=True))
    shares = [share for one in few[1:] for share in one.shares]  # of other phases: as one
    ends = [0, len(profile.timeline.events)]
    found = bytes_along(few[1:], profile.peak, profile.timeline, ends)
    assert found == [share * profile.peak // FULL for share in (shares[0], shares[-1])]


def test_no_name_ends_the_script() -> None:
    origin = Origin(Phase.FORWARD, HOSTILE, HOSTILE, HOSTILE)
    found = Allocation(4, Kind.ACTIVATION, origin, label=HOSTILE)
    timeline = Timeline((found,), (1,), ((0, Phase.FORWARD),))
    text = page(Content(HOSTILE, timeline, {}, [HOSTILE], [HOSTILE], message=HOSTILE))
    assert data_of(text)["title"] == printable_lines(HOSTILE)
    assert text.count("<script>alert") == 0
    ElementTree.fromstring(svg(HOSTILE, timeline))


def test_names_move_no_cursor_and_hide_nothing(tmp_path, command):
    name = "\x1b[2J\r\n\x07\u202e"
    for number, width in enumerate((8, 64)):
        model = nn.Sequential()
        model.add_module(name, nn.Linear(8, width))
        found = trace(model, torch.zeros(4, 8))
        found.save(tmp_path / f"{number}.json")
    texts = [found.table(), found.node_table().table(), page(Content(name, found.timeline, {}))]
    texts.append(svg(name, found.timeline))
    ElementTree.fromstring(texts[-1])
    texts.append(command("explain", *map(str, sorted(tmp_path.iterdir()))))
    for text in texts:
        assert printable_lines(text) == text
    for text in (texts[0], texts[1], texts[-1]):
        assert "\\x1b" in text


@given(timelines(), st.integers(1, 50))
def test_a_sparkline_is_as_wide_as_asked_and_highest_at_the_peak(timeline, width):
    line = sparkline(timeline, width)
    live = timeline.live_bytes()
    assert len(line) == (min(width, len(live)) if max(live, default=0) else 0)
    assert not line or "█" in line


def test_an_svg_names_the_peak(profile: MemoryProfile) -> None:
    root = ElementTree.fromstring(profile.to_svg(title="<A & B>"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<A & B>" in texts
    assert any(f"({profile.peak:,} bytes)" in (text or "") for text in texts)


def long_timeline(events: int) -> Timeline:
    """Return one of as many events, of modules and lines that are all different."""
    allocations, order = [], []
    for index in range(events // 2):
        origin = Origin(Phase.FORWARD, f"layers.{index % 300}.block", "aten::mm", f"a.py:{index}")
        allocations.append(Allocation(4096 + index, Kind.ACTIVATION, origin, (index, 4), "float32"))
        order.append(index + 1)
        if index >= 500:
            order.append(-(index - 499))
    return Timeline(tuple(allocations), tuple(order), ((0, Phase.FORWARD),))


def test_a_page_of_many_events_is_small_and_soon_there() -> None:
    timeline = long_timeline(100_000)
    start = time.process_time()
    call = OperatorCall(0, 1, timeline.allocations[0].origin, 0, "", (), KnownWork())
    made = [(at, event - 1) for at, event in enumerate(timeline.events) if event > 0]
    origins = [(at, timeline.allocations[index].origin) for at, index in made]
    calls = [call._replace(start=at, stop=at + 1, origin=origin) for at, origin in origins]
    plan, table = plan_of(timeline, 512), node_table_of(timeline, calls)
    text = page(Content("long", timeline, {}, plan=plan, table=table))
    data = data_of(text)
    assert len(data["plan"]["boxes"]) < data["plan"]["storages"] == len(plan.storages)
    assert len(data["operators"]["rows"]) < data["operators"]["all"]
    assert time.process_time() - start < 20
    assert len(text.encode()) < 2_000_000
    assert data_of(text)["peak"]["nbytes"] == max(timeline.live_bytes())


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_opens_without_a_message(profile: MemoryProfile, tmp_path: Path) -> None:
    """What the script made of the data is in the document, and the console is empty."""
    profile.to_html(tmp_path / "page.html", before=profile)
    options = "--headless=new --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom "
    options += "--virtual-time-budget=9999"  # parts of the page are tasks of their own
    command = [str(CHROMIUM), *options.split(), f"--user-data-dir={tmp_path / 'browser'}"]
    done = subprocess.run(
        [*command, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    assert f"{profile.peak:,}" in done.stdout
    assert done.stdout.count("<canvas") == 3
    for name in ("alive", "operators"):
        table = re.search(rf'id="{name}">(.*?)</table>', done.stdout, re.S)
        assert table
        assert table[1].count("<tr>") > 3
    assert "arena" in done.stdout.partition('id="plan-figures">')[2].partition("<")[0]
    assert "reserved" in done.stdout.partition('id="segments-figures">')[2].partition("<")[0]
