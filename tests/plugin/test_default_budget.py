"""The ini key ``torchmem_budget``: limits of every memory test."""

import pytest

from tests.plugin.conftest import Project

TESTS = """
import pytest, torch

def test_checked(torchmem):
    torchmem.check(torch.nn.Linear(512, 512), torch.randn(8, 512))

@pytest.mark.memory_budget("8 GiB", device="cpu")
def test_own_limit():
    torch.randn(1 << 20)

@pytest.mark.memory_budget(forward="8 GiB", device="cpu")
def test_limit_of_another_figure():
    torch.randn(1 << 20)
"""
INI = """
torchmem_devices = cpu
torchmem_budget =
    3 MiB
    cpu backward: 2 MiB
    test_large.py: 1 GiB
    tests/*: 1 KiB
"""


def test_it_limits_every_memory_test(project: Project) -> None:
    project.write(test_small=TESTS, test_large=TESTS)
    project.ini(INI)
    project.run("--torchmem-update")
    result = project.run()
    result.assert_outcomes(passed=3, failed=3)  # test_large has no limit but that of the backward
    result.tells(
        "*MiB backward peak exceeds the budget of 2 MiB, torchmem_budget (cpu backward) by*",
        "*4.00 MiB peak exceeds the budget of 3 MiB, torchmem_budget by 1.00 MiB*",
    )
    assert "FAILED test_small.py::test_own_limit" not in result.stdout.str()


def test_it_is_an_option(project: Project) -> None:
    project.write(test_net=TESTS)
    project.run("--torchmem-update")
    project.run(passed=3)
    project.run("--torchmem-budget=1MiB", passed=1, failed=2)


@pytest.mark.parametrize("written", ["5%", "many", "gpu: 1 GiB"])
def test_what_is_no_size_is_refused(project: Project, written: str) -> None:
    project.write(test_net=TESTS)
    result = project.run(f"--torchmem-budget={written}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*torchmem: torchmem_budget*"])
