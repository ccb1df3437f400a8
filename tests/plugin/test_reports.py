"""Reports: JSON by its published schema, Markdown, JUnit, GitHub, and what CI leaves behind."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.plugin.conftest import DOUBLE, checking, valid

ONE = checking("1000")


@pytest.fixture
def grown(stored):
    """A project whose model grew, and which has one failure of every other kind."""
    stored.width(128)
    stored.write(
        test_budget="""
from model import *

@pytest.mark.memory_budget("1 KiB", device="cpu")
def test_over():
    make()(inputs())

@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_nothing_there():
    make()(inputs())

def test_new(torchmem):
    torchmem.check(make(), inputs(), device="cpu")

def test_raises(torchmem):
    torchmem.check(lambda: 1 / 0)

@pytest.mark.memory_budget("1 GiB")
def test_fits(torchmem):
    torchmem.check(make(), inputs())
"""
    )
    return stored


def test_json_keeps_to_its_schema_beside_junit_and_markdown(grown):
    files = ("--junitxml=junit.xml", "--torchmem-markdown=report.md")
    grown.run("--torchmem-json=out/report.json", *files)
    report = valid(json.loads(grown.read("out/report.json")), "report")
    outcomes = {"grew": 3, "no snapshot": 1, "not checked": 2, "over budget": 1, "passed": 2}
    assert report["outcomes"] == outcomes
    grew = next(check for check in report["checks"] if check["outcome"] == "grew")
    assert grew["nodeid"] == "test_net.py::test_first"
    assert (grew["file"], grew["line"]) == ("test_net.py", 5)
    growth = grew["growth"]
    step = growth["now"] - growth["before"]
    assert sum(row["change"] for row in growth["rows"]) + growth["rest"] == step > 0
    assert grew["snapshot"]["changes"][0]["figure"] == "baseline"
    valid(json.loads(grown.file().read_text()), "snapshot")

    properties = _properties(grown.path / "junit.xml")
    first = properties["test_first"]
    assert first["torchmem.cpu.outcome"] == "grew"
    assert int(first["torchmem.cpu.peak"]) > int(first["torchmem.cpu.peak.snapshot"])
    assert properties["test_over"]["torchmem.cpu.peak.limit"] == "1024"
    suite = next(ElementTree.parse(grown.path / "junit.xml").getroot().iter("testsuite"))
    assert suite.attrib["failures"] == "6"
    assert suite.attrib["errors"] == "0"

    lines = grown.read("report.md").splitlines()
    assert lines[0] == "<!-- pytest-torchmem -->"
    assert lines[2] == "### Memory: 4 failed, 3 grew, 2 unchanged"
    text = "\n".join(lines)  # the biggest comes first
    assert text.index("**Failed (4)**") < text.index("**Grew beyond the tolerance (3)**")
    row = next(line for line in lines if "test_first` | cpu" in line)
    assert row == (
        "| `test_net.py::test_first` | cpu | backward peak | 6.68 KiB | 13.18 KiB "
        "| +6.50 KiB (+97.3 %) | Sequential.0.weight is float32\\[128, 8\\], and was \\[64, 8\\]: "
        "`aten::addmm in Sequential.0`; different workload |"
    )


_READER = """
import json

def pytest_torchmem_report(config, report):
    (config.rootpath / "workers.json").write_text(json.dumps(report))
