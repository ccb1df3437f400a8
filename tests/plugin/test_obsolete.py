"""Entries whose test, and files whose module, is gone: told, removed or moved; what is renamed."""

import json

import pytest

from pytest_torchmem.snapshots.format import dump, load
from tests.plugin.conftest import checking

BOTH = """
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


@pytest.fixture
def changed(light):
    """A project whose module lost a test and a name since its snapshots were taken."""
    light.run("--torchmem-update", test_net=BOTH, test_else="def test_else(): pass\n", passed=3)
    light.write(test_net=ONE)
    return light


def test_listed_and_removed_by_an_update(changed):
    with changed.unchanged():
        result = changed.run(passed=3)
        assert result.ret == 0
        result.tells(
            "obsolete: __torchmem__/test_net.json: test_gone · cpu",
            "obsolete: __torchmem__/test_net.json: test_kept · second · cpu",
            "  Remove obsolete entries: pytest --torchmem-update=obsolete",
            "1 memory check: 1 passed, 2 obsolete",
        )
        changed.run("--torchmem-strict").fails()
        changed.run("--torchmem-dry-run").fails()
    changed.run("--torchmem-update=obsolete").tells("1 memory check: 1 passed, 2 removed")
    assert set(changed.entries()) == {"test_kept cpu"}
    assert changed.run("--torchmem-strict").ret == 0


@pytest.mark.parametrize(
    "options",
    [
        *("-k test_kept", "-m not slow", "--deselect test_net.py::test_other", "test_else.py"),
        *("test_net.py::test_kept", "test_net.py test_net.py::test_kept"),
        *("--torchmem-devices=cuda", "--torchmem-disable"),
    ],
)
def test_a_part_of_a_module_proves_nothing(changed, options):
    if options == "-m not slow":
        changed.write(test_net=ONE.replace("def test_other", "@pytest.mark.slow\ndef test_other"))
        changed.ini("markers = slow")
    before = changed.file().read_bytes()
    output = changed.run("--torchmem-update", *options.split(" ", 1)).stdout.str()
    if options == "--torchmem-devices=cuda":
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
    with changed.unchanged():
        assert "obsolete:" not in changed.run("--torchmem-update").stdout.str()


def test_skipped_tests_keep_their_entries_and_are_no_hindrance(changed):
    changed.write(test_net=ONE.replace("def test_kept", "@pytest.mark.skip\ndef test_kept"))
    changed.run("--torchmem-update")
    assert set(changed.entries()) == {"test_kept cpu", "test_kept second cpu"}
    others = "@pytest.mark.skip\ndef test_s(): pass\n@pytest.mark.xfail\ndef test_x(): assert 0\n"
    changed.run("--torchmem-update", test_net=ONE + others)
    assert set(changed.entries()) == {"test_kept cpu"}


def test_interrupted_runs_and_last_failed_prove_nothing(changed):
    with changed.unchanged():
        changed.write(test_net=ONE.replace("    pass", "    raise KeyboardInterrupt"))
        changed.run_apart("--torchmem-update")
        changed.run("--lf", "--torchmem-update", test_net=ONE, cache=True)


def test_no_test_left_in_the_module(changed):
    changed.run("--torchmem-update", test_net="").tells("removed __torchmem__/test_net.json")
    assert not changed.file().parent.exists()


def test_with_workers_as_without(changed):
    with changed.unchanged():
        changed.run_apart("-n", "1", "--torchmem-update", "-k", "kept")
    changed.run_apart("-n", "1", "--torchmem-update")
    assert set(changed.entries()) == {"test_kept cpu"}


def test_a_worker_that_died_proves_nothing(changed):
    changed.write(test_else="import os\ndef test_else():\n    os.kill(os.getpid(), 9)\n")
    with changed.unchanged():
        changed.run_apart("-n", "1", "--torchmem-update")


def test_a_rename_is_offered_and_keeps_what_people_wrote(light):
    light.run("--torchmem-update", test_net=checking("1000", name="old"))
    for device in ("cpu", "cuda"):
        light.edit(f"test_old {device}", reason=f"why {device}", tolerance="7%")
    light.run(test_net=checking("1000", name="new"), failed=1).tells(
        "*has an entry for test_old, which no longer exists*renamed*"
    )
    light.run("--torchmem-update").tells(
        "  renamed: test_old · cpu -> test_new · cpu", "*2 memory checks: 2 new, 2 renamed"
    )
    entries = light.entries()
    assert set(entries) == {"test_new cpu", "test_new cuda"}
    assert entries["test_new cpu"]["reason"] == "why cpu"
    assert entries["test_new cuda"]["tolerance"] == "7%"


def test_a_doubtful_rename_is_none(light):
    a, b, c, d = (checking("1000, device='cpu'", name=name) for name in "abcd")
    light.run("--torchmem-update", test_net=a + b)
    light.edit("test_a cpu", reason="of a")
    light.edit("test_b cpu", reason="of b")
    light.run("--torchmem-update", test_net=c + d)
    entries = light.entries()
    assert set(entries) == {"test_c cpu", "test_d cpu"}
    assert not any("reason" in entry for entry in entries.values())


def test_obsolete_entries_in_the_json_report(changed):
    changed.run("--torchmem-json=report.json")
    told = json.loads(changed.read("report.json"))
    assert {entry["test"] for entry in told["obsolete"]} == {"test_gone", "test_kept"}


TESTS = """
import os, pytest

