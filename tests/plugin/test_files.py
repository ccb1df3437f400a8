"""Snapshot files that cannot be used are left as they are, and said to be so; conflicts resolve."""

import importlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pytest_torchmem.errors import SnapshotError
from pytest_torchmem.profile.facts import Geometry, Stretch
from pytest_torchmem.snapshots.alive import Alive, Group, What
from pytest_torchmem.snapshots.files import locked, write
from pytest_torchmem.snapshots.format import Entry, Key, Measured, Snapshot, dump, load
from pytest_torchmem.snapshots.store import read
from tests.plugin.conftest import git
from tests.processes import waits_for


def _entry(test: str = "test_it", peak: int = 1536, **details: object) -> Entry:
    key = Key(test, device="cuda", gpu="h100")
    what = What("saved for backward", "Net.*", "aten::mm", "float32", (2, 192), "net.py:3", peak)
    alive = Alive((Group(what, {"peak": 1}, "0-3"),), {"end": 8}, ("peak", "end"))
    given = {"alive": alive, "facts": {"inputs": {"x": (Geometry("float32", (2, 8)),)}}, **details}
    given.setdefault("timeline", (Stretch("forward", 3, (500, 1000)),))
    return Entry(key, "2.13.0", "w", {"peak": peak}, **given)


def _file(*entries: Entry, **extra: object) -> str:
    return dump(Snapshot({entry.key: entry for entry in entries}, extra))


_WHAT = '"saved for backward", "Net.*", "0-3", "aten::mm", "float32[2, 192]", "net.py:3"'
REST = """\
      "peak": [1536, "1.50 KiB"],
      "facts": {
        "inputs": {
          "x": [["float32", [2, 8]]]
        }
      },
      "timeline": [
        ["forward", 3, 500, 1000]
      ],
      "alive": {
        "at": ["peak", "end"],
        "groups": [
          GROUP
        ],
        "rest": {
          "end": [8, "8 B"]
        }
      }
""".replace("GROUP", f'[{_WHAT}, 1536, [1, 0], "1.50 KiB"]')


def test_format_is_made_for_review():
    text = _file(_entry("test_b"), _entry("test_a", reason="why", tolerance={"peak": "2%"}))
    expected = """{
  "schema": 4,
  "entries": [
    {
      "test": "test_a",
      "device": "cuda",
      "gpu": "h100",
      "torch": "2.13.0",
      "workload": "w",
      "tolerance": {
        "peak": "2%"
      },
      "reason": "why",
REST    },
    {
      "test": "test_b",
      "device": "cuda",
      "gpu": "h100",
      "torch": "2.13.0",
      "workload": "w",
REST    }
  ]
}
"""
    assert text == expected.replace("REST", REST)


def test_round_trip_keeps_everything():
    entries = [
        _entry("test[a/b::c \"'\\ é \U0001f525 \n]", extra={"note": {"deep": [1, {"x": None}]}}),
        _entry("test", peak=0, reason="", tolerance=0),
        _entry("old", alive=None, facts={}),
        _entry("real", measured={"h100": Measured("2.14.1", {"peak": 3}), "a": Measured("2", {})}),
    ]
    snapshot = Snapshot({entry.key: entry for entry in entries}, {"$comment": ["ours"]})
    text = dump(snapshot)
    assert load(text) == snapshot
    assert dump(load(text)) == text
    json.loads(text)


def test_sizes_may_be_written_by_hand():
    snapshot = load(_file(_entry()).replace('[1536, "1.50 KiB"]', "99"))
    assert snapshot.entries[_entry().key].figures == {"peak": 99}