"""


def test_json_is_the_same_with_workers_and_for_a_hook(grown):
    grown.run("--torchmem-json=serial.json")
    grown.run("-n", "1", "--junitxml=junit.xml", conftest=_READER)
    serial, workers = (json.loads(grown.read(f"{one}.json")) for one in ("serial", "workers"))
    for report in (serial, workers):
        assert all(check["alive"] for check in report["checks"] if check["snapshot"])
        report["checks"].sort(key=lambda check: (check["nodeid"], check["device"], check["name"]))
        for check in report["checks"]:
            for name in ("message", "growth", "alive"):  # lines are relative to where it ran
                check.pop(name)
    assert workers == serial
    properties = _properties(grown.path / "junit.xml")
    assert properties["test_first"]["torchmem.cuda.gpu"] == "a100-80gb"
    assert int(properties["test_second"]["torchmem.named.cpu.peak"]) > 0


def _properties(file: Path) -> dict[str, dict[str, str]]:
    cases = ElementTree.parse(file).getroot().iter("testcase")
    return {
        case.attrib["name"]: {p.attrib["name"]: p.attrib["value"] for p in case.iter("property")}
        for case in cases
    }


def test_markdown_survives_any_test_id(light):
    test = checking("1000, device='cpu'", over="['a|b', '`c`', '``']")
    light.run("--torchmem-update", "--torchmem-markdown=report.md", test_net=test)
    text = light.read("report.md")
    assert "| `test_net.py::test_it[a\\|b]` | cpu |" in text
    assert "| ``test_net.py::test_it[`c`]`` | cpu |" in text
    assert "| ```test_net.py::test_it[``]``` | cpu |" in text


def test_github(grown, monkeypatch):
    summary = grown.path / "summary.md"
    summary.write_text("# Others wrote this\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_WORKSPACE", str(grown.path.parent))
    result = grown.run()
    name = grown.path.name
    result.tells(
        f"::error file={name}/test_budget.py,line=4,title=memory%3A test_budget.py%3A%3A"
        "test_over::* peak exceeds the budget of 1 KiB by*, cpu%0A%0A*%0A%0AAlive at the peak: *",
        f"::error file={name}/test_net.py,line=5,title=memory%3A test_net.py%3A%3Atest_first::"
        "+6.50 KiB (+97.3 %25) backward peak, cpu: Sequential.0.weight is *",
    )
    text = summary.read_text()
    assert text.startswith("# Others wrote this\n")
    assert "### Memory: 4 failed, 3 grew" in text
    assert "::error" not in grown.run("--torchmem-github=never").stdout.str()


def test_ci_leaves_the_updated_files_and_one_command(grown, monkeypatch):
    with grown.unchanged():
        monkeypatch.setenv("CI", "true")
        grown.run().tells(
            f"The updated snapshots are in {grown.path}/torchmem-*",
            f"  cp -R {grown.path}/torchmem-proposal/. {grown.path}",
        )
    proposal = grown.path / "torchmem-proposal"
    files = sorted(p.relative_to(proposal).as_posix() for p in proposal.rglob("*.json"))
    assert files == ["__torchmem__/test_budget.json", "__torchmem__/test_net.json"]
    proposed = (proposal / "__torchmem__" / "test_net.json").read_bytes()
    monkeypatch.delenv("CI")
    grown.run("--torchmem-update", "test_net.py")
    assert grown.file().read_bytes() == proposed, "as the update on a machine of one's own"


@pytest.mark.parametrize(
    ("environment", "command"),
    [
        (
            {"GITHUB_ACTIONS": "true", "GITHUB_RUN_ID": "77", "GITHUB_REPOSITORY": "we/it"},
            "  gh run download 77 --repo we/it --name torchmem-proposal --dir .",
        ),
        (
            {
                "GITLAB_CI": "true",
                "CI_API_V4_URL": "https://gitlab.com/api/v4",
                "CI_PROJECT_ID": "5",
                "CI_JOB_ID": "9",
            },
            "  curl *https://gitlab.com/api/v4/projects/5/jobs/9/artifacts && unzip -o "
            "artifacts.zip && cp -R torchmem-proposal/. .",
        ),
    ],
)
def test_the_command_is_for_the_system_it_runs_on(grown, monkeypatch, environment, command):
    for name, value in {"CI": "true", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    grown.run().tells(command)


def test_a_missing_entry_fails_in_ci(light, monkeypatch):
    monkeypatch.setenv("CI", "1")
    light.run(test_net=ONE, failed=1)
    assert not light.file().exists()


def test_no_proposal_where_the_test_failed_for_another_reason(light, monkeypatch):
    monkeypatch.setenv("CI", "1")
    test = checking("1000").replace("torchmem.", "with pytest.raises(AssertionError): torchmem.")
    light.run(test_net=f"{test}    assert False\n", failed=1)
    assert not (light.path / "torchmem-proposal").exists()


def test_a_report_that_cannot_be_written_is_an_error_of_the_run(light):
    (light.path / "taken").write_text("a file")
    taken = ["--torchmem-json=taken/report.json", "--torchmem-html=taken"]
    result = light.run("--torchmem-update", *taken, "--torchmem-markdown=report.md", test_net=ONE)
    result.fails(*["error: a report cannot be written: *"] * 2)
    assert light.file().exists()
    assert (light.path / "report.md").exists()


def test_hooks_are_called_in_the_documented_order(light):
    hooks = """
import dataclasses

