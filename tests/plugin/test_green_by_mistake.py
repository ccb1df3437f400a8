"""What was asked for and not checked never passes unseen."""

import json
from fnmatch import fnmatch

import pytest

from pytest_torchmem.cli import main
from tests.plugin.conftest import DOUBLE, checking

ONE = checking("1000, device='cpu'")
HEAD = """
import contextlib, os, pytest, threading, time
from concurrent.futures import ThreadPoolExecutor
TOO_MUCH = 5000
small = pytest.mark.memory_budget('1 KiB', device='cpu')
"""


@pytest.fixture
def budgets(light):
    """A function that runs one test with the double of the profiler."""

    def run(text, *options, **outcomes):
        return light.run(*options, test_net=HEAD + text, **outcomes)

    return run


CONTRADICTIONS = [
    ("gpu='t4', device='cpu'", "", "gpu='t4' is checked on cuda alone*leaves cuda out*"),
    ("gpu='t4', device='cpu,cuda'", "", "*nothing about the cpu. Give it a limit*"),
    ("'1 GiB', gpu='t4', device='cpu'", "", "gpu='t4' is checked on cuda alone*"),
    ("'1 GiB', device='cuda'", "device='cpu'", "check(device='cpu'): the marker*'cuda'*"),
    ("'1 GiB', device='cpu'", "gpu='t4'", "gpu='t4' is checked on cuda alone*"),
    ("'1 GiB', gpu='t4'", "gpu='h100'", "check(gpu='h100'): the marker*says gpu='t4'*"),
    ("allocated='1 GiB', device='cpu'", "", "allocated='1 GiB' is checked on cuda alone*"),
    ("reserved='1 GiB', device='cpu,cuda'", "", "*(reserved='1 GiB')*nothing about the cpu*"),
    ("'1 GiB', gpus=2", "gpus=1", "check(gpus=1): the marker*says gpus=2*"),
    ("'1 GiB', device='cpu,cuda'", "device='cpu'", "not checked on cuda: the marker*"),
]
TOGETHER = [
    ("'1 GiB', gpu='t4', device='cpu,cuda'", ["gpu='T4'"]),
    ("'1 GiB', device='cpu,cuda'", ["device='cpu', name='a'", "device='cuda', name='b'"]),
    ("gpu='t4'", ["device='cuda'"]),
    ("'1 GiB', allocated=1000, device='cpu,cuda'", [""]),
]


def test_what_contradicts_itself_fails_and_what_goes_together_passes(budgets):
    test = "@pytest.mark.memory_budget({})\ndef test_{}(torchmem):\n"
    text = ""
    for number, (marker, check, _) in enumerate(CONTRADICTIONS):
        size = 10 if check else 1 << 42
        text += test.format(marker, number) + f"    torchmem.check({size}, {check})\n"
    for number, (marker, checks) in enumerate(TOGETHER):
        lines = "".join(f"    torchmem.check(10, {check})\n" for check in checks)
        text += test.format(marker, f"together_{number}") + lines
    result = budgets(text, failed=len(CONTRADICTIONS), passed=len(TOGETHER))
    for *_, message in CONTRADICTIONS:
        assert fnmatch(result.stdout.str(), f"*{message}*".replace("[", "[[]"))


SWALLOWED = {
    "except": "    try:\n        check()\n    except Exception: pass\n",
    "suppress": "    with contextlib.suppress(BaseException):\n        check()\n",
    "a thread": "    t = threading.Thread(target=check)\n    t.start()\n    t.join()\n",
    "a pool": "    with ThreadPoolExecutor() as pool:\n        pool.submit(check)\n",
    "a skip": "    try:\n        check()\n    except Exception: pytest.skip('never mind')\n",
    "a finalizer": "    class Late:\n        def __del__(self): check()\n    Late()\n",
}


def test_a_failure_that_the_test_catches_fails_it(budgets):
    tests = [
        f"@small\ndef test_{n}_{m}(torchmem):\n    def check(): torchmem.check({what})\n{how}"
        for n, how in enumerate(SWALLOWED.values())
        for m, what in enumerate(("TOO_MUCH", "10, device='gpu'"))
    ]
    result = budgets("".join(tests), "-p", "no:threadexception", failed=len(tests))
    result.tells(*["*the test went on after a check of it had failed: *"] * len(tests))


def test_a_failure_caught_in_a_fixture_fails_as_well(budgets):
    budgets(
        "@pytest.fixture\ndef late(torchmem):\n    yield\n"
        "    with contextlib.suppress(Exception):\n"
        "        torchmem.check(10, name='late', device='gpu')\n"
        "def test_it(torchmem, late): pass\n",
        passed=1,
        errors=1,
    )


