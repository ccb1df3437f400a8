"""pytest does not compile the modules of this package a second time, and finds all others."""

import sys

import pytest

_TEST = """
import sys
import a_plugin, pytest_torchmem.units
from pytest_torchmem.plugin import collection, hooks

def loader_of(module):
    return type(module.__spec__.loader).__name__

def test_loaders():
    for module in (pytest_torchmem.units, collection, hooks):
        assert loader_of(module) == "SourceFileLoader", module
    assert loader_of(sys.modules[__name__]) == loader_of(a_plugin) == "AssertionRewritingHook"
"""


def test_only_this_package_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(_TEST)
    pytester.makepyfile(a_plugin="")
    pytester.makeconftest("import pytest; pytest.register_assert_rewrite('a_plugin')")
    pytester.runpytest_subprocess("-p", "a_plugin").assert_outcomes(passed=1)


@pytest.mark.parametrize("options", [(), ("--assert=plain",), ("--no-such-option",)])
def test_what_finds_modules_is_as_before(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    before = list(sys.meta_path)
    for _ in range(2):
        pytester.runpytest_inprocess(*options)
    assert sys.meta_path == before
