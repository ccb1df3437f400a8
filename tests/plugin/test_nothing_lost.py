"""An update removes what is certainly gone, and nothing that might only have another name."""

import json

import pytest

from tests.plugin.conftest import DOUBLE, checking, git

TWO = """
import contextlib, pytest, unittest

def test_kept(torchmem):
    torchmem.check(3000, device="cpu")

def test_other(torchmem):
    torchmem.check(1000, device="cpu")
"""
RENAMED = TWO.replace("test_other", "test_called_otherwise")


@pytest.fixture
def noted(light):
    """A project with a note on an entry."""
    light.run("--torchmem-update", test_net=TWO, passed=2)
    light.edit("test_other cpu", reason="ours")
    return light


def notes(project, module="test_net"):
    return {name: e["reason"] for name, e in project.entries(module).items() if "reason" in e}


NOT_RUN = {
    "skipped": "@pytest.mark.skip\ndef test_called",
    "skipped if": "@pytest.mark.skipif(True, reason='no network')\ndef test_called",
    "not run": "@pytest.mark.xfail(run=False)\ndef test_called",
}
IN_BODY = {
    "skips itself": "    pytest.skip('later')",
    "fails as expected": "    pytest.xfail('later')",
    "a check that raises": "    with contextlib.suppress(ZeroDivisionError):\n"
    "        torchmem.check(lambda: 1 / 0, device='cpu')",
}


@pytest.mark.parametrize("case", [*NOT_RUN, *IN_BODY])
@pytest.mark.parametrize("module", ["test_net", "test_new"])
def test_a_renamed_test_that_did_not_run_keeps_its_old_entry(noted, case, module):
    """Whether its module has its old name or a new one."""
    text = RENAMED
    if case in NOT_RUN:
        text = text.replace("def test_called", NOT_RUN[case])
    else:
        head, line, rest = text.partition("def test_called_otherwise(torchmem):\n")
        text = head + line + IN_BODY[case] + "\n" + ("" if "check" in case else rest)
    (noted.path / "test_net.py").unlink()
    noted.write(**{module: text})
    result = noted.run("--torchmem-update")
    assert result.ret == 0
    assert notes(noted) == {"test_other cpu": "ours"}
    result.tells("renamed? *its entries without a test stay: *otherwise may be*")
    noted.write(**{module: RENAMED})
    noted.run("--torchmem-update", passed=2)
    assert notes(noted, module) == {"test_called_otherwise cpu": "ours"}
    assert noted.run("--torchmem-strict").ret == 0


def test_a_renamed_module_that_is_skipped_keeps_its_old_file(noted):
    (noted.path / "test_net.py").unlink()
    (noted.path / "sub").mkdir()
    skip = "import pytest\npytest.skip('no network', allow_module_level=True)\n"
    (noted.path / "sub" / "test_new.py").write_text(skip + TWO)
    noted.run("--torchmem-update", test_more="def test_more(): pass\n")
    assert notes(noted) == {"test_other cpu": "ours"}


def test_a_renamed_module_that_is_not_collected_keeps_its_old_file(noted):
    (noted.path / "test_net.py").rename(noted.path / "test_new.py")
    noted.write(conftest=f"{DOUBLE}collect_ignore = ['test_new.py']\n")
    noted.run("--torchmem-update", test_more="def test_more(): pass\n")
    assert notes(noted) == {"test_other cpu": "ours"}


OTHER = """    torchmem.check(1000, device="cpu")"""
HIDDEN = {
    "is not called": (["--setup-only"], ""),
    "is not set up": (["--setup-plan"], ""),
    "has another name than tests": (["-o", "python_functions=test_kept"], ""),
    "is left out by a plugin": (
        [],
        "def pytest_pycollect_makeitem(name):\n    return [] if name == 'test_other' else None\n",
    ),
    "is passed by a plugin": (
        [],
        "@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n"
        "    return 'other' in pyfuncitem.name or None\n",
    ),
    "has another report": (
        [],
        "@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
        "def pytest_runtest_makereport(item, call):\n"
        "    yield\n    return pytest.TestReport.from_item_and_call(item, call)\n",
    ),
    "returns early": ([], None),
}


