"""``--torchmem-measure=stand-in`` where the process beside a run has no CUDA build of torch."""

import os

import pytest

from pytest_torchmem.plugin import stand_in
from tests.plugin.conftest import Project, Result

SUITE = """
import os
import pytest
import torch
from torch import nn

@pytest.mark.memory_budget("1 GiB", device="cuda")
def test_it(torchmem):
    {}
    torchmem.check(nn.Linear(8, 8), torch.ones(4, 8))

def test_other():
    pass
"""


@pytest.fixture
def without_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "stand_in_environment", lambda gpu: dict(os.environ))


def run(project: Project, line: str, *options: str, **outcomes: int) -> Result:
    project.write(test_net=SUITE.format(line))
    return project.run("--torchmem-measure=stand-in", *options, **outcomes)


def test_without_a_cuda_build_it_is_refused(project: Project) -> None:
    result = run(project, "pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: the stand-in needs a CUDA build of torch*"])
    result.stdout.no_fnmatch_line("*test_net.py*")
    result = run(project, "pass", "--torchmem-fake-cuda=t4")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: torchmem: torchmem_measure: stand-in needs torch*"])
    project.write(test_net=SUITE.format("").replace("torch.ones(4, 8)", "{0}, measure={1}"))
    path = project.path / "test_net.py"
    path.write_text(path.read_text().format("torch.ones(4, 8)", "'stand-in'"))
    project.run().tells("*check(measure=)*write auto, never or require*")


def test_a_process_that_a_test_ends_is_followed_by_another(project, without_stand_in):
    line = "'TORCHMEM_STAND_IN_GPU' in os.environ and os.abort()"
    run(project, line, "--torchmem-json=report.json", passed=2).tells(
        "not measured: test_net.py::test_it: the process with the stand-in was ended by SIGABRT"
    )


def test_a_test_that_does_not_end_is_ended(project, without_stand_in, monkeypatch):
    monkeypatch.setattr(stand_in, "_MOST_SECONDS", 2)
    line = "'TORCHMEM_STAND_IN_GPU' in os.environ and __import__('time').sleep(1000)"
    run(project, line, passed=2).tells("not measured: *::test_it: the test takes more than 2 s*")


def test_a_process_that_cannot_begin_ends_the_run_with_its_last_line(project, without_stand_in):
    project.write(
        conftest="import os\nif 'TORCHMEM_STAND_IN_GPU' in os.environ:\n"
        "    raise ImportError('no such library')\n"
    )
    result = run(project, "pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --torchmem-measure=stand-in*no such library*"])
