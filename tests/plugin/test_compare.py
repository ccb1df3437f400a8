"""``torchmem compare`` and ``torchmem show``."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from pytest_torchmem.cli import main
from pytest_torchmem.reports.difference import Difference, DifferenceKind, render
from pytest_torchmem.snapshots.alive import Alive
from pytest_torchmem.snapshots.compare import Change, Verdict, main_change
from pytest_torchmem.snapshots.files import former_texts, write
from pytest_torchmem.snapshots.format import Entry, Key, Snapshot, Told, dump, load, merged
from tests.plugin.conftest import checking, git, valid


def _snapshot(**peaks: int) -> str:
    entries = {}
    for test, peak in peaks.items():
        key = Key(test, device="cpu")
        entries[key] = Entry(key, "2.13.0", "w", {"forward_peak": peak, "peak": peak})
    return dump(Snapshot(entries))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two directories with snapshots, in the working directory."""
    monkeypatch.chdir(tmp_path)
    base = _snapshot(test_same=100, test_grew=1000, test_more=1000, test_less=1000, test_gone=5)
    head = _snapshot(test_same=100, test_grew=1011, test_more=2000, test_less=500, test_new=7)
    write(tmp_path / "base" / "tests" / "__torchmem__" / "test_net.json", base)
    write(tmp_path / "head" / "tests" / "__torchmem__" / "test_net.json", head)
    return tmp_path


@pytest.mark.parametrize("columns", [60, 200])
def test_growth_exits_1_and_the_biggest_comes_first(folders, command, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command("compare", "base", "head", status=1).splitlines()
    assert lines[0] == "base -> head: 2 grew, 1 shrank, 1 new, 1 gone, 1 unchanged"
    tests = [line.split()[0].rstrip(",") for line in lines if line.startswith("tests/")]
    order = ("more", "grew", "less", "new", "gone")
    assert tests == [f"tests/test_net.py::test_{name}" for name in order]
    assert max(map(len, lines)) <= columns
    place = lines.index("Grew beyond the tolerance") + (2 if columns == 60 else 3)
    assert "+1000 B (+100.0 %)" in lines[place]


def test_tolerance(folders, command):
    assert main(["compare", "base", "head", "--tolerance=100%"]) == 0
    assert main(["compare", "base", "head", "--tolerance=99%"]) == 1
    assert main(["compare", "base", "head", "--tolerance=1000B"]) == 0
    told = command("compare", "base", "head", "--tolerance=lots", status=2)
    assert "--tolerance: 'lots' is not a tolerance" in told


def test_an_entrys_own_tolerance_counts(folders):
    file = folders / "head" / "tests" / "__torchmem__" / "test_net.json"
    data = json.loads(file.read_text())
    for entry in data["entries"]:
        entry["tolerance"] = "100%"
    file.write_text(json.dumps(data))
    assert main(["compare", "base", "head"]) == 0
    assert main(["compare", "head", "base"]) == 1, "that of the base counts for nothing"


def test_shrinking_and_new_and_gone_are_no_growth(folders):
    assert main(["compare", "head", "head"]) == 0
    write(folders / "a" / "__torchmem__" / "test_x.json", _snapshot(test_a=10))
    write(folders / "b" / "__torchmem__" / "test_x.json", _snapshot(test_a=5, test_b=10**9))
    assert main(["compare", "a", "b"]) == 0
    assert main(["compare", "a/__torchmem__/test_x.json", "b/__torchmem__/test_x.json"]) == 0
    assert main(["compare", "b/__torchmem__/test_x.json", "a/__torchmem__/test_x.json"]) == 1


def test_markdown_and_json(folders, command):
    options = ("--format=markdown", "--output=report.md")
    assert "report.md" in command("compare", "base", "head", *options, status=1)
    text = (folders / "report.md").read_text()
    assert "### Memory snapshots, base → head: 2 grew, 1 shrank, 1 new, 1 gone, 1 unchanged" in text
    assert text.index("test_more") < text.index("test_grew") < text.index("test_less")
    compared = json.loads(command("compare", "base", "head", "--format=json", status=1))
    assert valid(compared, "comparison")["failed"] == 2


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("nowhere", "'nowhere' is not a file, a directory or a git revision"),
        ("broken.json", "broken.json: is not JSON"),
        ("newer.json", "report of schema 99"),
        ("part.json", "is not a complete report"),
    ],
)
def test_what_cannot_be_compared_exits_2(folders, command, base, message):
    (folders / "broken.json").write_text("{")
    kind = "pytest-torchmem report"
    (folders / "newer.json").write_text(json.dumps({"kind": kind, "schema": 99}))
    (folders / "part.json").write_text(json.dumps({"kind": kind, "schema": 1, "checks": [{}]}))
    error = command("compare", base, "head", status=2)
    assert error.startswith("torchmem: error: ")
    assert message in error