@pytest.mark.parametrize("case", HIDDEN)
def test_a_test_that_did_not_come_to_its_check_keeps_its_entry(noted, monkeypatch, case):
    options, hook = HIDDEN[case]
    if hook is None:
        noted.write(test_net=TWO.replace(OTHER, f"    return\n{OTHER}"))
    else:
        noted.write(conftest=f"{DOUBLE}\nimport pytest\n{hook}")
    with noted.unchanged():
        result = noted.run("--torchmem-update", *options)
        assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    if not options:
        result.tells("kept: __torchmem__/test_net.json: * test_*")
    if hook is None:
        monkeypatch.setenv("CI", "true")
        noted.run().fails()


AT_THE_END = """
import os, pytest
from pathlib import Path

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    {}
"""


@pytest.mark.parametrize(
    "change",
    [
        "os.unlink('test_net.py')",
        "open('test_net.py', 'a').write('def test_other(torchmem): pass')",
        "file = Path('__torchmem__/test_net.json'); "
        "file.write_text(file.read_text().replace('test_kept', 'test_later'))",
    ],
)
def test_what_changes_while_the_tests_run_removes_nothing(noted, change):
    """The files of another branch, say, of which this run knows nothing."""
    kept, _, _ = TWO.partition("def test_other")
    noted.write(test_net=kept + checking("5000, device='cpu'", name="new"))
    assert noted.run("--torchmem-update", conftest=DOUBLE + AT_THE_END.format(change)).ret == 0
    assert notes(noted) == {"test_other cpu": "ours"}
    entries = noted.entries()
    assert "test_new cpu" in entries
    assert ("test_later cpu" in entries) == ("later" in change)


@pytest.mark.parametrize("part", [[], ["test_net.py"], ["test_b.py"]])
def test_modules_whose_files_a_link_makes_one(noted, part):
    """Neither's entries are obsolete because the other has no such test, or did not run."""
    (noted.path / "test_b.py").write_text(TWO.replace("test_other", "test_theirs"))
    noted.file("test_b").symlink_to("test_net.json")
    for _ in range(2):
        assert noted.run("--torchmem-update", *part).ret == 0
        entries = set(noted.entries())
        assert {"test_kept cpu", "test_other cpu"} <= entries
        assert ("test_theirs cpu" in entries) == (part != ["test_net.py"])
    assert notes(noted) == {"test_other cpu": "ours"}
    (noted.path / "test_net.py").unlink()
    assert noted.run("--torchmem-update").ret == 0
    assert noted.file("test_b").exists()


@pytest.mark.parametrize(
    "how", ["pytest.exit('enough', returncode=0)", "raise pytest.exit.Exception('x', 0)"]
)
def test_an_early_end_that_calls_itself_a_success(noted, how):
    (noted.path / "test_net.py").rename(noted.path / "test_renamed.py")
    noted.run("--torchmem-update", test_a=f"import pytest\ndef test_it():\n    {how}\n")
    assert notes(noted) == {"test_other cpu": "ours"}


RAISES = """
    with {}:
        torchmem.check(lambda: 1 / 0, device="cpu")
"""


@pytest.mark.parametrize(
    "caught",
    [
        "pytest.raises(ZeroDivisionError)",
        "contextlib.suppress(Exception)",
        "unittest.TestCase().assertRaises(ZeroDivisionError)",
    ],
)
def test_a_trace_that_raises_keeps_its_entry(noted, caught):
    test = TWO.replace(f"\n{OTHER}\n", RAISES.format(caught))
    result = noted.run("--torchmem-update", test_net=test)
    assert result.ret == 0
    assert notes(noted) == {"test_other cpu": "ours"}
    result.tells("1 test caught what a check raised, so that nothing was checked:*")
    noted.run("--torchmem-strict").fails()


