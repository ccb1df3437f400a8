"""The ini key ``torchmem_budget``: limits of every memory test."""

import pytest

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
[pytest]
torchmem_devices = cpu
torchmem_budget =
    3 MiB
    cpu backward: 2 MiB
    test_large.py: 1 GiB
    tests/*: 1 KiB
"""


def test_it_limits_every_memory_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_small=TESTS, test_large=TESTS)
    pytester.makeini(INI)
    pytester.runpytest("--torchmem-update")
    result = pytester.runpytest()
    result.assert_outcomes(passed=3, failed=3)  # test_large has no limit but that of the backward
    result.stdout.fnmatch_lines(
        [
            "*MiB backward peak exceeds the budget of 2 MiB, torchmem_budget (cpu backward) by*",
            "*4.00 MiB peak exceeds the budget of 3 MiB, torchmem_budget by 1.00 MiB*",
        ]
    )
    assert "FAILED test_small.py::test_own_limit" not in result.stdout.str()


def test_it_is_an_option(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    pytester.runpytest("--torchmem-update")
    pytester.runpytest().assert_outcomes(passed=3)
    result = pytester.runpytest("--torchmem-budget=1MiB")
    result.assert_outcomes(passed=1, failed=2)


@pytest.mark.parametrize("written", ["5%", "many", "gpu: 1 GiB"])
def test_what_is_no_size_is_refused(pytester: pytest.Pytester, written: str) -> None:
    pytester.makepyfile(TESTS)
    result = pytester.runpytest(f"--torchmem-budget={written}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*torchmem: torchmem_budget*"])