def test_a_check_may_be_expected_to_fail(budgets):
    """It is the test then that says so, and not a line that catches whatever comes."""
    budgets(
        "import unittest\n"
        "@small\ndef test_block(torchmem):\n"
        "    def check():\n        torchmem.check(TOO_MUCH)\n"
        "    with pytest.raises(AssertionError, match='exceeds') as caught, open(__file__):\n"
        "        if check:\n            check()\n"
        "@small\ndef test_call(torchmem):\n"
        "    pytest.raises(AssertionError, torchmem.check, TOO_MUCH)\n"
        "@small\ndef test_case(torchmem):\n"
        "    unittest.TestCase().assertRaises(AssertionError, torchmem.check, TOO_MUCH)\n"
        "@small\ndef test_after(torchmem):\n"
        "    with pytest.raises(AssertionError):\n        assert False\n"
        "    with contextlib.suppress(AssertionError):\n        torchmem.check(TOO_MUCH)\n"
        "@contextlib.contextmanager\ndef grows():\n"
        "    with pytest.raises(AssertionError):\n        yield\n"
        "@small\ndef test_own_block(torchmem):\n"
        "    with grows():\n        torchmem.check(TOO_MUCH)\n"
        "@small\ndef test_as_another_one(torchmem):\n"
        "    def check():\n"
        "        try:\n            torchmem.check(TOO_MUCH)\n"
        "        except AssertionError as error:\n            raise ValueError from error\n"
        "    with pytest.raises(ValueError):\n        check()\n",
        passed=5,
        failed=1,
    )


def test_only_what_catches_a_failure_may_expect_it(budgets):
    budgets(
        "@small\ndef test_another_type(torchmem):\n"
        "    with contextlib.suppress(AssertionError), pytest.raises(ValueError):\n"
        "        torchmem.check(TOO_MUCH)\n"
        "@small\ndef test_caught_within(torchmem):\n"
        "    with pytest.raises(AssertionError):\n"
        "        with contextlib.suppress(AssertionError):\n            torchmem.check(TOO_MUCH)\n"
        "        assert False\n"
        "@small\ndef test_called_elsewhere(torchmem):\n"
        "    with pytest.raises(AssertionError):\n"
        "        def check():\n            torchmem.check(TOO_MUCH)\n"
        "        assert False\n"
        "    with contextlib.suppress(AssertionError):\n        check()\n"
        "@small\ndef test_while_it_is_handled(torchmem):\n"
        "    try:\n        torchmem.check(TOO_MUCH)\n"
        "    except AssertionError:\n        pytest.raises(ValueError, int, '')\n"
        "        with pytest.raises(ValueError):\n            int('')\n"
        "@contextlib.contextmanager\ndef raises(_):\n"
        "    with contextlib.suppress(Exception):\n        yield\n"
        "@small\ndef test_of_the_same_name(torchmem):\n"
        "    with raises(AssertionError):\n        torchmem.check(TOO_MUCH)\n",
        failed=5,
    )


def test_checks_that_come_to_nothing(budgets):
    budgets(
        "mark = pytest.mark.memory_budget('1 GiB', device='cpu')\n"
        "@mark\ndef test_in_a_process(torchmem):\n"
        "    torchmem.check(10)\n"
        "    if not (pid := os.fork()):\n"
        "        try:\n            torchmem.check(10, name='other')\n"
        "        finally:\n            os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "@pytest.mark.torchmem('1 B')\nclass TestLimited:\n"
        "    @mark\n    def test_marker(self, torchmem):\n        torchmem.check(10)\n"
        "def test_rank(torchmem):\n"
        "    with contextlib.suppress(Exception):\n        torchmem.check(10, rank=1)\n"
        "def test_sizes(torchmem):\n    torchmem.check(10, sizes={})\n"
        "def test_gpu(torchmem):\n    torchmem.check(10, gpu='')\n"
        "def test_trace(torchmem):\n    torchmem.trace(10, gpu='')\n"
        "@pytest.fixture\ndef skips(torchmem):\n    yield\n"
        "    with contextlib.suppress(Exception):\n        torchmem.check(10, gpu='none')\n"
        "    pytest.skip('late')\n"
        "@mark\ndef test_skipped_at_last(torchmem, skips):\n    torchmem.check(10)\n"
        "def test_forgotten(torchmem):\n    torchmem.check  # not called\n"
        "def test_that_traces(torchmem):\n    torchmem.trace(10, device='cpu')\n",
        failed=5,
        errors=2,
        passed=3,
    ).tells("1 test passed without a check: nothing in them called*: test_net.py::test_forgotten")


