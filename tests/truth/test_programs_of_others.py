"""The corpus of others' programs: its manifest, its checksums, its classes, its record of lines."""

import runpy
import subprocess
from pathlib import Path

import pytest
import tomli

from benchmarks.programs_of_others.classify import Outcome, Run, classify
from benchmarks.programs_of_others.fetch import FetchError, digest, fetch
from benchmarks.programs_of_others.lines import executed_lines, first_difference
from benchmarks.programs_of_others.manifest import (
    HERE,
    MANIFEST,
    Entry,
    ManifestError,
    Source,
    read_manifest,
)

SOURCE = """
[sources.one]
repository = "https://github.com/someone/one"
commit = "{commit}"
licence = "MIT"
"""
PROGRAM = """
[[program]]
name = "{name}"
source = "{source}"
group = "scripts"
paths = ["main.py"]
sha256 = "{sha256}"
run = "main.py --epochs 1 '--name=a b'"
"""


def manifest(folder: Path, *programs: str, commit: str = "a" * 40) -> Path:
    path = folder / "manifest.toml"
    path.write_text(SOURCE.format(commit=commit) + "".join(programs))
    return path


def program(name: str = "main", source: str = "one", sha256: str = "b" * 64) -> str:
    return PROGRAM.format(name=name, source=source, sha256=sha256)


def test_the_manifest_is_read() -> None:
    entries = read_manifest()
    assert len(entries) >= 150
    for entry in entries:
        if entry.driver:
            module, _, name = entry.driver.partition(":")
            text = (HERE / "drivers" / f"{module}.py").read_text()
            assert f"def {name}(" in text, entry.name


def test_every_data_set_that_the_manifest_names_can_be_written() -> None:
    text = (HERE / "data.py").read_text()
    for row in tomli.loads(MANIFEST.read_text())["program"]:
        for name in row.get("data", ()):
            assert f"@writer\ndef {name.partition(':')[0]}(" in text, row["name"]


def test_arguments_are_split_as_a_shell_does(tmp_path: Path) -> None:
    (entry,) = read_manifest(manifest(tmp_path, program()))
    assert (entry.script, entry.arguments) == ("main.py", ("--epochs", "1", "--name=a b"))


@pytest.mark.parametrize(
    ("programs", "commit", "message"),
    [
        ((program(), program()), "a" * 40, "stand twice in the manifest: main"),
        ((program(source="two"),), "a" * 40, "there is no source 'two'"),
        ((program(sha256="b"),), "a" * 40, "sha256 is not 64 hexadecimal digits"),
        ((program(),), "main", "commit is not 40 hexadecimal digits"),
        ((program() + 'driver = "a:b"\n',), "a" * 40, "say either run, driver or suite"),
    ],
)
def test_what_cannot_be_right_is_said(tmp_path, programs, commit, message):
    with pytest.raises(ManifestError, match=message):
        read_manifest(manifest(tmp_path, *programs, commit=commit))


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A mirror with one repository of one commit."""
    git = tmp_path / "mirrors" / "someone" / "one.git"
    git.mkdir(parents=True)
    (git / "main.py").write_text("print('hello')\n")
    (git / "other.py").write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=git, check=True)
    asked = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(asked, cwd=git, check=True, capture_output=True, text=True).stdout
    (git / ".git").rename(tmp_path / "bare")
    for path in git.iterdir():
        path.unlink()
    git.rmdir()
    (tmp_path / "bare").rename(git)
    return tmp_path / "mirrors", commit.strip()


def test_the_files_of_a_commit_are_fetched_and_checked(tmp_path, repository):
    mirrors, commit = repository
    expected = tmp_path / "expected"
    expected.mkdir()
    (expected / "main.py").write_text("print('hello')\n")
    source = Source("one", "MIT", "https://github.com/someone/one", commit)
    entry = Entry("main", source, "scripts", ("main.py",), digest(expected), script="main.py")
    folder = fetch(entry, tmp_path / "cache", mirrors)
    assert [path.name for path in folder.iterdir()] == ["main.py"]
    (folder / "main.py").write_text("print('bye')\n")
    with pytest.raises(FetchError, match=r"main: the files in .* have the checksum"):
        fetch(entry, tmp_path / "cache", mirrors)


@pytest.mark.parametrize(
    ("real", "traced", "difference", "outcome"),
    [
        (Run("raised"), Run("ok"), "", Outcome.NOT_FOR_REAL),
        (Run("ok"), Run("ok"), "", Outcome.RUNS),
        (Run("ok"), Run("ok"), "a.py:3", Outcome.WRONG_BRANCH),
        (Run("ok"), Run("raised", by_torchmem=True), "", Outcome.ONE_SENTENCE),
        (Run("ok"), Run("raised"), "", Outcome.FAILS_BADLY),
        (Run("ok"), Run("signal"), "", Outcome.CRASH),
        (Run("ok"), Run("lost"), "", Outcome.CRASH),
        (Run("ok"), Run("limit"), "", Outcome.TOO_LONG),
    ],
)
def test_what_became_of_a_program(real, traced, difference, outcome):
    assert classify(real, traced, difference) is outcome


LINES = """
found = [value for value in range(COUNT)]
if CUDA:
    place = "cuda"
for value in found:
    if value > LIMIT:
        print(value)
"""


def lines_of(path: Path, **values: object) -> dict[str, dict[int, int]]:
    with executed_lines((str(path.parent),), str(path)) as counts:
        runpy.run_path(str(path), values)
    return counts


def test_another_branch_is_found_unless_the_device_decides_it(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(LINES)
    real = lines_of(path, COUNT=3, CUDA=False, LIMIT=5)
    assert not first_difference(real, lines_of(path, COUNT=3, CUDA=False, LIMIT=5))
    assert not first_difference(real, lines_of(path, COUNT=3, CUDA=True, LIMIT=5))
    found = first_difference(real, lines_of(path, COUNT=3, CUDA=True, LIMIT=1))
    assert found == f"{path}:7: 0 times for real, 1 traced: print(value)"
