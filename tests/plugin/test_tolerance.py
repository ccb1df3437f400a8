"""Tolerances, budgets of all memory tests, and both of the host's memory."""

import pytest

from pytest_torchmem.errors import UsageError
from pytest_torchmem.snapshots.tolerance import (
    BUILT_IN,
    find_rule,
    for_path,
    parse_rule_lines,
    parse_rules,
    parse_tolerance,
)
from tests.plugin.conftest import Project


@pytest.mark.parametrize(
    ("text", "before", "allowed"),
    [
        ("1%", 1000, 10),
        ("2.5 %", 1000, 25),
        (".5%", 1000, 5),
        ("64KiB", 1000, 65536),
        ("2%+64KiB", 1000, 20 + 65536),
        (" 64 KiB + 2 % ", 1000, 20 + 65536),
        ("0", 1000, 0),
        (512, 1000, 512),
        ("1%", 199, 1),
        ("33.3%", 10**18, 333 * 10**15),
    ],
)
def test_allowance(text, before, allowed):
    assert parse_tolerance(text).allowance(before) == allowed


@pytest.mark.parametrize(
    "value", ["", "  ", "much", "-1%", "1%+", "+", "%", -1, 0.01, None, True, []]
)
def test_what_is_no_tolerance(value):
    with pytest.raises(UsageError, match="is not a tolerance: write '2%'"):
        parse_tolerance(value)


def test_the_rule_that_says_most_holds():
    rules = parse_rules({"cuda backward": "4%", "backward": "3%", "cuda": "2%"}, "here")
    level = [*rules, *parse_rules("1%", "here")]

    def text(device: str, figure: str) -> str:
        return str(find_rule([level], device, figure).tolerance)

    phases = ("backward_peak", "forward_peak")
    assert [text("cuda", one) for one in phases] == ["4%", "2%"]
    assert [text("cpu", one) for one in phases] == ["3%", "1%"]


def test_the_first_level_that_has_a_rule_wins():
    levels = [parse_rules({"cuda": "5%"}, "marker"), (), parse_rules("3%", "argument"), BUILT_IN]
    assert str(find_rule(levels, "cuda", "peak")) == "5%, marker"
    assert str(find_rule(levels, "cpu", "peak")) == "3%, argument"
    assert str(find_rule([(), BUILT_IN], "cpu", "peak")) == "1%"


def test_ini_rules_for_paths():
    rules = parse_rule_lines(
        """
        2%
        backward: 3%
        # a comment
        tests/*: 4%
        tests/vision cuda peak: 5%+1KiB
        """,
        "ini",
    )
    special, general = for_path(rules, "tests/vision/test_net.py")
    assert [str(rule.tolerance) for rule in special] == ["5%+1KiB", "4%"]
    assert [str(rule.tolerance) for rule in general] == ["2%", "3%"]
    assert str(find_rule([special, general], "cuda", "peak").tolerance) == "5%+1KiB"
    assert str(find_rule([special, general], "cpu", "peak").tolerance) == "4%"
    assert for_path(rules, "other/test_net.py")[0] == ()
    found = find_rule(for_path(rules, "other/a.py"), "cpu", "backward_peak")
    assert str(found) == "3%, ini (backward)"


@pytest.mark.parametrize("line", ["bakward: 2%", "cpu cuda: 2%", "cpu: lots", ": 2% x"])
def test_ini_lines_that_cannot_be_read(line):
    with pytest.raises(UsageError, match="ini"):
        parse_rule_lines(line, "ini")


def test_a_path_has_no_place_in_a_marker():
    with pytest.raises(UsageError, match="neither a device"):
        parse_rules({"tests/*": "2%"}, "the marker")


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
        "unused: torchmem_budget (tests/[*]): no memory test has such a path",
    )
    assert "FAILED test_small.py::test_own_limit" not in result.stdout.str()
    for part in (["test_small.py"], ["-k", "checked"], ["-x"]):
        assert "unused" not in project.run(*part).stdout.str()


def test_a_marker_without_a_limit_keeps_to_it(project: Project) -> None:
    test = '@pytest.mark.memory_budget(device="cpu")\ndef test_it():\n    torch.randn(1 << 20)\n'
    project.run("--torchmem-update", test_net=f"import pytest, torch\n{test}", errors=1)
    project.run("--torchmem-update", "--torchmem-budget=5MiB", passed=1)
    project.run("--torchmem-budget=3MiB", failed=1)


def test_it_is_an_option(project: Project) -> None:
    project.run("--torchmem-update", test_net=TESTS)
    project.run(passed=3)
    project.run("--torchmem-budget=1MiB", passed=1, failed=2)


@pytest.mark.parametrize("written", ["5%", "many", "gpu: 1 GiB"])
def test_what_is_no_size_is_refused(project: Project, written: str) -> None:
    result = project.run(f"--torchmem-budget={written}", test_net=TESTS)
    result.is_refused("*torchmem: torchmem_budget*is not a [sd]*")


ON_THE_HOST = """
import numpy as np, os, pytest, torch

TIMES = int(os.environ.get("TIMES", "1"))

@pytest.mark.memory_budget(tolerance="1%", device="cuda")
def test_offloads():
    kept = [torch.randn(1000, 100, device="cuda") for _ in range(2)]
    kept = [one.cpu() for one in kept * TIMES]

@pytest.mark.memory_budget(tolerance="1%", device="cpu")
def test_loads():
    batch = torch.from_numpy(np.zeros((1000, 100 * TIMES)))

@pytest.mark.memory_budget(host="1 MiB", device="cuda")
def test_host_budget():
    kept = [torch.randn(1000, 100, device="cuda") for _ in range(2)]
    kept = [one.cpu() for one in kept * TIMES]

@pytest.mark.memory_budget("1 MiB", device="cpu")
def test_budget():
    batch = torch.from_numpy(np.zeros((1000, 100 * TIMES)))

@pytest.mark.memory_budget(growth="0", device="cuda")
def test_steps():
    weight, kept = torch.ones(100, 100, device="cuda", requires_grad=True), []
    for _ in range(4):
        (weight * 2).sum().backward()
        if TIMES > 1:
            kept.append(weight.grad.cpu())
"""


def test_what_grows_on_the_host_fails(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.run("--torchmem-update", test_net=ON_THE_HOST, passed=5)
    project.run(passed=5)
    monkeypatch.setenv("TIMES", "3")
    project.run(failed=5).tells(
        "*+1.53 MiB (+200.0 %) host peak, cuda*",
        "*host peak*781.2 KiB*2.29 MiB*",
        "*2.29 MiB peak of host memory exceeds the budget of*",
        "*1 MiB by 1.29 MiB (+128.9 %), cpu*",
        "*+39.06 KiB of host memory alive after a step*",
    )


def test_a_snapshot_without_it_had_nothing_there(project, monkeypatch):
    project.write(test_net=ON_THE_HOST)
    monkeypatch.setenv("TIMES", "0")
    project.run("--torchmem-update", "-k", "offloads", passed=1)
    monkeypatch.setenv("TIMES", "1")
    project.run("-k", "offloads", failed=1).tells("*+781.2 KiB*float32[[]1000, 100[]]*")
