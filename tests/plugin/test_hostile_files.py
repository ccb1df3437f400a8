"""Files and names that mean harm: one sentence, and everything stays as it was."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_torchmem.cli import main
from pytest_torchmem.errors import SnapshotError, UsageError
from pytest_torchmem.printable import printable, printable_lines
from pytest_torchmem.reports.difference import code, plain
from pytest_torchmem.reports.layout import wrapped
from pytest_torchmem.snapshots.format import dump, load
from pytest_torchmem.snapshots.tolerance import parse_rules, parse_tolerance
from pytest_torchmem.units import parse_size
from tests.plugin.conftest import checking

ONE = checking("1000, device='cpu'")
ENTRY = '{"schema": 4, "entries": [{"test": "test_it", "device": "cpu", "torch": "2", %s}]}'
DEEP = '{"a":' * 1000 + "1" + "}" * 1000


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ('"peak": 1, "ours": 1e999', "has the number 1e999, which is too large"),
        ('"peak": 1, "ours": -1E+400', "too large"),
        ('"peak": 1e308', '"peak" must be bytes'),
        ('"peak": 1' + "0" * 309, '"peak" must be bytes'),
        ('"peak": 1' + "0" * 5000, "cannot be read as JSON"),
        ('"peak": "7"', '"peak" must be bytes'),
        ('"peak": ["7", "7 B"]', '"peak" must be bytes'),
        ('"peak": 9223372036854775808', '"peak" must be bytes'),
        ('"peak": [9000, "2.00 KiB"]', '"peak" is [9000, "2.00 KiB"], which are two sizes'),
        ('"peak": [9000, null]', "which are two sizes"),
        (f'"peak": 1, "ours": {DEEP}', "nested"),
        ('"peak": 1, "ours": ' + "[" * 500 + "]" * 500, "nested"),
        ('"peak": 1, "tolerance": "1e999999999"', "is not a tolerance"),
        ('"peak": 1, "tolerance": "1e999999999 %"', "is not a tolerance"),
        ('"peak": 1, "tolerance": "' + "9" * 100_000 + '%"', "is not a tolerance"),
        ('"peak": 1, "tolerance": 1' + "0" * 400, "is not a tolerance"),
        ('"peak": 1, "tolerance": ' + "[" * 90 + "]" * 90, "is not a tolerance"),
        ('"peak": 1, "measured": {"h100\\n": {"torch": 7}}', "measured"),
        ('"peak": 1, "device": "cpu\\n\\u001b[2J"', "twice"),
        ('"peak": 1, "world_size": -1', '"world_size" must be a number'),
        ('"peak": 1, "facts": {"layers": {"\\u001b[2J\\n": [7]}}', "layers"),
    ],
)
def test_one_sentence_for_a_hostile_file(light, inside, message):
    light.file().parent.mkdir()
    text = ENTRY % inside
    light.file().write_text(text)
    started = time.process_time()
    with pytest.raises(SnapshotError, match=re.escape(message)) as caught:
        load(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500
    assert main(["verify", str(light.file())]) == 1
    assert time.process_time() - started < 1


def test_what_is_just_allowed_can_be_written_again():
    ours = '{"a":' * 90 + "1e308" + "}" * 90
    text = ENTRY % f'"peak": 9223372036854775807, "ours": {ours}'
    snapshot = load(text)
    assert load(dump(snapshot)) == snapshot


@pytest.mark.parametrize("text", ["1e999999999", "1e99", "9" * 5000, "1e-999999999", 10**400])
def test_sizes_and_tolerances_beyond_everything(text):
    started = time.process_time()
    for parse in (parse_size, parse_tolerance, lambda value: parse_rules({"peak": value}, "x")):
        if text == "1e-999999999":
            assert parse_size(text) <= 1
            continue
        with pytest.raises(UsageError) as caught:
            parse(text)
        assert len(str(caught.value)) < 400
    assert time.process_time() - started < 0.5


NAME = "a|b\r\n`c`\x1b[2J@all #1 <img src=x> [x](http://y) \u202e"


def test_names_are_shown_as_they_are():
    assert printable(NAME).isprintable()
    assert "\x1b" not in printable_lines(NAME)
    assert printable_lines("a\nb\x07") == "a\nb\\x07"
    shown = plain(NAME)
    assert shown.isprintable()
    assert not re.search(r"@\w|(?<!&)#\d|<img|(?<!\\)[\[`|]|http://y", shown)
    assert code("``") == "``` `` ```"
    assert "\n" not in code("a\nb")


def test_hostile_names_in_every_report(light, monkeypatch, capsys):
    """They come from files, parameters and modules; what is refused is the name of a check."""
    light.write(
        test_net="import pytest\n"
        f"class Hostile(str):\n    pass\nNAME = {NAME!r}\n"
        "@pytest.fixture(autouse=True)\n"
        "def named(request):\n    request.node._nodeid = f'test_net.py::{NAME}'\n"
        "def test_it(torchmem):\n    torchmem.check(1000, device='cpu')\n"
        "def test_named(torchmem):\n    torchmem.check(1, name='a\\nb', device='cpu')\n"
    )
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = light.run("--torchmem-markdown=r.md", "--torchmem-json=r.json")
    output = result.stdout.str().partition("memory (torchmem)")[2]
    assert "\x1b[2J" not in output
    assert "\u202e" not in output
    assert "\r" not in output
    result.tells("*expected one line without control characters*")
    markdown = light.read("r.md")
    assert "\x1b" not in markdown
    assert "\r" not in markdown
    assert all(line.endswith("|") for line in markdown.splitlines() if line.startswith("|"))
    json.loads(light.read("r.json"))


def test_hostile_files_in_comparisons(light, monkeypatch, command):
    monkeypatch.chdir(light.path)
    for file, peak in (("a/test_x.json", 10), ("b/test_x.json", 20)):
        (light.path / file).parent.mkdir()
        entry = {"test": NAME, "name": NAME, "device": "cpu", "torch": NAME + file, "peak": peak}
        text = json.dumps({"schema": 1, "entries": [{**entry, "reason": NAME + file}]})
        (light.path / file).write_text(text)
    for how in ("text", "markdown"):
        shown = command("compare", "a/test_x.json", "b/test_x.json", "--format", how, status=1)
        assert printable_lines(shown) == shown
        outside = re.sub("``.*?``", "", shown)  # of code, which is shown as it is
        assert how == "text" or not re.search(r"@all|<img|[^\\]\]\(", outside)
    shown = command("show", "a/test_x.json")
    assert printable_lines(shown) == shown
    assert len(shown.splitlines()) == 3


@pytest.mark.parametrize(
    "figures", [{"peak": "7"}, {"peak": 1e308}, {"peak": [1]}, [], {"peak": 10**400}, {"peak": -1}]
)
def test_reports_with_figures_that_are_none(light, monkeypatch, capsys, figures):
    light.run("--torchmem-update", "--torchmem-json=r.json", test_net=ONE)
    data = json.loads(light.read("r.json"))
    data["checks"][0]["figures"] = figures
    (light.path / "bad.json").write_text(json.dumps(data))
    monkeypatch.chdir(light.path)
    capsys.readouterr()
    assert main(["compare", "bad.json", "r.json"]) == 2
    assert capsys.readouterr().err.startswith("torchmem: error: bad.json is not a complete report")


@pytest.mark.parametrize("letters", ["x", "1", "a.", "1 × ", "(", "[1", "+1.1"])
def test_long_names_are_laid_out_at_once(letters):
    """Each letter of a name began another look for what follows names (sizes, shapes, devices)."""
    text = letters * (20_000 // len(letters))
    started = time.process_time()
    assert wrapped(text).replace("\n", "").replace(" ", "") == text.replace(" ", "")
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "text", ["12 × float32[4, 16, 128]", "+10.13 MiB (+25.3 %)", "3 × 2 KiB", "cuda (a100-80gb)"]
)
def test_no_line_ends_in_what_is_read_as_one(text):
    lines = wrapped(" ".join([f"of {text}"] * 40)).split("\n")
    assert sum(line.count(text) for line in lines) == 40


ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="runs are forked, and pipes are Linux's")
def test_hostile_runs_find_nothing(chance) -> None:
    seed = str(chance.randrange(10**9))
    command = [sys.executable, "-m", "benchmarks.hostile", "--runs", "4", "--seed", seed]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 runs" in result.stdout