def test_a_test_that_ends_the_run_hides_no_failure(budgets):
    result = budgets(
        "@small\ndef test_it(torchmem):\n    try:\n        torchmem.check(TOO_MUCH)\n"
        "    except AssertionError:\n        pytest.exit('enough', returncode=0)\n"
    )
    result.fails("error: test_net.py::test_it: a check of it failed, and it*")


def test_expected_failures_and_subtests_stay_what_they_are(budgets):
    pytest.importorskip("_pytest.subtests")
    result = budgets(
        "@small\n@pytest.mark.xfail\ndef test_expected(torchmem):\n"
        "    torchmem.check(TOO_MUCH)\n"
        "@small\n@pytest.mark.xfail\ndef test_caught(torchmem):\n"
        "    with contextlib.suppress(Exception):\n        torchmem.check(TOO_MUCH)\n"
        "@small\ndef test_imperative(torchmem):\n"
        "    try:\n        torchmem.check(TOO_MUCH)\n"
        "    except Exception:\n        pytest.xfail('known')\n"
        "@small\ndef test_parts(torchmem, subtests):\n"
        "    with subtests.test():\n        torchmem.check(TOO_MUCH)\n",
        xfailed=3,
        failed=2,
    )
    assert "went on after" not in result.stdout.str()


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=" ".join)
def test_a_check_that_outlives_its_test_fails_the_run(light, options):
    light.write(
        test_net=HEAD + "go = threading.Event()\n"
        "threads = []\n"
        "def test_slow(torchmem):\n"
        "    threads.append(threading.Thread(\n"
        "        target=lambda: torchmem.check(lambda: go.wait(9) and 10, device='cpu')))\n"
        "    threads[0].start()\n"
        "    time.sleep(0.2)\n"
        "def test_later():\n    go.set()\n    threads[0].join()\n"
    )
    light.run_apart(*options, failed=1, passed=1).tells(
        "*not checked: torchmem.check still runs on another thread*",
        "error: test_net.py::test_slow: torchmem.check ended when the test was over*",
    )


def test_an_entry_robbed_of_its_phases(light):
    light.run("--torchmem-update", test_net=ONE)
    data = json.loads(light.file().read_text())
    for name in ("forward_peak", "backward_peak", "retained"):
        del data["entries"][0][name]
    light.file().write_text(json.dumps(data))
    told = light.run(failed=1)
    told.tells(
        "*cpu: not checked: this run has a forward peak, and the snapshot has none*",
        "1 memory check: 1 not in the snapshot",
    )
    light.run("--torchmem-update", passed=1)
    assert light.run("--torchmem-strict").ret == 0


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("torchmem_tolerence", "*no setting of pytest-torchmem. Did you mean 'torchmem_tol*'?"),
        ("torchmem-gpu", "*Did you mean 'torchmem_gpu'?"),
        ("torchmem", "*no setting of pytest-torchmem.*"),
    ],
)
def test_a_mistyped_setting_ends_the_run(light, key, said):
    light.write(test_net="def test_plain(): pass\n")
    for lines, options in (([f"{key} = 5%"], []), ([], ["-o", f"{key}=5%"])):
        light.ini(*lines)
        light.run(*options).is_refused(said)


def test_an_option_with_an_empty_value_ends_the_run(light):
    light.write(test_net=ONE)
    for option in ("gpu", "devices", "tolerance", "json", "measure", "update-max"):
        key = f"torchmem_{option.replace('-', '_')}"
        for given in ([f"--torchmem-{option}="], ["-o", f"{key}="]):
            light.run(*given).is_refused(f"*{given[-1].rstrip('=')}*")


@pytest.mark.parametrize("arguments", [["", "."], [".", ""], [" ", "."], ["."], [".", ".", ""]])
def test_comparing_with_nothing_is_an_error(light, monkeypatch, command, arguments):
    light.run("--torchmem-update", test_net=ONE)
    monkeypatch.chdir(light.path)
    options = ["--tolerance", arguments.pop()] if len(arguments) == 3 else []
    assert command("compare", *arguments, *options, status=2).startswith("torchmem: error: ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["prune", ""], "an argument"), (["trace", "x:y", "--gpu="], "--gpu"), (["show", " "], "an")],
)
def test_a_command_with_an_empty_value_does_nothing(command, arguments, named):
    assert command(*arguments, status=2).startswith(f"torchmem: error: {named}")


