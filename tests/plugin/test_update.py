"""What an update writes and what it leaves alone, in every way of running a part of a suite."""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest

from pytest_torchmem.plugin.failure import update_command
from tests.plugin.conftest import DOUBLE, NO_CACHE, PLAIN, checking

CASES = """
import os
import pytest

AFTER = os.environ.get("STATE") == "after"
SIZE = 2000 if AFTER else 1000

@pytest.fixture
def breaks_before():
    assert not AFTER

@pytest.fixture
def breaks_later():
    yield
    assert not AFTER

def test_passes(torchmem):
    torchmem.check(SIZE)
    torchmem.check(SIZE + 1, name="second check")

def test_fails_before(torchmem):
    assert not AFTER
    torchmem.check(SIZE)

def test_fails_after(torchmem):
    torchmem.check(SIZE)
    assert not AFTER

def test_fails_between(torchmem):
    torchmem.check(SIZE)
    assert not AFTER
    torchmem.check(SIZE, name="unreached")

def test_setup_error(breaks_before, torchmem):
    torchmem.check(SIZE)

def test_teardown_error(torchmem, breaks_later):
    torchmem.check(SIZE)

@pytest.mark.skipif(AFTER, reason="after")
def test_skipped(torchmem):
    torchmem.check(SIZE)

def test_skips_itself(torchmem):
    torchmem.check(SIZE)
    if AFTER:
        pytest.skip("after")

@pytest.mark.xfail(AFTER, reason="after", strict=True)
def test_expected_to_fail(torchmem):
    torchmem.check(SIZE)

@pytest.mark.xfail(AFTER, reason="after")
def test_fails_as_expected_elsewhere(torchmem):
    torchmem.check(SIZE)
    assert not AFTER

def test_subtests(torchmem, subtests):
    torchmem.check(SIZE)
    with subtests.test("one"):
        assert not AFTER

@pytest.mark.parametrize("x", ["a/b", "c::d", "[e]", "f g", "é", "'", "a.py::test_passes"])
def test_parameters(torchmem, x):
    torchmem.check(SIZE, device="cuda")

class TestClass:
    def test_method(self, torchmem):
        torchmem.check(SIZE)
"""
PARAMETERS = ["a/b", "c::d", "[e]", "f g", "\\xe9", "'", "a.py::test_passes"]
PASSING = {
    "test_passes",
    "TestClass::test_method",
    *(f"test_parameters[{one}]" for one in PARAMETERS),
}
SIZED = checking("int(os.environ.get('SIZE', 1000)), device='cpu'")


@pytest.fixture
def cases(light, monkeypatch):
    """The project of all cases, with snapshots of when everything passed."""
    text = CASES
    if pytest.version_tuple < (9,):
        text = text.replace(", subtests):", "):").replace('with subtests.test("one"):', "if True:")
    assert light.run("--torchmem-update", test_net=text).ret == 0
    assert len(light.entries()) == 35
    monkeypatch.setenv("STATE", "after")
    return light