@pytest.mark.parametrize("size", [1000, 2000])
def test_sizes(torchmem, size):
    torchmem.check(size, device="cpu", name="a check")

def test_other(torchmem):
    torchmem.check(3000, device="cpu")
"""
ELSE = checking("500, device='cpu', name='else'", name="else")


@pytest.fixture
def two(light):
    """A project with two modules and notes in the snapshots of one."""
    light.run("--torchmem-update", test_old=TESTS, test_else=ELSE, passed=4)
    light.edit("test_other cpu", module="test_old", reason="ours", ticket=7, tolerance="2%")
    file = light.file("test_old")
    data = json.loads(file.read_text())
    file.write_text(dump(load(json.dumps({**data, "$comment": "on top"}))))
    return light


def gone(project, name="test_old"):
    (project.path / f"{name}.py").unlink()


def test_a_deleted_module_is_told_and_removed(two):
    gone(two)
    with two.unchanged("test_old"):
        result = two.run()
        assert result.ret == 0
        result.tells(
            "obsolete: __torchmem__/test_old.json: its test module no longer exists (3 entries)",
            "  Remove obsolete entries: pytest --torchmem-update=obsolete",
            "1 memory check: 1 passed, 3 obsolete",
        )
        two.run("--torchmem-strict").fails()
        two.run("--torchmem-dry-run").fails()
    removed = two.run("--torchmem-update=obsolete")
    removed.tells("removed __torchmem__/test_old.json", "1 memory check: 1 passed, 3 removed")
    assert not two.file("test_old").exists()
    assert two.run("--torchmem-strict").ret == 0


@pytest.mark.parametrize(
    "options",
    [
        *("test_else.py", "test_else.py::test_else", "-k else", "--deselect test_more.py", "sub"),
        *("--ignore test_more.py", "--ignore-glob test_m*", "--torchmem-disable"),
    ],
)
def test_a_part_of_a_directory_proves_nothing(two, options):
    gone(two)
    two.write(test_more="def test_more(): pass\n")
    (two.path / "sub").mkdir()
    (two.path / "sub" / "test_sub.py").write_text("def test_sub(): pass\n")
    with two.unchanged("test_old"):
        told = two.run("--torchmem-update", "--torchmem-strict", *options.split())
        assert "obsolete" not in told.stdout.str()


@pytest.mark.parametrize(
    "breakage",
    ["def test_it(): assert False", "assert False", "def test_it(): raise KeyboardInterrupt"],
)
def test_a_run_that_did_not_pass_removes_nothing(two, breakage):
    gone(two)
    two.write(test_more=breakage + "\n")
    with two.unchanged("test_old"):
        two.run_apart("--torchmem-update")


@pytest.mark.parametrize("options", [[], ["-n", "1"], ["test_new.py"]], ids=" ".join)
def test_a_renamed_module_takes_its_file_along(two, options):
    before = two.file("test_old").read_text()
    (two.path / "test_old.py").rename(two.path / "test_new.py")
    two.run().tells("*/test_old.json has the same check, and its test module no longer exists*")
    run = two.run_apart if options else two.run
    result = run("--torchmem-update", *options)
    result.tells(
        "wrote __torchmem__/test_new.json",
        "removed __torchmem__/test_old.json",
        "  moved: test_other · cpu -> __torchmem__/test_new.json: test_other · cpu",
        "* memory checks: * 3 renamed",
    )
    assert two.file("test_new").read_text() == before
    assert not two.file("test_old").exists()
    assert two.run("--torchmem-strict").ret == 0


def test_a_module_moved_to_another_directory(two):
    before = two.file("test_old").read_text()
    (two.path / "sub").mkdir()
    (two.path / "test_old.py").rename(two.path / "sub" / "test_old.py")
    two.run().tells(
        "E * __torchmem__/test_old.json has the same check, and its test module no longer exists*",
        "renamed[?] __torchmem__/test_old.json: *Let it pass with --torchmem-update*",
    )
    two.run("--torchmem-update")
    assert (two.path / "sub" / "__torchmem__" / "test_old.json").read_text() == before
    assert not two.file("test_old").exists()


def test_what_fails_keeps_its_old_entry_until_it_passes(two):
    gone(two)
    two.write(test_new=TESTS.replace("torchmem.check(3000", "assert 0; torchmem.check(3000"))
    two.run("--torchmem-update", passed=3, failed=1)
    assert set(two.entries("test_old")) == {"test_other cpu"}
    two.run("--torchmem-update", test_new=TESTS)
    assert two.entries("test_new")["test_other cpu"]["reason"] == "ours"
    assert not two.file("test_old").exists()


def test_a_test_renamed_along_with_its_module(two):
    """Only a whole run that passes can tell: nothing else is like it."""
    gone(two)
    two.write(test_new=TESTS.replace("test_other", "test_called_otherwise"))
    two.run("--torchmem-update", "test_new.py")
    assert set(two.entries("test_old")) == {"test_other cpu"}
    two.file("test_new").unlink()
    two.run("--torchmem-update")
    assert two.entries("test_new")["test_called_otherwise cpu"]["ticket"] == 7


def test_an_entry_of_the_same_module_is_closer_than_one_of_a_deleted_module(light):
    light.run("--torchmem-update", test_net=OLD, test_gone=OLD)
    for module in ("test_net", "test_gone"):
        light.edit("test_old cpu", module=module, reason=f"of {module}")
    gone(light, "test_gone")
    light.run("--torchmem-update", test_net=OLD.replace("test_old", "test_new")).tells(
        "  renamed: test_old · cpu -> test_new · cpu",
        '  removed, with what was written into it: test_old · cpu: reason "of test_gone"',
    )
    assert light.entries()["test_new cpu"]["reason"] == "of test_net"


def test_two_heirs_are_none(two):
    gone(two)
    two.run("--torchmem-update", test_new=TESTS, test_copy=TESTS)
    assert "reason" not in two.entries("test_new")["test_other cpu"]
    assert "reason" not in two.entries("test_copy")["test_other cpu"]
    assert not two.file("test_old").exists()


def test_a_broken_file_of_a_deleted_module_is_told_and_kept(two):
    gone(two)
    two.file("test_old").write_text("{")
    two.run("--torchmem-update").fails("error: *test_old.json: is not JSON*")
    assert two.file("test_old").read_text() == "{"


def test_a_directory_that_has_nothing_but_snapshots(two):
    gone(two)
    gone(two, "test_else")
    result = two.run()
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.tells("obsolete: __torchmem__/test_else.json*", "obsolete: *old.json*")
    two.run("--torchmem-update")
    assert not two.file("test_old").parent.exists()


OLD = checking("1000, device='cpu'", name="old")


@pytest.mark.parametrize("options", [["test_net.py::test_new"], ["-k", "new"]], ids=" ".join)
@pytest.mark.parametrize("other", ["def test_plain(): pass\n", ""])
def test_a_rename_within_a_module_of_which_a_part_was_run(light, options, other):
    light.run("--torchmem-update", test_net=OLD)
    light.edit("test_old cpu", reason="why")
    light.write(test_net=OLD.replace("test_old", "test_new") + other)
    light.run("--torchmem-update", *options).tells("  renamed: test_old · cpu -> test_new · cpu")
    assert {test: one["reason"] for test, one in light.entries().items()} == {"test_new cpu": "why"}


@pytest.mark.parametrize("options", [["test_net.py::test_new"], ["-k", "new"]], ids=" ".join)
def test_a_part_that_leaves_it_open_says_so(light, options):
    light.run("--torchmem-update", test_net=OLD)
    light.edit("test_old cpu", reason="why")
    light.write(test_net=OLD.replace("old", "new") + OLD.replace("old", "other"))
    light.run("--torchmem-update", *options).tells(
        "renamed[?] *test_new · cpu may be the new name of test_old · cpu. Only a part of*by hand"
    )
    assert light.entries()["test_old cpu"]["reason"] == "why"
    assert "reason" not in light.entries()["test_new cpu"]