def test_reports_of_runs(light, monkeypatch, command):
    light.write(test_net=checking("int(os.environ['SIZE'])") + checking("5", name="other"))
    monkeypatch.setenv("SIZE", "1000")
    light.run("--torchmem-update", "--torchmem-json=base.json")
    monkeypatch.setenv("SIZE", "1100")
    light.run("--torchmem-json=head.json")
    monkeypatch.chdir(light.path)
    assert main(["compare", "base.json", "base.json"]) == 0
    assert "test_net.py::test_it" in command("compare", "base.json", "head.json", status=1)
    # A check that came to nothing is no success, whatever the base had.
    light.run("--torchmem-json=nothing.json", test_net=checking("lambda: 1 / 0"))
    output = command("compare", "base.json", "nothing.json", status=1)
    assert "1 failed, 2 gone" in output.splitlines()[0]
    assert "not checked" in output
    # A run that has nothing to check, or cannot collect, leaves no older report behind.
    light.run("--torchmem-json=nothing.json", test_net="syntax error")
    assert json.loads(light.read("nothing.json"))["checks"] == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not know what a line calls")
def test_every_report_says_what_the_run_said(project, tmp_path, monkeypatch, command):
    """The run saw the step: a report alone does not tell which function the program calls."""
    project.pytester.makepyfile(
        net="import os\nfrom torch import nn\nkept = []\nclass Net(nn.Linear):\n"
        "    def forward(self, x):\n        x = super().forward(x)\n"
        "        kept.extend([x.exp(), x.cos()] if os.environ.get('WIDTH') == '2' else [])\n"
        "        return x.double().sin() if os.environ.get('WIDTH') else x\n"
    )
    project.write(
        test_net="from net import *\nimport pytest, torch\n"
        "def test_it(torchmem):\n    torchmem.check(Net(8, 64), torch.zeros(4, 8), device='cpu')\n"
        "@pytest.mark.memory_budget(tolerance='1%')\n"
        "def test_on_cuda_alone():\n    Net(8, 64).cuda()(torch.zeros(4, 8, device='cuda'))\n"
    )
    project.run("--torchmem-update", "--torchmem-json=base.json", passed=2)
    shutil.copytree(project.path / "__torchmem__", tmp_path / "before" / "__torchmem__")
    project.width(1)
    project.write(net=project.read("net.py").replace("forward(x)", "forward( x)"))
    result = project.run("--torchmem-json=head.json", "--torchmem-markdown=run.md")
    monkeypatch.chdir(project.path)
    monkeypatch.setenv("COLUMNS", "400")
    text = {"markdown": project.read("run.md")}
    commands = {"compare": 1, "explain": 0, "compare --format=markdown": 1}
    for words, status in commands.items():
        text[words] = command(*words.split(), "base.json", "head.json", status=status)
    project.run("--torchmem-update", passed=2)  # which stores what it said
    before = str(tmp_path / "before" / "__torchmem__")
    text["compare files"] = command("compare", before, "__torchmem__", status=1)
    said = ("float64 comes from x.double", "x.double (aten::_to_copy) in Net, net.py:8")
    said += ("net.py:6: x = super().forward( x)",)
    for one in said:
        assert one in " ".join(line.removeprefix("E").strip() for line in result.outlines)
        assert [name for name, found in text.items() if one not in found] == []
    assert text["compare"].startswith("base.json -> head.json: 2 grew\n")
    project.width(2)  # another commit of the same pull request, which is accepted as well
    project.run("--torchmem-update", "--torchmem-json=head.json", passed=2)
    assert [len(entry["grew"]) for entry in project.entries().values()] == [3, 3]
    for sides in ([before, "__torchmem__"], ["base.json", "head.json"]):
        for words, status in {**commands, "compare --format=json": 1}.items():
            found = command(*words.split(), *sides, status=status)
            assert [one for one in (*said, "kept", "net.py:7") if one not in found] == [], words
    project.width(0)
    project.run("--torchmem-update", passed=2)
    assert not any("grew" in entry for entry in project.entries().values()), "it shrank"