def written(project) -> set[str]:
    """Return the tests whose entries are of the second run; every other entry must be untouched."""
    old, new = (
        {(e["test"], e.get("name"), e["device"]): e for e in json.loads(text)["entries"]}
        for text in (project.before, project.file().read_text())
    )
    assert set(old) == set(new), "no entry may appear or be lost"
    changed = {key for key in new if new[key] != old[key]}
    assert all(new[key]["peak"][0] in (4000, 4002) for key in changed)
    tests = {key[0] for key in changed}
    for key in new:
        assert (key in changed) == (key[0] in tests), "a test's entries change together"
    return tests


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], PASSING),
        (["-p", "no:randomly", "-v"], PASSING),
        (
            ["-k", "passes or method"],
            {"test_passes", "TestClass::test_method", "test_parameters[a.py::test_passes]"},
        ),
        (["--deselect", "test_net.py::test_passes"], PASSING - {"test_passes"}),
        (["test_net.py::test_passes"], {"test_passes"}),
        (["test_net.py::test_parameters[c::d]"], {"test_parameters[c::d]"}),
        (["test_net.py::TestClass"], {"TestClass::test_method"}),
        (["-x"], {"test_passes"}),
        (["--maxfail=2"], {"test_passes"}),
        (["--torchmem-update=changed"], PASSING),
        (["--torchmem-update=new"], set()),
        (["--torchmem-update=obsolete"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_partial_runs_touch_only_what_ran_and_passed(cases, options, expected):
    cases.before = cases.file().read_text()
    update = [] if any("update" in option for option in options) else ["--torchmem-update"]
    cases.run(*update, *options)
    assert written(cases) == expected


def test_last_failed(cases):
    cases.run("-q", cache=True)
    cases.before = cases.file().read_text()
    # Every test fails here, since everything grew; an update then runs them all through --lf.
    cases.run("--lf", "--torchmem-update", "-k", "passes or class", cache=True)
    assert "test_passes" in written(cases)


def test_any_order_gives_the_same_bytes(cases):
    cases.before = cases.file().read_text()
    cases.run("--torchmem-update")
    forward = cases.file().read_bytes()
    assert b'"why": ""' not in forward, "a growth without a cause is not one that is read again"
    cases.file().write_text(cases.before)
    reverses = "def pytest_collection_modifyitems(items):\n    items.reverse()\n"
    cases.run("--torchmem-update", conftest=DOUBLE + reverses)
    assert cases.file().read_bytes() == forward


@pytest.mark.parametrize("dist", ["load", "each"])
def test_workers_write_the_same_bytes_as_a_serial_run(cases, dist):
    cases.before = cases.file().read_text()
    cases.run("--torchmem-update")
    serial = cases.file().read_bytes()
    cases.file().write_text(cases.before)
    result = cases.run_apart("--torchmem-update", "--tx=2*popen", f"--dist={dist}")
    assert written(cases) == PASSING
    assert cases.file().read_bytes() == serial
    result.tells("wrote __torchmem__/test_net.json", "* memory checks: *")


def test_a_rerun_counts_as_its_last_attempt(light):
    pytest.importorskip("pytest_rerunfailures")
    light.write("""
attempts = []

def test_flaky(torchmem):
    attempts.append(1)
    torchmem.check(1000 * len(attempts))
    assert len(attempts) == 3

def test_hopeless(torchmem):
    torchmem.check(1000)
    assert False
""")
    result = light.run("--torchmem-update", "--reruns=2", "--junitxml=junit.xml")
    result.tells("*1 failed, 1 passed, 4 rerun*")
    assert set(light.entries()) == {"test_flaky cpu", "test_flaky cuda"}
    assert light.entries()["test_flaky cpu"]["peak"][0] == 6000
    xml = (light.path / "junit.xml").read_text()
    assert xml.count('name="torchmem.cpu.peak" value="6000"') == 1
    assert 'value="4000"' not in xml.partition("test_flaky")[2].partition("</testcase>")[0]


def test_two_runs_at_once_keep_each_others_entries(light):
    light.write("""
import os, sys, time, pytest

@pytest.mark.parametrize("n", range(20))
def test_it(torchmem, n):
    torchmem.check(1000 + n)
    assert "torch" not in sys.modules, "the double imports what its runs should save"
    time.sleep(0.01)
""")
    base = [sys.executable, "-m", "pytest", *PLAIN, *NO_CACHE, "-q", "--torchmem-update"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    halves = [[f"test_net.py::test_it[{n}]" for n in range(20) if n % 2 == half] for half in (0, 1)]
    runs = [
        subprocess.Popen([*base, *half], cwd=light.path, env=environment, stdout=subprocess.PIPE)
        for half in halves
    ]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    for run in runs:
        run.stdout.close()
    assert len(light.entries()) == 40


KILLED = """
import os, pytest

@pytest.mark.parametrize("n", range(60))
def test_it(torchmem, n):
    torchmem.check((2000 if os.environ.get("STATE") == "after" else 1000) + n, device="cpu")
    if n == 30 and os.environ.get("STATE") == "after":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("attempt", range(int(os.environ.get("TORCHMEM_KILLS", "1"))))
def test_a_worker_killed_half_way_costs_no_entry_but_its_own(light, monkeypatch, attempt):
    light.run("--torchmem-update", "-q", test_net=KILLED)
    before = light.entries()
    assert len(before) == 60
    monkeypatch.setenv("STATE", "after")
    started = time.monotonic()
    result = light.run_apart("--torchmem-update", "-n", "2", "-q")
    assert time.monotonic() - started < 120
    outcomes = result.parseoutcomes()
    # Now and then xdist itself does not survive writing to a worker that is just dying, and ends
    # the run; what had passed until then is written all the same.
    ended = "xdist/scheduler" in result.stdout.str() + result.stderr.str()
    assert outcomes.get("failed") == 1 or ended
    after = light.entries()
    assert set(after) == set(before)
    assert after["test_it[30] cpu"] == before["test_it[30] cpu"]
    rewritten = {key for key in after if after[key]["forward_peak"][0] >= 2000}
    untouched = {key for key in after if after[key] == before[key]}
    assert rewritten | untouched == set(after), "an entry is the old one or the new one"
    # A worker that dies takes the reports it had not sent with it, and nothing else.
    assert outcomes["passed"] - 4 <= len(rewritten) <= outcomes["passed"]
    assert ended or len(rewritten) == 59
    left = os.listdir(light.path / "__torchmem__")
    assert left == ["test_net.json"], "no temporary file is left"


def test_nothing_is_written_without_the_flag_or_in_a_dry_run(cases):
    with cases.unchanged():
        cases.run()
        part = ("-k", "test_passes and not parameters")
        told = ("would write __torchmem__/test_net.json", "  changed: test_passes · cpu")
        cases.run("--torchmem-dry-run", *part).fails(*told)
    cases.run("--torchmem-update", *part)
    assert cases.run("--torchmem-dry-run", *part).ret == 0


def test_the_cap_of_what_an_update_accepts(light, monkeypatch):
    capped = ("--torchmem-update", "--torchmem-update-max=15%")
    assert light.run(*capped, test_net=SIZED).ret == 0
    with light.unchanged():
        monkeypatch.setenv("SIZE", "1200")
        light.run(*capped, failed=1).tells("*grew by more than --torchmem-update-max=15% accepts*")
    for size in (1150, 10):
        monkeypatch.setenv("SIZE", str(size))
        light.run(*capped, passed=1)
        assert light.entries()["test_it cpu"]["forward_peak"][0] == size


def test_an_update_that_changes_nothing_writes_nothing(cases, monkeypatch):
    monkeypatch.delenv("STATE")
    file = cases.file()
    os.utime(file, (1, 1))
    result = cases.run("--torchmem-update")
    assert file.stat().st_mtime == 1
    assert "wrote" not in result.stdout.str()


def test_line_endings_of_a_checkout_are_no_change(stored):
    data = stored.file().read_bytes().replace(b"\n", b"\r\n")
    stored.file().write_bytes(data)
    stored.run("--torchmem-update", passed=2)
    assert stored.file().read_bytes() == data


def test_what_people_wrote_is_kept(stored):
    stored.edit("test_first cpu", tolerance={"backward": "500%"}, reason="known", ticket=["A", 1])
    stored.width(128)
    result = stored.run()
    result.tells("*(+97.3 %) backward peak, cuda (a100-80gb):")
    result.tells("*(+97.3 %) forward peak, cpu: for the same reason")
    result.stdout.no_fnmatch_line("*(+97.3 %) backward peak, cpu:")
    stored.run("--torchmem-update", passed=2)
    entry = stored.entries()["test_first cpu"]
    assert (entry["reason"], entry["ticket"]) == ("known", ["A", 1])
    assert entry["tolerance"] == {"backward": "500%"}
    assert "reason" not in stored.entries()["test_first cuda"]


def test_precedence_of_tolerances(light, monkeypatch):
    light.write("""
import os, pytest
SIZE = int(os.environ.get("SIZE", 1000))

@pytest.mark.memory_budget(tolerance="50%")
def test_marker(torchmem):
    torchmem.check(SIZE, device="cpu", tolerance="40%")

def test_argument(torchmem):
    torchmem.check(SIZE, device="cpu", tolerance="40%")

def test_entry(torchmem):
    torchmem.check(SIZE, device="cpu")

def test_ini(torchmem):
    torchmem.check(SIZE, device="cpu")
""")
    light.run("--torchmem-update")
    for test in ("marker", "argument", "entry"):
        light.edit(f"test_{test} cpu", tolerance="30%")
    light.ini("torchmem_tolerance =", "    10%", "    test_net.py: 20%", "    elsewhere/*: 90%")
    tests = ("test_marker", "test_argument", "test_entry", "test_ini")
    for passing, size in enumerate(("1450", "1350", "1250", "1150"), 1):
        monkeypatch.setenv("SIZE", size)
        result = light.run("-v")
        lines = result.stdout.str()
        assert all(f"{test} PASSED" in lines for test in tests[:passing])
        assert lines.count(" PASSED") == passing
        if size == "1450":
            told = " ".join(line.removeprefix("E").strip() for line in result.outlines)
            ini = "ini torchmem_tolerance (test_net.py)"
            for rule in ("40%, check(tolerance=)", "30%, the entry's own tolerance", f"20%, {ini}"):
                assert told.count(f"Figures beyond their tolerance of {rule}") == 1


def test_another_torch_version(light, monkeypatch):
    light.run("--torchmem-update", test_net=SIZED.replace(", device='cpu'", ""))
    before = light.file().read_text()
    light.run(conftest=DOUBLE.replace("2.13.0+cpu", "2.14.1+cu130"), passed=1)
    light.run("--torchmem-update", passed=1)
    assert light.file().read_text() == before, "the version alone is no change"
    monkeypatch.setenv("SIZE", "1100")
    result = light.run()
    result.tells("*comes from torch 2.13.0 and this run uses torch 2.14.1,")
    result.tells("E *which may be the cause")
    light.run("--torchmem-update")
    assert light.entries()["test_it cpu"]["torch"] == "2.14.1"


def test_entries_per_torch_version(light):
    light.run("--torchmem-update", "--torchmem-split-by-torch", test_net=SIZED)
    newer = DOUBLE.replace("2.13.0+cpu", "2.14.1")
    newer = newer.replace("    return", "    size *= 10\n    return")
    light.run("--torchmem-split-by-torch", conftest=newer, failed=1)
    light.run("--torchmem-update", "--torchmem-split-by-torch", passed=1)
    entries = json.loads(light.file().read_text())["entries"]
    series = [(e["torch_series"], e["forward_peak"][0]) for e in entries]
    assert series == [("2.13", 1000), ("2.14", 10000)]
    light.run("--torchmem-split-by-torch", "--torchmem-strict", passed=1)


@pytest.mark.parametrize("mode", ["", "=new"])
def test_entries_per_torch_version_keep_what_people_wrote(light, monkeypatch, mode):
    light.run("--torchmem-update", test_net=SIZED)
    notes = {"tolerance": "7%", "reason": "wide", "ticket": 12}
    light.edit("test_it cpu", **notes)
    light.run(f"--torchmem-update{mode}", "--torchmem-split-by-torch", passed=1)
    entries = json.loads(light.file().read_text())["entries"]
    assert [e.get("torch_series") for e in entries] == ([None, "2.13"] if mode else ["2.13"])
    for entry in entries:
        assert {name: entry.get(name) for name in notes} == notes
    monkeypatch.setenv("SIZE", "1060")
    light.run("--torchmem-split-by-torch", passed=1)


def test_expected_failures_are_not_accepted_by_an_update(cases):
    cases.run("--torchmem-update", "-k", "expected_to_fail", xfailed=1)
    test = checking("1000", head="@pytest.mark.xfail\n")
    for option in ("--torchmem-update", "--torchmem-proposal=there"):
        told = cases.run(option, "test_new.py", test_new=test, xfailed=1).stdout.str()
        assert "To create missing" not in told
        assert not (cases.path / "there").exists()


IDS = ["plain", "a b'c$d", "l\u202eine\nend\x1b[2J", "x" * 300]


def test_the_command_of_a_failure_updates_its_test(light):
    """Also where the parameter is nothing that can be typed: with the function, then."""
    light.ini("disable_test_id_escaping_and_forfeit_all_rights_to_community_support = true")
    test = checking("1000, device='cpu'", over=f"range(4), ids={IDS}")
    _, checks = light.checks(test_net=test, failed=4)
    commands = [one["advice"].partition("pytest ")[2] for one in checks]
    assert commands[2] == "--torchmem-update test_net.py::test_it"
    for command in (*commands[:2], *commands[3:]):
        light.run(*shlex.split(command), passed=1)
    light.run(*shlex.split(commands[2]), passed=4)


@pytest.mark.parametrize(
    ("path", "test", "expected"),
    [
        ("test_a.py", "TestIt::test_b[1]", "'test_a.py::TestIt::test_b[1]'"),
        ("test_a.py", "TestIt::it\n", "test_a.py::TestIt"),
        ("test_a.py", "\n", "test_a.py"),
        ("@own/test_a.py", "test_b", "./@own/test_a.py::test_b"),
        ("-x/test_a.py", "test_b", "./-x/test_a.py::test_b"),
        ("[1]/test_a.py", "TestIt::test_b[2]", "-k test_b"),
        ("a\n/test_a.py", "an item", ""),
    ],
)
def test_commands_that_can_be_typed(path, test, expected):
    assert update_command(path, test) == f"pytest --torchmem-update {expected}".rstrip()
