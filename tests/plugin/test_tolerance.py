"""Tolerances: what can be written, and whose rule holds."""

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

    assert text("cuda", "backward_peak") == "4%"
    assert text("cpu", "backward_peak") == "3%"
    assert text("cuda", "forward_peak") == "2%"
    assert text("cpu", "forward_peak") == "1%"


def test_the_first_level_that_has_a_rule_wins():
    levels = [parse_rules({"cuda": "5%"}, "marker"), (), parse_rules("3%", "argument"), BUILT_IN]
    assert str(find_rule(levels, "cuda", "peak")) == "5%, marker"
    assert str(find_rule(levels, "cpu", "peak")) == "3%, argument"
    assert str(find_rule([(), BUILT_IN], "cpu", "peak")) == "1%, the built-in default"


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
    assert (
        str(find_rule(for_path(rules, "other/a.py"), "cpu", "backward_peak"))
        == "3%, ini (backward)"
    )


@pytest.mark.parametrize("line", ["bakward: 2%", "cpu cuda: 2%", "cpu: lots", ": 2% x"])
def test_ini_lines_that_cannot_be_read(line):
    with pytest.raises(UsageError, match="ini"):
        parse_rule_lines(line, "ini")


def test_a_path_has_no_place_in_a_marker():
    with pytest.raises(UsageError, match="neither a device"):
        parse_rules({"tests/*": "2%"}, "the marker")