def test_obsolete_entries_fail_in_ci(light, monkeypatch):
    light.run("--torchmem-update", test_net=ONE)
    assert light.run(test_net="def test_plain(): pass\n").ret == 0
    monkeypatch.setenv("CI", "true")
    light.run().fails("obsolete: *test_it*", "*Remove obsolete entries (they fail *")


def test_memory_tests_that_were_skipped_are_counted(light):
    light.write(
        test_net=HEAD + "@pytest.mark.skip('later')\n@pytest.mark.memory_budget('1 KiB')\n"
        "def test_marked(): pass\n"
        "@pytest.mark.memory_budget('1 KiB')\ndef test_inside(torchmem): pytest.skip('no data')\n"
        "@pytest.mark.xfail(run=False)\ndef test_not_run(torchmem): pass\n"
        "@pytest.mark.skip\ndef test_plain(): pass\n"
    )
    result, checks = light.checks()
    assert result.ret == 0
    result.tells("3 tests never checked, because they were skipped: *")
    result.tells("3 memory checks: 3 not checked")
    messages = {"never checked: later", "never checked: no data"}
    assert {check["message"] for check in checks} >= messages
    assert main(["compare", *[str(light.path / "report.json")] * 2]) in (0, 2)


def test_results_that_cannot_be_taken_fail_their_test_and_not_the_run(light):
    light.write("""
import builtins, pytest

def test_broken(torchmem, monkeypatch):
    torchmem.check(10, device="cpu")
    monkeypatch.setattr("pytest_torchmem.plugin.checker.replace", lambda *_, **__: 1 / 0)

def test_imports(torchmem, monkeypatch):
    torchmem.check(10, device="cpu")
    real = builtins.__import__
    def imports(name, *rest, **named):
        assert "torchmem" not in name
        return real(name, *rest, **named)
    monkeypatch.setattr("builtins.__import__", imports)

def test_other(torchmem, monkeypatch):
    torchmem.check(10, device="cpu")
    monkeypatch.setattr("pickle.dumps", lambda *_: b"")
""")
    result = light.run("--torchmem-update")
    result.assert_outcomes(passed=1, failed=2, errors=1)  # fixtures are torn down without the GPU
    result.tells("*could not take the results of this test's checks: ZeroDiv*")
    assert set(light.entries()) == {"test_other cpu"}


def test_a_run_that_cannot_be_concluded_fails_and_keeps_its_summary(light):
    """A test may have replaced anything that the end of the run needs; a hook may raise."""
    conftest = f"{DOUBLE}\ndef pytest_torchmem_report():\n    1 / 0\n"
    result = light.run("--torchmem-update", conftest=conftest, test_net=ONE, passed=1)
    result.fails("error: torchmem could not conclude this run: ZeroDivisionError*")


_ONE_DEVICE = """
from model import *

def on_the_cpu():
    return torch.ones(1 << 20).sum()

def test_function(torchmem):
    torchmem.check(on_the_cpu)

@pytest.mark.memory_budget("1 GiB")
def test_body():
    on_the_cpu()
"""


def test_each_report_says_once_why_a_device_was_not_checked(project, monkeypatch):
    project.run("--torchmem-update", "-k", "test_function", test_net=_ONE_DEVICE)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    reports = ["markdown=found.md", "html=pages", "json=found.json"]
    options = [f"--torchmem-{one}" for one in reports]
    result = project.run("-q", *options, "--junitxml=junit.xml", passed=2)
    why = "allocated nothing on cuda (a100-80gb)"
    tests = [f"2 tests {why}: test_net.py::test_*, test_net.py::test_*"]
    result.stdout.fnmatch_lines_random([*tests, f"::notice file=test_net.py,*::{why}: *"])
    markdown = project.read("found.md")
    assert f"2 tests {why}." in markdown
    assert "Failed" not in markdown
    assert f"not checked: {why}" in project.read("pages/index.html")
    assert f'reason" value="{why}"' in project.read("junit.xml")


def test_a_device_on_which_a_test_allocated_before_may_not_be_left_alone(project):
    project.write(test_net=_ONE_DEVICE.replace("1 << 20)", "1 << 20, device='cuda')"))
    result = project.run("--torchmem-update", "-k", "test_function", passed=1)
    result.tells("1 test checked on cuda alone, which the program asks for: *")
    result = project.run("-k", "test_function", test_net=_ONE_DEVICE, failed=1)
    result.tells("*not checked: nothing was allocated on cuda*")