MEASURED = {"h100": Measured("2.14.1", {"reserved_peak": 777})}
MEASURED_HAS = 'measured: "h100": expected an object with "torch" and forward_peak, '


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "expected an object, found a list"),
        ("{}", 'has no valid "schema" number'),
        ('{"schema": true, "entries": []}', 'has no valid "schema" number'),
        ('{"schema": 5, "entries": []}', "written by a newer pytest-torchmem (schema 5; this one"),
        ('{"schema": 0, "entries": []}', 'has no valid "schema" number'),
        ('{"schema": 1}', 'has no list "entries"'),
        ('{"schema": 1, "schema": 1, "entries": []}', 'the key "schema" twice'),
        ('{"schema": 1, "entries": [1]}', "entry 1: expected an object, found a number"),
        ('{"schema": 1, "entries": [{}]}', 'entry 1 has no "test"'),
        ('{"schema": 1, "entries": NaN}', "NaN is not a JSON value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": 1, "entries": [], "x": "\\ud800"}', "surrogate"),
        (_file(_entry()).replace("500, 1000", "1001"), "timeline must be a list of lists such as"),
        (_file(_entry()).replace('"forward", 3', "3"), "timeline must be a list of lists such as"),
        (_file(_entry()).replace("1536", "-1"), "must be bytes such as"),
        (_file(_entry()).replace("1536", "true"), "must be bytes such as"),
        (_file(_entry()).replace("1536", "9" * 5000), "cannot be read as JSON"),
        (_file(_entry()).replace('"cuda"', "null"), '"device" must be a string, found null'),
        (_file(_entry()).replace('"groups"', '"group"'), 'with "at", "groups" and "rest"'),
        (_file(_entry()).replace("[1, 0]", "[1]"), 'a count for each moment of "at"'),
        (_file(_entry()).replace("[2, 192]", "[2, x]"), "which is no type and shape"),
        (_file(_entry()).replace('["float32", [2, 8]]', "7"), '"inputs": "x": 7 is not'),
        (_file(_entry(tolerance="x")), "the tolerance in the entry of test_it: 'x' is not a"),
        (_file(_entry()).replace('"peak": [', '"top": ['), 'has no "peak"'),
        (_file(_entry(measured=MEASURED)).replace('"torch": "2.14', '"t": "2.14'), MEASURED_HAS),
        (_file(_entry(measured=MEASURED)).replace('"reserved_peak"', '"end"'), MEASURED_HAS),
        (_file(_entry(measured=MEASURED)).replace("777", "-7"), 'h100": "reserved_peak" must be'),
        (_file(_entry("a"), _entry("b")).replace('"b"', '"a"'), "two entries for a · cuda (h100)."),
        (_file(_entry(extra={"grew": [["peak", 1]]})), "grew: expected lists of moment, before"),
    ],
)
def test_what_is_no_snapshot(text, message, tmp_path):
    with pytest.raises(SnapshotError) as caught:
        load(text)
    assert message in str(caught.value)
    (file := tmp_path / "test_x.json").write_text(text)
    with pytest.raises(SnapshotError, match="The file was left as it is: repair it"):
        read(file)
    assert file.read_text() == text


def test_a_bad_file_fails_its_tests_and_is_left_alone(stored):
    hostile = (b'{"schema": 4, "entries": [], "ours": 1e999}', b'{"a":' * 1000 + b"1" + b"}" * 1000)
    for content in (b"{", b"\xff\xfe", b'{"schema": 5, "entries": []}', b"", *hostile):
        stored.file().write_bytes(content)
        for options in ([], ["--torchmem-update"], ["--torchmem-dry-run"]):
            stored.run(*options, failed=2).tells("*test_net.json: *The file was left as it is*")
            assert stored.file().read_bytes() == content


def test_a_bad_file_of_a_module_without_checks_is_an_error_of_the_run(stored):
    stored.file().write_text("{")
    test = "def test_it(): pass\n"
    stored.run("--torchmem-update", test_net=test).fails("error: *test_net.json: is not JSON*")
    assert stored.file().read_text() == "{"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(stored):
    stored.file().chmod(0)
    stored.run(failed=2)
    stored.file().chmod(0o644)
    stored.file().parent.chmod(0o555)
    stored.width(128)
    stored.run("--torchmem-update").fails("error: *cannot be written: Permission denied")


def test_a_directory_in_the_place_of_the_file(stored):
    stored.file().unlink()
    stored.file().mkdir()
    stored.run("--torchmem-update", failed=2).tells("*net.json: cannot be read: Is a directory")


def test_writing_keeps_links_and_permissions_and_leaves_no_temporary_file(tmp_path):
    real = tmp_path / "elsewhere" / "real.json"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(real)
    write(link, "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert os.listdir(real.parent) == ["real.json"]


def test_names_as_long_as_there_can_be(tmp_path):
    for name in ("a" * 250 + ".json", "é" * 125 + ".json"):
        write(tmp_path / name, "{}")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    file.write_text("old")

    def refuse(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_new_files_have_ordinary_permissions(tmp_path):
    write(tmp_path / "deep" / "a.json", "x")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "deep" / "a.json").stat().st_mode) == 0o666 & ~umask