@pytest.mark.parametrize(
    "options", [["-k", "one"], ["-m", "own"], ["--deselect", "a/test_two.py"], ["a/test_one.py"]]
)
def test_a_part_of_a_run_removes_no_file_of_a_directory_without_tests(light, options):
    light.ini("markers = own")
    for directory in ("a", "b"):
        (light.path / directory).mkdir()
    (light.path / "b" / "test_net.py").write_text(TWO)
    light.run("--torchmem-update", "b")
    file = light.path / "b" / "__torchmem__" / "test_net.json"
    (light.path / "b" / "test_net.py").unlink()
    one = "import pytest\n@pytest.mark.own\ndef test_one(): pass\n"
    (light.path / "a" / "test_one.py").write_text(one)
    (light.path / "a" / "test_two.py").write_text("def test_two(): pass\n")
    before = file.read_bytes()
    light.run("--torchmem-update", *options, passed=1, deselected="test_one" not in options[0])
    assert file.read_bytes() == before
    light.run("--torchmem-update")
    assert not file.exists()


def test_a_file_that_cannot_be_written_keeps_the_old_one(noted):
    """The disk is full when the renamed module's file is written."""
    (noted.path / "test_net.py").rename(noted.path / "test_new.py")
    fails = """
import errno
from pytest_torchmem.snapshots import store
real = store.write
def write(path, text):
    if path.name == "test_new.json":
        raise OSError(errno.ENOSPC, "No space left on device")
    real(path, text)
store.write = write
"""
    noted.run_apart("--torchmem-update", conftest=DOUBLE + fails).fails(
        "error: *test_new.json cannot be written: No space left on*",
        "* memory checks: *not written*",
    )
    assert notes(noted) == {"test_other cpu": "ours"}


@pytest.mark.parametrize(
    ("function", "answer"),
    [("json.dumps", "'{'"), ("os.replace", "None"), ("os.path.relpath", "''")],
)
def test_what_a_test_has_replaced_for_good_loses_no_entry(noted, function, answer):
    """What is written is read again, and what was there before comes back."""
    before = noted.file().read_bytes()
    replaces = f"""
import pytest
replaced = pytest.MonkeyPatch()

def pytest_runtest_setup(item):
    if "kept" in item.name:
        replaced.setattr({function!r}, lambda *_, **__: {answer})

def pytest_unconfigure():
    replaced.undo()
"""
    noted.write(test_net=TWO.replace("3000", "4000"), conftest=DOUBLE + replaces)
    result = noted.run("--torchmem-update", passed=2)
    if function == "os.path.relpath":
        assert set(noted.entries()) == {"test_kept cpu", "test_other cpu"}
        return
    result.fails("error: *test_net.json cannot be written: what was there stays*")
    if function == "json.dumps":
        assert noted.file().read_bytes() == before
    assert notes(noted) == {"test_other cpu": "ours"}


def test_proposals_are_never_read(noted, monkeypatch, command):
    noted.write(test_net=TWO.replace("3000", "9000"))
    for name, options in (("torchmem-proposal", ["CI"]), ("mine", ["--torchmem-proposal=mine"])):
        if options == ["CI"]:
            monkeypatch.setenv("CI", "true")
        noted.run(*(options if options != ["CI"] else ()))
        monkeypatch.delenv("CI", raising=False)
        assert (noted.path / name / "__torchmem__" / "test_net.json").exists()
    noted.write(test_net=TWO)
    assert "obsolete" not in noted.run().stdout.str()
    noted.run("--torchmem-update")
    assert (noted.path / "torchmem-proposal" / "__torchmem__" / "test_net.json").exists()
    assert (noted.path / "mine" / "__torchmem__" / "test_net.json").exists()
    monkeypatch.chdir(noted.path)
    for words in (["init"], ["add", "."], ["commit", "-m", "both"]):
        git(noted.path, *words)
    assert "2 unchanged" in command("compare", "HEAD")
    (noted.path / "mine" / "test_more.py").touch()  # no copy of the project, but a part of it
    noted.run().tells("obsolete: mine/__torchmem__/test_net.json: *")


def test_groups_of_workers_are_no_part_of_a_test(noted):
    grouped = TWO.replace("def test", "@pytest.mark.xdist_group('one')\ndef test")
    noted.write(test_net=grouped.replace("3000", "4000"))
    noted.run_apart("-n", "1", "--dist", "loadgroup", "--torchmem-update", passed=2)
    assert set(noted.entries()) == {"test_kept cpu", "test_other cpu"}
    assert noted.entries()["test_kept cpu"]["forward_peak"][0] == 4000
    assert notes(noted) == {"test_other cpu": "ours"}


