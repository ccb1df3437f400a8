"""Obsolete entries are told apart from those that were not selected; renames are recognised."""

import json

import pytest

BOTH = """
import pytest

def test_kept(torchmem):
    torchmem.check(1000, device="cpu")
    torchmem.check(2000, device="cpu", name="second")

def test_gone(torchmem):
    torchmem.check(3000, device="cpu")
"""
ONE = """
import pytest

def test_kept(torchmem):
    torchmem.check(1000, device="cpu")

def test_other():
    pass
"""
GONE = {"test_kept second cpu", "test_gone cpu"}


@pytest.fixture
def changed(light):
    """A project whose module lost a test and a name since its snapshots were taken."""
    light.run("--torchmem-update", test_net=BOTH, test_else="def test_else(): pass\n", passed=3)
    light.write(test_net=ONE)
    return light


def test_listed_and_removed_by_an_update(changed):
    before = changed.file().read_bytes()
    result = changed.run(passed=3)
    assert result.ret == 0
    result.tells(
        "obsolete: __torchmem__/test_net.json: test_gone · cpu",
        "obsolete: __torchmem__/test_net.json: test_kept · second · cpu",
        "  Remove obsolete entries: pytest --torchmem-update=obsolete",
        "1 memory check: 1 passed, 2 obsolete",
    )
    assert changed.file().read_bytes() == before
    assert changed.run("--torchmem-strict").ret == pytest.ExitCode.TESTS_FAILED
    assert changed.run("--torchmem-dry-run").ret == pytest.ExitCode.TESTS_FAILED
    assert changed.file().read_bytes() == before
    changed.run("--torchmem-update=obsolete").tells("1 memory check: 1 passed, 2 removed")
    assert set(changed.entries()) == {"test_kept cpu"}
    assert changed.run("--torchmem-strict").ret == 0


@pytest.mark.parametrize(
    "options",
    [
        ["-k", "test_kept"],
        ["-m", "not slow"],
        ["--deselect", "test_net.py::test_other"],
        ["test_net.py::test_kept"],
        ["test_net.py", "test_net.py::test_kept"],
        ["--torchmem-devices=cuda"],
        ["--torchmem-disable"],
        ["test_else.py"],
    ],
    ids=" ".join,
)
def test_a_part_of_a_module_proves_nothing(changed, options):
    if "-m" in options:
        changed.write(test_net=ONE.replace("def test_other", "@pytest.mark.slow\ndef test_other"))
        (changed.path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    before = changed.file().read_bytes()
    output = changed.run("--torchmem-update", *options).stdout.str()
    if options == ["--torchmem-devices=cuda"]:
        # The test is gone on every device; the name may only have been left out.
        assert set(changed.entries()) == {"test_kept cpu", "test_kept second cpu"}
        return
    assert "removed" not in output
    assert "obsolete:" not in output
    assert changed.file().read_bytes() == before


@pytest.mark.parametrize(
    "breakage",
    [
        "\ndef test_fails():\n    assert False\n",
        "\n@pytest.fixture\ndef broken():\n    assert 0\n\ndef test_errors(broken):\n    pass\n",
        "\n@pytest.fixture\ndef late():\n    yield\n    assert 0\n\n"
        "def test_errors(late):\n    pass\n",
        "\n@pytest.mark.xfail\ndef test_unexpected():\n    pass\n",
        "\nassert False, 'the module cannot be imported'\n",
        "\npytest.skip('not here', allow_module_level=True)\n",
        "\nclass TestIt:\n    def __init__(self): pass\n\nimport sys; sys.exit\nraise KeyError\n",
    ],
)
def test_a_module_that_did_not_pass_proves_nothing(changed, breakage):
    changed.write(test_net=ONE + breakage)
    before = changed.file().read_bytes()
    assert "obsolete:" not in changed.run("--torchmem-update").stdout.str()
    assert changed.file().read_bytes() == before


def test_skipped_tests_keep_their_entries_and_are_no_hindrance(changed):
    changed.write(test_net=ONE.replace("def test_kept", "@pytest.mark.skip\ndef test_kept"))
    changed.run("--torchmem-update")
    assert set(changed.entries()) == {"test_kept cpu", "test_kept second cpu"}
    changed.write(
        test_net=ONE
        + "\n@pytest.mark.skip\ndef test_s(): pass\n\n@pytest.mark.xfail\ndef test_x(): assert 0\n"
    )
    changed.run("--torchmem-update")
    assert set(changed.entries()) == {"test_kept cpu"}


def test_interrupted_runs_and_last_failed_prove_nothing(changed):
    before = changed.file().read_bytes()
    changed.write(test_net=ONE.replace("    pass", "    raise KeyboardInterrupt"))
    changed.run_apart("--torchmem-update")
    assert changed.file().read_bytes() == before
    changed.run("--lf", "--torchmem-update", test_net=ONE, cache=True)
    assert changed.file().read_bytes() == before


def test_no_test_left_in_the_module(changed):
    changed.run("--torchmem-update", test_net="").tells("removed __torchmem__/test_net.json")
    assert not changed.file().exists()
    assert not changed.file().parent.exists()


def test_with_workers_as_without(changed):
    before = changed.file().read_bytes()
    changed.run_apart("-n", "1", "--torchmem-update", "-k", "kept")
    assert changed.file().read_bytes() == before
    changed.run_apart("-n", "1", "--torchmem-update")
    assert set(changed.entries()) == {"test_kept cpu"}


def test_a_worker_that_died_proves_nothing(changed):
    changed.write(test_else="import os\ndef test_else():\n    os.kill(os.getpid(), 9)\n")
    before = changed.file().read_bytes()
    changed.run_apart("-n", "1", "--torchmem-update")
    assert changed.file().read_bytes() == before


def test_a_rename_is_offered_and_keeps_what_people_wrote(light):
    light.run("--torchmem-update", test_net="def test_old(torchmem):\n    torchmem.check(1000)\n")
    for device in ("cpu", "cuda"):
        light.edit(f"test_old {device}", reason=f"why {device}", tolerance="7%")
    light.write(test_net="def test_new(torchmem):\n    torchmem.check(1000)\n")
    light.run(failed=1).tells("*has an entry for test_old, which no longer exists*renamed*")
    light.run("--torchmem-update").tells(
        "  renamed: test_old · cpu -> test_new · cpu", "*2 memory checks: 2 new, 2 renamed"
    )
    entries = light.entries()
    assert set(entries) == {"test_new cpu", "test_new cuda"}
    assert entries["test_new cpu"]["reason"] == "why cpu"
    assert entries["test_new cuda"]["tolerance"] == "7%"


def test_a_doubtful_rename_is_none(light):
    two = "def test_{0}(torchmem):\n    torchmem.check(1000, device='cpu')\n"
    light.run("--torchmem-update", test_net=two.format("a") + two.format("b"))
    light.edit("test_a cpu", reason="of a")
    light.edit("test_b cpu", reason="of b")
    light.run("--torchmem-update", test_net=two.format("c") + two.format("d"))
    entries = light.entries()
    assert set(entries) == {"test_c cpu", "test_d cpu"}
    assert not any("reason" in entry for entry in entries.values())


def test_obsolete_entries_in_the_json_report(changed):
    changed.run("--torchmem-json=report.json")
    report = json.loads((changed.path / "report.json").read_text())
    assert {entry["test"] for entry in report["obsolete"]} == {"test_gone", "test_kept"}