calls = []

def pytest_torchmem_profile(item, name, profile):
    calls.append(("profile", item.name, name, profile.device))

def pytest_torchmem_compare(item, before, now, comparison):
    calls.append(("compare", before.key == now.key))
    if item.config.getoption("verbose") > 0:
        return dataclasses.replace(comparison, changes=())

def pytest_torchmem_report(config, report):
    calls.append(("report", len(report["checks"])))
    report["extra"]["calls"] = calls
"""
    test = checking("1000, name='n', device='cpu'")
    light.run("--torchmem-update", test_net=test, conftest=DOUBLE + hooks)
    light.run("--torchmem-json=r.json")
    calls = json.loads(light.read("r.json"))["extra"]["calls"]
    assert calls == [["profile", "test_it", "n", "cpu"], ["compare", True], ["report", 1]]
    light.edit("test_it n cpu", peak=1)
    light.run(failed=1)
    light.run("-v", passed=1)


def _warning(light, **says):
    """Let what ``light`` traces give warnings or run operators of unknown workspace."""
    given = ", ".join(f"{name}={value!r}" for name, value in says.items())
    light.write(conftest=DOUBLE.replace('workload="w"', f'workload="w", {given}'))


def _warnings(result):
    lines = result.stdout.str().splitlines()
    return [line for line in lines if line.startswith("warning")]


def test_unknown_workspace_is_one_line_and_fail_when_strict(light):
    said = "the workspace of a, b, c is unknown and not included"
    _warning(light, warnings=(said,), unknown_workspaces=("a", "b", "c"))
    light.run("--torchmem-update", test_net=checking("1000 + n", over="range(3)"), passed=3)
    for options in ((), ("-q",), ("-n", "2")):
        result = light.run(*options, passed=3)
        assert _warnings(result) == [
            "warnings: 3 tests with unknown workspace (a, b, …), figures may be too low; "
            "-v lists them"
        ]
    assert _warnings(light.run("-v")) == [f"warning: test_net.py::test_it[0] and 2 more: {said}"]
    light.run("--torchmem-strict", failed=3).tells(
        "*cpu*: figures leave something out or assume it (--torchmem-strict)", f"*{said}"
    )


def test_other_warnings_are_counted_by_test(light):
    _warning(light, warnings=("net.py:3: sum is nan",))
    light.run("--torchmem-update", test_net=ONE)
    assert _warnings(light.run()) == ["warnings: 1 test with other warnings; -v lists them"]
    assert _warnings(light.run("-v")) == ["warning: test_net.py::test_it: net.py:3: sum is nan"]


def test_long_tables_show_what_matters(light):
    light.run("--torchmem-update", test_net=checking("1000 + n", over="range(30)"))
    light.edit("test_it[7] cpu", peak=1000)
    result = light.run()
    table = result.stdout.str().partition("memory (torchmem)")[2]
    assert "test_it[7]" in table
    assert "test_it[8]" not in table
    result.tells("... and 59 more; -v shows all")
    assert "test_it[8]" in light.run("-v").stdout.str().partition("memory (torchmem)")[2]
    quiet = light.run("-q").stdout.str().partition("memory (torchmem)")[2]
    assert "backward" not in quiet.partition("short test summary")[0]


def test_a_proposal_is_never_written_over_snapshots(light):
    light.run("--torchmem-update", test_net=ONE, passed=1)
    with light.unchanged():
        result = light.run("--torchmem-proposal=.", test_net=checking("2000"))
    result.tells("error: *test_net.json is the snapshot file of a test module, *")


def test_a_proposal_that_cannot_be_written_is_an_error_of_the_run(light):
    (light.path / "taken").write_text("a file")
    result = light.run("--torchmem-proposal=taken", test_net=ONE, failed=1)
    result.tells("error: *taken/__torchmem__/test_net.json cannot be written: *")


@pytest.mark.parametrize(
    ("options", "ci"), [((), True), ((), False), (("-n", "1"), True), (("--tb=short",), False)]
)
def test_the_short_summary_has_one_line_for_a_failure(light, monkeypatch, ci, options):
    light.write(
        test_net=checking("int(os.environ.get('SIZE', 1000))")
        + "@pytest.mark.memory_budget(peak=1500, device='cpu')\n"
        "def test_limit(torchmem):\n    torchmem.check(int(os.environ.get('SIZE', 1000)))\n"
    )
    light.run("--torchmem-update")
    monkeypatch.setenv("SIZE", "1100")
    if ci:
        monkeypatch.setenv("CI", "true")
    output = light.run(*options, "-rf", "--junitxml=junit.xml").stdout.str()
    full, _, summary = output.partition("short test summary info")
    assert "retained" in full, "the whole message is where failures are shown"
    lines = [line for line in summary.splitlines()[1:] if line and not line.startswith("=")]
    assert len(lines) == 2
    assert lines[0].startswith("FAILED test_net.py::test_it - +200 B backward peak")
    if ci:
        assert lines[0].endswith("+200 B backward peak")
        said = "2.15 KiB peak exceeds the budget of 1.46 KiB by 700 B (+46.7 %), cpu"
        assert lines[1].endswith(said)
    failure = next(ElementTree.parse(light.path / "junit.xml").iter("failure"))
    assert "\n" not in failure.get("message", "")
    assert "retained" in (failure.text or "")


def test_the_whole_of_a_body_in_one_line(project, monkeypatch):
    marker = "@pytest.mark.memory_budget(peak=100, device='cpu')"
    test = f"import pytest, torch\n{marker}\ndef test_body():\n    torch.zeros(100)\n"
    monkeypatch.setenv("CI", "true")
    result = project.run("-rf", test_net=test).tells("*test_net.py:2: MemoryCheckFailed")
    summary = result.stdout.str().partition("short test summary info")[2]
    lines = [line for line in summary.splitlines()[1:] if line and not line.startswith("=")]
    assert len(lines) == 1
    assert lines[0].startswith("FAILED test_net.py::test_body - 400 B peak")


def test_the_reserved_peak_heads_no_failure_of_other_peaks(light, monkeypatch):
    _warning(light, reserved_peak=3 * 10**8)
    test = checking("int(os.environ.get('SIZE', 10**8)), device='cuda'")
    light.run("--torchmem-update", test_net=test, passed=1)
    _warning(light, reserved_peak=9 * 10**8)
    light.run().tells("FAILED *+572.2 MiB reserved peak: no more tensors*")
    monkeypatch.setenv("SIZE", "150000000")
    light.run().tells("E *MemoryCheckFailed: +* backward peak, cuda*")


GUESSES = """
import torch