def test_a_part_of_a_run_removes_nothing_of_a_module_that_it_saw_whole(noted):
    """Its tests were all seen, but the one that is missing may be among those taken away."""
    noted.write(test_net="", test_more="def test_more(torchmem): pass\ndef test_one(): pass\n")
    for option in (["-k", "one"], ["--deselect", "test_more.py::test_more"]):
        assert "obsolete" not in noted.run("--torchmem-update", *option).stdout.str()
        assert notes(noted) == {"test_other cpu": "ours"}
    noted.run("--torchmem-update", "test_net.py", "test_more.py::test_one")
    assert notes(noted) == {"test_other cpu": "ours"}


def test_what_people_wrote_is_said_when_it_goes(noted):
    noted.edit("test_other cpu", ticket=7, tolerance="2%")
    data = json.loads(noted.file().read_text())
    noted.file().write_text(json.dumps({**data, "$comment": "on top"}))
    note = '  *what was written into it: test_other · cpu: tolerance "2%", reason "ours", ticket 7'
    noted.write(test_net=TWO.replace("def test_other", "def other"))
    noted.run("--torchmem-update", "-x").tells(note)
    (noted.path / "test_net.py").unlink()
    noted.run("--torchmem-update").tells(
        "removed __torchmem__/test_net.json", '  *with what was written at its top: * "on top"'
    )


def test_a_test_that_moved_to_another_module_takes_its_entry_along(noted):
    other = TWO.partition("def test_other")
    more = checking("7", name="more")
    noted.run("--torchmem-update=new", test_net=other[0], test_more=more)
    moved = more + "".join(other[1:])
    result = noted.run("--torchmem-update", "test_net.py", test_more=moved)
    result.tells("renamed? *test_other · cpu may have moved to test_more.py, *")
    assert notes(noted) == {"test_other cpu": "ours"}
    for hindrance in ("@pytest.mark.skip", "@pytest.mark.xfail(run=False)"):
        hindered = moved.replace("def test_other", f"{hindrance}\ndef test_other")
        result = noted.run("--torchmem-update", test_more=hindered)
        result.tells("renamed? *test_more.py::test_other may be*")
        assert notes(noted) == {"test_other cpu": "ours"}
    noted.run("--torchmem-update=new", test_more=moved).tells(
        "  moved: test_other · cpu -> *test_more.json: test_other · cpu"
    )
    assert notes(noted, "test_more") == {"test_other cpu": "ours"}
    assert notes(noted) == {}
    assert noted.run("--torchmem-strict").ret == 0


def test_two_modules_that_exchange_their_tests(noted):
    head, name, body = TWO.partition("def test_other")
    more = checking("500, device='cpu'", name="more")
    noted.run("--torchmem-update", test_more=more)
    noted.edit("test_more cpu", module="test_more", reason="theirs")
    noted.run("--torchmem-update", test_net=head + more, test_more=name + body, passed=3)
    assert notes(noted) == {"test_more cpu": "theirs"}
    assert notes(noted, "test_more") == {"test_other cpu": "ours"}


def test_a_rename_is_one_also_where_only_new_entries_are_asked_for(noted):
    noted.run("--torchmem-update=new", test_net=RENAMED, passed=2)
    assert notes(noted) == {"test_called_otherwise cpu": "ours"}
    assert noted.run("--torchmem-strict").ret == 0


def test_sides_of_a_merge_conflict_that_differ_at_the_top(noted):
    text = json.dumps(json.loads(noted.file().read_text()), indent=2)
    sides = '<<<<<<< a\n  "$c": "ours",\n=======\n  "$c": "theirs",\n>>>>>>> b\n  "entries"'
    noted.file().write_text("\ufeff" + text.replace('  "entries"', sides))
    with noted.unchanged():
        noted.run("--torchmem-update", test_net=TWO.replace("3000", "9000")).tells(
            "error: *merge conflict differ at their top, in: $c. Resolve*"
        )