def test_the_causes_of_all_that_grew_stand_below_a_long_table(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    figures = {"forward_peak": 1000, "peak": 1000}
    keys = [Key(f"test_{number}", device="cpu") for number in range(70)]
    alive = Alive((), {}, ("forward_peak",))
    base = {key: Entry(key, "2.13.0", "w", figures, alive) for key in keys}
    head = {}
    for number, key in enumerate(keys):
        size = 2000 + number
        told = Told("forward_peak", 1000, size, f"cause {number % 60}", "model.py:9")
        now = {"forward_peak": size, "peak": size}
        head[key] = replace(base[key], figures=now, grew=(told,))
    write(tmp_path / "base" / "__torchmem__" / "test_net.json", dump(Snapshot(base)))
    write(tmp_path / "head" / "__torchmem__" / "test_net.json", dump(Snapshot(head)))
    text = command("compare", "base", "head", "--format=markdown", status=1)
    table, _, below = text.partition("The 20 without a row, by cause:\n")
    assert "| … and 20 more |" in table
    lines = [line for line in below.splitlines() if line.startswith("- ")]
    assert lines[0] == "- `test_net.py::test_19`, cpu, +1019 B (+101.9 %): cause 19: `model.py:9`"
    assert "test_9`, cpu and 9 more, +1009 B (+100.9 %): causes that stand above" in below
    assert len(lines) == 11


def test_what_a_proposal_has_of_older_growth_is_there_once():
    told = [Told("peak", size, 2 * size, "cause", "model.py:9") for size in (100, 200)]
    stored = Entry(Key("test_it", device="cpu"), "2.13.0", "w", {"peak": 200}, grew=(told[0],))
    proposed = replace(stored, figures={"peak": 400}, grew=(*told,))
    assert merged(proposed, stored).grew == (*told,)


def test_a_comment_is_no_longer_than_github_takes():
    failed = DifferenceKind.FAILED
    notes = (f"cause {number} {'x' * 60}" for number in range(2000))
    text = render([Difference("test_net.py::test_it", "", "cpu", failed, note=n) for n in notes])
    assert 55_000 < len(text) < 65_536
    assert text.splitlines()[-1].endswith("more causes")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_revisions_and_the_working_tree(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a dir" / "__torchmem__" / "test_é.json"
    git(tmp_path, "init", "-q", "-b", "main")
    for peak in (1000, 2000):
        write(file, _snapshot(test_a=peak))
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", str(peak))
    assert "a dir/test_é.py::test_a" in command("compare", "HEAD~1", "HEAD", status=1)
    assert ["2000" in text for text in former_texts(str(file))] == [True, False]
    assert main(["compare", "HEAD", "HEAD~1"]) == 0
    assert main(["compare", "HEAD"]) == 0
    write(file, _snapshot(test_a=3000))
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert "main -> the working tree: 1 grew" in command("compare", "main", status=1)
    for path in ("../a dir/__torchmem__", "../a dir", "../a dir/__torchmem__/test_é.json"):
        assert "1 grew\n" in command("compare", "main", path, status=1)
        assert "1 shrank\n" in command("compare", path, "main")
        assert "+1000 B" in command("explain", "HEAD", path)
    shutil.copytree(tmp_path / "a dir", tmp_path / "sub" / "renamed")
    said = "main and . have no check in common: a dir/test_é.py"
    assert said in command("compare", "main", ".", status=2)
    file.write_text("{")
    assert main(["compare", "main"]) == 2
    git(tmp_path, "commit", "-qam", "broken")
    assert "test_é.json in HEAD is not JSON" in command("compare", "HEAD~1", "HEAD", status=2)


def test_show_is_one_figure_a_line(stored, command):
    stored.edit("test_first cpu", reason="because", tolerance="2%")
    lines = command("show", str(stored.file())).splitlines()
    assert "test_first · cpu: reason: because" in lines
    assert 'test_first · cpu: tolerance: "2%"' in lines
    nbytes = stored.entries()["test_second named cpu"]["backward_peak"][0]
    assert f"test_second · named · cpu: backward peak 6.68 KiB ({nbytes:,} B)" in lines
    assert main(["show", "nowhere.json"]) == 2
    stored.file().write_text("<<<<<<< a\n{}\n=======\n{}\n>>>>>>> b\n")
    assert main(["show", str(stored.file())]) == 2


def test_the_script_is_installed():
    script = shutil.which("torchmem")
    if script is None:
        pytest.skip("the package is not installed with its script")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("pytest-torchmem ")


def test_output_that_nobody_reads_is_no_error(stored):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pytest_torchmem.cli", "show", str(stored.file())]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")
    assert load(_snapshot(test_a=1)).entries


@pytest.mark.parametrize(
    ("streams", "status"), [(">&-", 0), (">/dev/full", 2), (">&- 2>&-", 0), ("2>/dev/full", 0)]
)
def test_streams_that_are_closed_or_full(stored, streams, status):
    script = "import sys; from pytest_torchmem.cli import main; sys.exit(main(sys.argv[1:]))"
    command = shlex.join([sys.executable, "-c", script, "show", str(stored.file())])
    result = subprocess.run(f"{command} {streams}", shell=True, capture_output=True, text=True)
    assert result.returncode == status
    told = "torchmem: error: [Errno 28] No space left on device\n"
    assert result.stderr == (told if status else "")
    command = command.replace("show", "verify").replace(".json", ".none")
    result = subprocess.run(f"{command} {streams}", shell=True, capture_output=True)
    assert result.returncode in (1, 2)


def test_verify(stored, capsys):
    assert main(["verify", str(stored.file())]) == 0
    assert capsys.readouterr().err == ""
    good = stored.file().read_text()
    stored.file().write_text(f"<<<<<<< a\n{good}=======\n{good}>>>>>>> b\n")
    assert main(["verify", str(stored.file())]) == 1
    assert "unresolved merge conflict" in capsys.readouterr().err
    stored.file().write_text("{")
    assert main(["verify", str(stored.file())]) == 1
    assert "is not JSON" in capsys.readouterr().err
    assert main(["verify", str(stored.file().parent.parent)]) == 1
    assert "is not JSON" in capsys.readouterr().err
    assert main(["verify", f"{stored.file()}.misspelt"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_the_script_needs_no_torch(folders):
    code = """
import sys
from pytest_torchmem.cli import main
status = main(['compare', 'base', 'head'])
assert 'torch' not in sys.modules
sys.exit(status)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, "")


def test_nothing_to_compare_is_not_green(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert "there is nothing to compare" in command("compare", "a", "b", status=2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"peak": (5, 5), "forward_peak": (4, 4)}, "peak"),
        ({"peak": (5, 6), "reserved_peak": (100, 120)}, "peak"),
        ({"peak": (5, 5), "reserved_peak": (100, 120)}, "reserved_peak"),
        ({"peak": (5, 6), "allocated_peak": (100, 120)}, "peak"),
        ({"forward_peak": (5, 9), "peak": (9, 10), "end": (1, 100)}, "end"),
        ({"forward_peak": (5, 9), "peak": (9, 10), "baseline": (1, 100)}, "forward_peak"),
    ],
)
def test_the_figure_that_stands_for_an_entry(changes, expected):
    found = [Change(name, *sides, Verdict.WITHIN) for name, sides in changes.items()]
    assert main_change(found).figure == expected
