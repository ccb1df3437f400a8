"""The files of ``examples/ci``: what they call exists, and what they name is what a run writes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_torchmem.cli import _parser
from pytest_torchmem.snapshots.location import snapshot_path

CI = Path(__file__).parents[2] / "examples" / "ci"


def _load(name: str) -> Any:
    return yaml.safe_load((CI / name).read_text(encoding="utf-8"))


def _scripts() -> dict[str, str]:
    """Return every shell script of the files by where it stands."""
    scripts = {}
    for step in _load("github-actions.yml")["jobs"]["memory"]["steps"]:
        if "run" in step:
            # What the runner puts in is a word or a part of one.
            scripts[f"github: {step['name']}"] = re.sub(r"\$\{\{.*?\}\}", "main", step["run"])
    job = _load("gitlab-ci.yml")["memory"]
    for section in ("before_script", "script", "after_script"):
        scripts[f"gitlab: {section}"] = "\n".join(job[section])
    for hook in _load("pre-commit-config.yaml")["repos"][0]["hooks"]:
        scripts[f"pre-commit: {hook['id']}"] = hook["entry"]
    return scripts


def _commands(program: str) -> Iterator[list[str]]:
    """Return the arguments of every call of ``program``."""
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
    light.write(test_net="def test_it(torchmem): torchmem.check(1)")
    commands = [
        [word for word in line if word not in ("-n", "auto")] for line in _commands("pytest")
    ]
    assert len(commands) == 3
    for command in commands:
        assert _pytest_understands(light, command), command
    assert not _pytest_understands(light, ["--torchmem-jsn=memory.json"])


def test_what_is_uploaded_is_what_a_run_writes(light, monkeypatch):
    monkeypatch.setenv("CI", "true")
    light.write(test_net="def test_it(torchmem): torchmem.check(1)")
    for options in _commands("pytest"):
        light.run(*(word for word in options if word.startswith(("--torchmem", "--junit"))))
    steps = _load("github-actions.yml")["jobs"]["memory"]["steps"]
    uploads = [step["with"] for step in steps if "upload-artifact" in step.get("uses", "")]
    job = _load("gitlab-ci.yml")["memory"]["artifacts"]
    paths = [path for upload in uploads for path in upload["path"].split()]
    paths += [*job["paths"], job["reports"]["junit"]]
    assert len(paths) == 7
    for path in paths:
        assert (light.path / path).exists(), path


def test_the_hook_is_run_on_snapshot_files():
    verify = _load("pre-commit-config.yaml")["repos"][0]["hooks"][0]
    path = snapshot_path(Path("tests/memory/test_net.py")).as_posix()
    assert re.search(verify["files"], path)
    assert not re.search(verify["files"], "tests/memory/data.json")
