"""``--torchmem-measure=stand-in`` where the process beside a run has no CUDA build of torch."""

from __future__ import annotations

import os

import pytest

from pytest_torchmem.plugin import stand_in
from pytest_torchmem.targets.gpus import Gpu

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
    def environment(gpu: Gpu) -> dict[str, str]:
        return dict(os.environ)

    monkeypatch.setattr(stand_in, "stand_in_environment", environment)


def run(pytester: pytest.Pytester, line: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_net=SUITE.format(line))
    return pytester.runpytest_inprocess("--torchmem-measure=stand-in", *options)


def test_a_cpu_build_is_refused_before_anything_runs(pytester: pytest.Pytester) -> None:
    result = run(pytester, "pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: the stand-in needs a CUDA build of torch*"])
    result.stdout.no_fnmatch_line("*test_net.py*")


def test_a_fake_gpu_for_the_suite_goes_with_no_measurement(pytester: pytest.Pytester) -> None:
    result = run(pytester, "pass", "--torchmem-fake-cuda=t4")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: torchmem: torchmem_measure: stand-in needs torch*"])


def test_one_check_does_not_name_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_net=SUITE.format("").replace("torch.ones(4, 8)", "{0}, measure={1}"))
    path = pytester.path / "test_net.py"
    path.write_text(path.read_text().format("torch.ones(4, 8)", "'stand-in'"))
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*check(measure=)*write auto, never or require*"])


def test_a_process_that_a_test_ends_is_followed_by_another(
    pytester: pytest.Pytester, without_stand_in: None
) -> None:
    line = "'TORCHMEM_STAND_IN_GPU' in os.environ and os.abort()"
    result = run(pytester, line, "--torchmem-json=report.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["not measured: test_net.py::test_it: the process with the stand-in was ended by SIGABRT"]
    )


def test_a_test_that_does_not_end_is_ended(
    pytester: pytest.Pytester, without_stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "_MOST_SECONDS", 2)
    line = "'TORCHMEM_STAND_IN_GPU' in os.environ and __import__('time').sleep(1000)"
    result = run(pytester, line)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["not measured: *::test_it: the test takes more than 2 s*"])


def test_a_process_that_cannot_begin_ends_the_run_with_its_last_line(
    pytester: pytest.Pytester, without_stand_in: None
) -> None:
    pytester.makeconftest(
        "import os\nif 'TORCHMEM_STAND_IN_GPU' in os.environ: raise ImportError('no such library')"
    )
    result = run(pytester, "pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --torchmem-measure=stand-in*no such library*"])
