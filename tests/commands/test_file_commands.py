"""Commands that read and change snapshot files, without a run of their tests."""

import io
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pytest_torchmem.cli import main
from pytest_torchmem.snapshots.format import Entry, Key, Snapshot, dump, load

TEST = "tests/test_net.py::test_memory"


def _entry(peak: int, **notes: str) -> Entry:
    key = Key("test_memory", device="cpu")
    figures = {"baseline": 8, "forward_peak": peak, "peak": peak, "end": 8}
    return Entry(key, torch="2.13.0", workload="0123", figures=figures, **notes)


def _write(file: Path, *entries: Entry) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump(Snapshot({entry.key: entry for entry in entries})), encoding="utf-8")


def _git(*arguments: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def committed(here: Path) -> Path:
    """Three versions of a snapshot, of which the last moved with its module."""
    _git("init", "-q")
    file = here / "tests" / "__torchmem__" / "test_old.json"
    for peak, subject in ((1024, "first"), (4096, "a wider layer"), (4096, "other things")):
        _write(file, _entry(peak, reason=subject))
        _git("add", "-A")
        _git("commit", "-qm", subject)
    file.rename(file.with_name("test_net.json"))
    _git("add", "-A")
    _git("commit", "-qm", "renamed")
    return file.with_name("test_net.json")


def test_history_has_the_commits_that_changed_the_figure(committed, command):
    _write(committed, _entry(2048))
    title, _, _, *rows, written = command("history", TEST, "--svg", "history.svg").splitlines()
    assert title == "test_memory · cpu"
    assert rows[0].startswith("working tree ")
    assert [" ".join(row.split()[2:]) for row in rows[1:]] == [
        "4.00 KiB +3.00 KiB (+300.0 %) a wider layer",
        "1.00 KiB first",
    ]
    assert rows[0].split()[2:] == ["2.00", "KiB", "-2.00", "KiB", "(-50.0", "%)"]
    assert written == "written: history.svg"
    picture = ElementTree.parse("history.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 3


def test_history_as_json_and_of_the_latest_commits(committed, command):
    [told] = json.loads(command("history", TEST, "--format", "json", "--figure", "forward_peak"))
    assert [one["bytes"] for one in told["versions"]] == [4096, 1024]
    [told] = json.loads(command("history", TEST, "--format", "json", "--limit", "1"))
    assert [one["bytes"] for one in told["versions"]] == [4096]


@pytest.mark.parametrize(
    "arguments",
    [["history", "test_net.py"], ["history", TEST, "--limit", "0"], ["history", f"{TEST}_2"]],
)
def test_history_of_nothing_is_one_sentence(committed, arguments, command):
    assert command(*arguments, status=2).count("\n") == 1


def test_accept_keeps_what_people_wrote(here: Path, command: Any) -> None:
    file = here / "tests" / "__torchmem__" / "test_net.json"
    _write(file, _entry(1024, reason="a reason"))
    _write(here / "artifact" / "tests" / "__torchmem__" / "test_net.json", _entry(2048))
    assert "would write" in command("accept", "artifact", "--dry-run")
    assert load(file.read_text()).entries[Key("test_memory", device="cpu")].figures["peak"] == 1024
    told = "test_memory · cpu: forward peak +1.00 KiB (+100.0 %)"
    assert told in command("accept", "artifact")
    entry = load(file.read_text()).entries[Key("test_memory", device="cpu")]
    assert (entry.figures["peak"], entry.reason) == (2048, "a reason")


def test_accept_writes_nothing_of_a_broken_proposal(here: Path) -> None:
    (here / "artifact" / "__torchmem__").mkdir(parents=True)
    (here / "artifact" / "__torchmem__" / "test_net.json").write_text("{")
    assert main(["accept", "artifact"]) == 2
    assert main(["accept", "nothing"]) == 2
    assert main(["accept", "."]) == 2
    assert not (here / "__torchmem__").exists()


@pytest.mark.parametrize(
    ("answers", "accepted", "status"),
    [("y\nn\n", [2048, 1024], 1), ("what?\na\n", [2048, 2048], 0), ("", [1024, 1024], 1)],
)
def test_review_asks_of_each_entry(here, answers, accepted, status, capsys, monkeypatch):
    file = here / "tests" / "__torchmem__" / "test_net.json"

    def entries(peak: int) -> list[Entry]:
        names = ("test_a", "test_b")
        return [replace(_entry(peak), key=Key(name, device="cpu")) for name in names]

    _write(file, *entries(1024))
    _write(here / "artifact" / "tests" / "__torchmem__" / "test_net.json", *entries(2048))
    monkeypatch.setattr("sys.stdin", io.StringIO(answers))
    assert main(["review", "artifact"]) == status
    assert re.search(r"peak +1\.00 KiB +→ +2\.00 KiB", capsys.readouterr().out)
    stored = load(file.read_text()).entries
    assert [entry.figures["peak"] for _, entry in sorted(stored.items())] == accepted


def test_prune_removes_what_no_module_may_claim(here, command):
    (here / "held").mkdir()
    (here / "held" / "test_renamed.py").write_text("")
    (here / "kept.py").write_text("")
    for folder, name in ((here, "test_gone"), (here / "held", "test_gone"), (here, "kept")):
        _write(folder / "__torchmem__" / f"{name}.json", _entry(8))
    _write(here / ".venv" / "__torchmem__" / "test_gone.json", _entry(8))
    assert main(["prune", "--dry-run"]) == 1
    assert (here / "__torchmem__" / "test_gone.json").exists()
    told = command("prune", status=1)
    left = {path.relative_to(here).as_posix() for path in here.rglob("*.json")}
    assert left == {
        "held/__torchmem__/test_gone.json",
        "__torchmem__/kept.json",
        ".venv/__torchmem__/test_gone.json",
    }
    assert "test_renamed.py beside it has no snapshots" in told


def test_prune_keeps_copies_of_what_is_there(here, command):
    (here / "tests").mkdir()
    (here / "tests" / "test_net.py").write_text("")
    _write(here / "tests" / "__torchmem__" / "test_net.json", _entry(8))
    for folder in ("artifact", "old"):
        _write(here / folder / "tests" / "__torchmem__" / "test_net.json", _entry(16))
    (here / "old" / "code.py").write_text("")
    assert "artifact/tests/__torchmem__/test_net.json: it may be" in command("prune", status=1)
    assert not (here / "old" / "tests" / "__torchmem__").exists()
    assert main(["accept", "artifact"]) == 0
