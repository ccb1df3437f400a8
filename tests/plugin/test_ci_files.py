"""The files for CI: what they call exists, and they do what they say in a small repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_torchmem.cli import _parser
from pytest_torchmem.snapshots.location import snapshot_path
from tests.plugin.conftest import checking, git

ROOT = Path(__file__).parents[2]
CI = ROOT / "examples" / "ci"


def _load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


ACTION = _load(ROOT / "action.yml")
STEPS = ACTION["runs"]["steps"]
GITLAB = _load(CI / "gitlab-ci.yml")["memory"]


def _scripts() -> dict[str, str]:
    """Return every shell script of the files by where it stands."""
    scripts = {f"github: {step['name']}": step["run"] for step in STEPS if "run" in step}
    for section in ("before_script", "script", "after_script"):
        scripts[f"gitlab: {section}"] = "\n".join(GITLAB[section])
    for hook in _load(CI / "pre-commit-config.yaml")["repos"][0]["hooks"]:
        scripts[f"pre-commit: {hook['id']}"] = hook["entry"]
    return scripts


def _commands(program: str) -> Iterator[list[str]]:
    for script in _scripts().values():
        for line in script.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words[:1] == [program]:
                ends = [words.index(word) for word in ("||", "&&", ";", "|") if word in words]
                yield words[1 : min(ends, default=len(words))]


def _torchmem_understands(arguments: list[str]) -> bool:
    try:
        _parser().parse_args(arguments)
    except SystemExit:
        return False
    return True


def _pytest_understands(project, arguments: list[str]) -> bool:
    options = [argument for argument in arguments if argument.startswith("-")]
    return project.run("--collect-only", *options).ret == pytest.ExitCode.OK


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("where", _scripts())
def test_scripts_are_bash(where):
    command = ["bash", "-n", "-c", _scripts()[where]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_torchmem_commands_are_understood():
    commands = list(_commands("torchmem"))
    assert {command[0] for command in commands} == {"compare", "verify"}
    for command in commands:
        assert _torchmem_understands(command), command
    assert not _torchmem_understands(["compare", "a", "b", "--outpt=change.md"])


def test_pytest_options_are_understood(light, monkeypatch):
    monkeypatch.setenv("CI", "true")
    light.write(test_net=checking("1"))
    left_out = ("-n", "auto", "$ARGUMENTS")
    commands = [[word for word in line if word not in left_out] for line in _commands("pytest")]
    assert len(commands) == 3
    for command in commands:
        assert _pytest_understands(light, command), command
    assert not _pytest_understands(light, ["--torchmem-jsn=memory.json"])


def test_what_is_uploaded_is_what_a_run_writes(light, monkeypatch):
    monkeypatch.setenv("CI", "true")
    light.write(test_net=checking("1"))
    for options in _commands("pytest"):
        light.run(*(word for word in options if word.startswith(("--torchmem", "--junit"))))
    uploads = [step["with"] for step in STEPS if "upload-artifact" in step.get("uses", "")]
    job = GITLAB["artifacts"]
    paths = [path for upload in uploads for path in upload["path"].split()]
    paths += [*job["paths"], job["reports"]["junit"]]
    assert len(paths) == 8
    for path in paths:
        assert (light.path / path).exists(), path


def test_the_hook_is_run_on_snapshot_files():
    verify = _load(CI / "pre-commit-config.yaml")["repos"][0]["hooks"][0]
    assert re.search(verify["files"], snapshot_path(Path("tests/memory/test_net.py")).as_posix())
    assert not re.search(verify["files"], "tests/memory/data.json")


def test_the_example_gives_the_action_what_it_takes():
    steps = _load(CI / "github-actions.yml")["jobs"]["memory"]["steps"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (repository,) = re.findall(r'^Source = "https://github.com/(.*)"', project, re.M)
    (version,) = re.findall(r'^version = "(.*)"', project, re.M)
    assert steps[-1]["uses"] == f"{repository}@v{version}"
    assert set(steps[-1]["with"]) <= set(ACTION["inputs"])


PULL_REQUEST = {"github.base_ref": "main", "github.event.pull_request.number": "7"}
OUTCOME = {0: "success", 1: "failure"}
NO_NETWORK = """#!/usr/bin/env bash
echo "$(basename "$0")" "$@" >> "$CALLS"
last="${!#}"
case "$last" in body=@*) cat "${last#body=@}" >> "$CALLS";; esac
"""


class Repository:
    """A clone with a pull request, in which scripts of CI run; pip and gh note their calls."""

    def __init__(self, project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        origin, tools = project.path / "origin", project.path / "tools"
        self.path, self.calls = project.path / "clone", project.path / "calls"
        self.summary = project.path / "summary"
        tools.mkdir()
        for name in ("pip", "gh"):
            (tools / name).write_text(NO_NETWORK)
            (tools / name).chmod(0o755)
        places = (str(tools), str(Path(sys.executable).parent), os.environ["PATH"])
        monkeypatch.setenv("PATH", os.pathsep.join(places))
        monkeypatch.setenv("CALLS", str(self.calls))
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(self.summary))
        monkeypatch.setenv("GITHUB_REPOSITORY", "me/it")
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        # A module that is written twice in a second is read from its bytecode, as it was.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        git(project.path, "init", "--quiet", "--initial-branch=main", str(origin))
        self._commit(origin, 64)
        git(project.path, "clone", "--quiet", "--depth=1", origin.as_uri(), str(self.path))
        self._commit(self.path, 96)
        monkeypatch.setenv("CI", "true")

    def _commit(self, folder: Path, width: int) -> None:
        """Commit a test whose model is ``width`` wide, with its snapshot."""
        here = self.project.path
        self.project.write(test_net=checking(str(width)))
        self.project.run("test_net.py", "--torchmem-update", passed=1)
        names = ("conftest.py", "test_net.py", "__torchmem__/test_net.json")
        (folder / "__torchmem__").mkdir(exist_ok=True)
        for name in names:
            shutil.copy(here / name, folder / name)
        git(folder, "add", *names)
        git(folder, "commit", "--quiet", "--message", f"width {width}")

    def run(self, script: str, **environment: str) -> int:
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
        environment = {**os.environ, **environment}
        return subprocess.run(command, cwd=self.path, env=environment, check=False).returncode


@pytest.fixture
def repository(light, monkeypatch) -> Repository:
    return Repository(light, monkeypatch)


def _value(expression: str, inputs: dict[str, str], outcomes: dict[str, str]) -> str:
    """Return what a runner puts in the place of an expression."""
    values = PULL_REQUEST | outcomes | {"github.action_path": "/action", "github.token": "secret"}
    values |= {f"inputs.{name}": one["default"] for name, one in ACTION["inputs"].items()}
    values |= {f"inputs.{name}": value for name, value in inputs.items()}
    return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: values[found[1]], expression)


def _run_action(repository: Repository, only: str = "", **inputs: str) -> dict[str, int]:
    """Run the action's steps for a pull request, or one, and return the exit status of each."""
    statuses, outcomes = {}, {}
    for step in (step for step in STEPS if "run" in step and only in step["name"]):
        values = {name: _value(text, inputs, outcomes) for name, text in step["env"].items()}
        status = statuses[step["name"]] = repository.run(step["run"], **values)
        outcomes[f"steps.{step.get('id')}.outcome"] = OUTCOME[status]
    return statuses


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_action_says_what_a_pull_request_accepts(repository):
    assert set(_run_action(repository).values()) == {0}
    assert "test_net.py::test_it" in repository.summary.read_text()
    calls = repository.calls.read_text()
    assert "pip install -e . /action" in calls
    comment = "gh api repos/me/it/issues/7/comments -F body=@comment.md\n<!-- pytest-torchmem -->"
    assert comment in calls
    gate = "What the pull request changes"
    assert _run_action(repository, gate, growth="fail") == {gate: 1}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_action_fails_on_growth_that_no_snapshot_accepts(repository):
    test = repository.path / "test_net.py"
    test.write_text(test.read_text().replace("96", "128"))
    assert [name for name, status in _run_action(repository).items() if status] == ["Memory tests"]
    comment = (repository.path / "comment.md").read_text()
    titles = re.findall(r"^### (.*): 2 grew$", comment, re.M)
    assert titles == ["Memory", "Memory snapshots, origin/main → HEAD"]
    assert comment in repository.calls.read_text()
    assert (repository.path / "torchmem-proposal" / "__torchmem__" / "test_net.json").exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_gitlab_says_what_a_merge_request_accepts(repository):
    base = {"CI_MERGE_REQUEST_DIFF_BASE_SHA": "origin/main", "TORCHMEM": "/plugin"}
    for section in ("before_script", "script", "after_script"):
        script = "\n".join(GITLAB[section]).replace("-n auto", "")  # two processes, for one test
        assert repository.run(f"exec >> {repository.summary}\n{script}", **base) == 0
    assert "pip install -e . /plugin" in repository.calls.read_text()
    assert "test_net.py::test_it" in repository.summary.read_text()