def _conflict(ours: str, theirs: str, style: str = "merge") -> str:
    """Return what git leaves when the whole file is in conflict."""
    base = "||||||| base\n{}\n" if style == "diff3" else ""
    return f"<<<<<<< HEAD\n{ours}{base}=======\n{theirs}>>>>>>> branch: x\n"


@pytest.mark.parametrize("style", ["merge", "diff3"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_both_sides_of_a_conflict_are_read(tmp_path, style, ending):
    ours = _file(_entry("test_a", 1), _entry("test_same", 5), _entry("test_mine", 1))
    theirs = _file(_entry("test_a", 2), _entry("test_same", 5), _entry("test_theirs", 1))
    file = tmp_path / "test_x.json"
    file.write_bytes(_conflict(ours, theirs, style).replace("\n", ending).encode())
    stored = read(file)
    assert stored.conflicted
    assert [key.test for key in stored.contested] == ["test_a"]
    assert {key.test for key in stored.entries} == {"test_same", "test_mine", "test_theirs"}


@pytest.mark.parametrize(
    "text",
    [
        "<<<<<<< HEAD\n{}\n",
        "{}\n=======\n{}\n",
        "<<<<<<< a\n<<<<<<< b\n=======\n>>>>>>> c\n",
        ">>>>>>> x\n",
        _conflict("{\n", _file(_entry())),
    ],
)
def test_torn_conflicts_are_left_alone(tmp_path, text):
    file = tmp_path / "test_x.json"
    file.write_text(text)
    with pytest.raises(SnapshotError, match=r"merge conflict.*left as it is"):
        read(file)
    assert file.read_text() == text


def test_an_update_resolves_a_merge_conflict(stored):
    ours = stored.file().read_text()
    stored.width(128)
    stored.run("--torchmem-update")
    stored.edit("test_first cpu", reason="wider")
    theirs = dump(load(stored.file().read_text()))
    stored.file().write_text(_conflict(ours, theirs))
    with stored.unchanged():
        stored.run(failed=2).tells("*unresolved merge conflict. Do not merge it by hand*")
        result = stored.run("--torchmem-update", "-k", "first")
        result.fails("error: *sides of its merge conflict differ, and the tests did*")
    stored.run("--torchmem-update", passed=2)
    assert stored.file().read_text() == theirs, "the model is theirs, and so is the note"
    stored.run(passed=2)


def test_notes_that_contradict_each_other_are_for_people(stored):
    stored.edit("test_first cpu", reason="ours")
    ours = dump(load(stored.file().read_text()))
    stored.edit("test_first cpu", reason="theirs")
    theirs = dump(load(stored.file().read_text()))
    stored.file().write_text(_conflict(ours, theirs))
    with stored.unchanged():
        stored.run("--torchmem-update").fails("error: *both sides*have notes, which differ*by hand")
        stored.run("--torchmem-update", "-k", "second").fails("error: *did not run, for: test_f*")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_itself_makes_a_conflict_that_resolves(stored):
    for command in ("init -q -b main", "add __torchmem__", "commit -qm base"):
        git(stored.path, *command.split())
    for branch, base, width in (("theirs", "main", 128), ("ours", "main", 96)):
        git(stored.path, "checkout", "-qb", branch, base)
        stored.width(width)
        stored.run("--torchmem-update")
        git(stored.path, "commit", "-qam", branch)
    with pytest.raises(subprocess.CalledProcessError):
        git(stored.path, "merge", "theirs")
    assert "<<<<<<<" in stored.file().read_text()
    stored.run("--torchmem-update", passed=2)
    stored.run(passed=2)
    assert "<<<<<<<" not in stored.file().read_text()


def test_a_module_that_is_no_python_file_has_its_own_name():
    from pytest_torchmem.snapshots.location import snapshot_path

    assert snapshot_path(Path("a/test_x.py")) == Path("a/__torchmem__/test_x.json")
    assert snapshot_path(Path("a/test_x.md")) == Path("a/__torchmem__/test_x.md.json")


@pytest.mark.parametrize("directories", [True, False], ids=["directory", "file"])
def test_one_run_waits_for_another_that_is_writing(tmp_path, monkeypatch, directories):
    if directories:
        pytest.importorskip("fcntl")
    else:  # as on Windows
        importlib.import_module("filelock")
        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "__torchmem__" / "test_x.json"
    waits_for(locked(file), locked(file))
    assert os.listdir(file.parent) == []