def test_kept(torchmem):
    def program():
        x = torch.randn(1000, 64)
        return x[x.sum(1) > 8] @ torch.randn(64, 100)
    torchmem.check(program, device="cpu")
"""


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_sizes_by_guessed_values_are_told(project, quiet):
    project.write(test_net=GUESSES)
    project.ini("torchmem_values = none")
    project.run("--torchmem-update")
    result = project.run("--torchmem-markdown=out.md", "--junitxml=out.xml", *quiet, passed=1)
    result.tells("*1 test, at most, by guessed values (values='real' computes*")
    if not quiet:
        result.tells("*passed, at most, by guessed values*")
    for name in ("out.md", "out.xml"):
        assert "at most, by guessed values" in project.read(name)
    assert "at most" not in project.run("--torchmem-values=real").stdout.str()


def pages(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_page_for_each_check_that_fails(stored, workers: int) -> None:
    stored.width(128)
    options = ["-n", str(workers)] if workers else []
    stored.run("--torchmem-html=out", *options)
    written = pages(stored.path / "out")
    index = stored.read("out/index.html")
    links = re.findall(r'href="([^"]+\.html)"', index)
    assert sorted([*links, "index.html"]) == written
    assert "3 of 3 memory checks failed" in index
    assert ":root{color-scheme:light dark}" in index  # of the body alone, the page stays white
    page = stored.read(f"out/{links[0]}")
    assert re.search(r"\+6\.50 KiB \(\+97\.3 %\) backward peak\b", page)
    assert '"before":{"baseline"' in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["earlier"]) == len(data["totals"])
    assert max(data["earlier"]) == data["before"]["peak"] < max(data["totals"])


def test_the_index_of_a_run_that_passes(stored) -> None:
    stored.run("--torchmem-html=out")
    assert pages(stored.path / "out") == ["index.html"]
    assert "0 of 3 memory checks failed" in stored.read("out/index.html")


def test_pages_that_cannot_be_written(stored) -> None:
    stored.width(128)
    (stored.path / "out").write_text("a file")
    stored.run("--torchmem-html=out").tells("*a page cannot be written*")
    assert stored.read("out") == "a file"
