"""Snapshot files changed by hand in random ways: read or refused, never lost, never a crash."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.profile.facts import Geometry
from pytest_torchmem.snapshots.alive import Alive, Group, What
from pytest_torchmem.snapshots.format import Entry, Key, Measured, Snapshot, dump, load
from pytest_torchmem.snapshots.store import plan_file, read
from tests.plugin.conftest import checking

EXAMPLES = int(os.environ.get("TORCHMEM_FUZZ", "200"))
FACTS = {"inputs": {"x": (Geometry("int8", (70,)),)}}
NOW = Entry(
    Key("test_b", "large", "cuda", "h100"),
    "2.13.0",
    "w2",
    {"baseline": 5, "forward_peak": 70, "peak": 70},
    alive=Alive((Group(What("activation", "net.*", "aten::mm", "int8", (70,), "a:1", 70), {}),)),
    facts=FACTS,
)


def _original() -> str:
    group = Group(What("parameter", "net.*", "weight", "int8", (5, 4), "", 20), {"peak": 5}, "0-4")
    alive = Alive((group,), {"end": 7}, ("peak", "end"))
    key, figures = Key("test_a[x/y::z]", device="cpu"), {"peak": 100, "end": 7}
    noted = Entry(
        NOW.key,
        "2.13.0",
        "w",
        {"baseline": 5, "forward_peak": 60, "peak": 60},
        tolerance={"cuda forward": "2%+64KiB"},
        reason="why",
        extra={"ticket": 7},
        measured={"h100": Measured("2.13.0", {"forward_peak": 61, "peak": 61})},
    )
    entries = [Entry(key, "2.12.1", "w", figures, alive=alive, facts=FACTS), noted]
    return dump(Snapshot({entry.key: entry for entry in entries}, {"$comment": "ours"}))


ORIGINAL = _original()
LINES = ORIGINAL.splitlines(keepends=True)
_TEXT = st.text(max_size=5)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda one: st.lists(one, max_size=3) | st.dictionaries(_TEXT, one, max_size=3),
    max_leaves=5,
)
_MARKERS = st.sampled_from(["<<<<<<< a\n", "=======\n", ">>>>>>> b\n", "||||||| c\n"])


@st.composite
def _edited_bytes(draw: st.DrawFn) -> bytes:
    """Return the file with pieces cut, doubled, replaced or put in, as an editor might."""
    data = bytearray(ORIGINAL.encode())
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        stop = draw(st.integers(start, min(len(data), start + 40)))
        data[start:stop] = draw(
            st.binary(max_size=12)
            | st.text(alphabet='{}[]",:0123456789.eE-+ \n\\u', max_size=12).map(str.encode)
            | st.just(bytes(data[start:stop] * 2))
        )
    return bytes(data)


@st.composite
def _edited_lines(draw: st.DrawFn) -> bytes:
    """Return the file with lines lost, doubled, moved, or with conflict markers between them."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(lines)))
        what = draw(st.sampled_from(["lose", "double", "move", "mark", "cut"]))
        if what == "mark":
            lines.insert(at, draw(_MARKERS))
        elif at < len(lines):
            line = lines.pop(at)
            if what == "double":
                lines[at:at] = [line, line]
            elif what == "move":
                lines.insert(draw(st.integers(0, len(lines))), line)
            elif what == "cut":
                lines.insert(at, line[: draw(st.integers(0, len(line)))])
    return "".join(lines).encode()


@st.composite
def _edited_values(draw: st.DrawFn) -> bytes:
    """Return the file with values or keys of its objects replaced by others that are JSON."""
    data = json.loads(ORIGINAL)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(pairs):
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(data)
    for _ in range(draw(st.integers(1, 3))):
        node, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["value", "value", "remove", "rename"]))
        if what == "value":
            node[key] = draw(_JSON)
        elif isinstance(node, dict) and key in node:
            value = node.pop(key)
            if what == "rename":
                node[draw(st.text(max_size=6))] = value
    return json.dumps(data, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


EDITED = st.one_of(_edited_bytes(), _edited_lines(), _edited_values())
unhurried = settings(deadline=None, suppress_health_check=list(HealthCheck))


@settings(unhurried, max_examples=EXAMPLES)
@given(EDITED)
def test_any_edit_is_read_or_refused_and_nothing_is_lost(tmp_path_factory, data):
    try:
        snapshot = load(data.decode("utf-8", "replace"))
    except SnapshotError:
        snapshot = Snapshot({})
    again = dump(snapshot)
    assert load(again) == snapshot, "what was read is what is written"
    assert dump(load(again)) == again
    json.loads(again)
    file = tmp_path_factory.getbasetemp() / "fuzz.json"
    file.write_bytes(data)
    try:
        stored, refused = read(file), ""
    except SnapshotError as error:
        refused = str(error)
    assert file.read_bytes() == data
    if refused:
        assert str(file) in refused
        return
    plan = plan_file(stored, [NOW], [])
    if plan.problem:
        assert stored.conflicted
        return
    after = load(plan.text or "")
    assert after.entries[NOW.key].figures in (NOW.figures, stored.entries.get(NOW.key, NOW).figures)
    for key, entry in stored.entries.items():
        if key != NOW.key:
            assert after.entries[key] == entry
        else:
            kept = after.entries[key]
            assert (kept.reason, kept.tolerance) == (entry.reason, entry.tolerance)
            assert kept.extra == entry.extra
    assert after.extra == stored.extra


@settings(unhurried, max_examples=max(10, EXAMPLES // 20))
@given(data=EDITED, update=st.booleans())
def test_a_whole_run_never_crashes_on_it(light: Any, data: bytes, update: bool) -> None:
    one = checking("100, device='cpu'", name="a", over="['x/y::z']")
    light.write(test_net=one + checking("60, name='large', gpu='h100'", name="b"))
    file: Path = light.file()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data)
    result = light.run(*(["--torchmem-update"] if update else []))
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    output = result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in output
    if not update:
        assert file.read_bytes() == data
    elif not file.exists() or file.read_bytes() != data:
        load(file.read_text())  # it was understood, and what replaced it is whole
