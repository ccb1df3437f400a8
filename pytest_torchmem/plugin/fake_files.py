"""Beside pyfakefs, whose fixtures put a file system in memory in the place of the real one.

What is imported while that stands would keep its functions, and is forgotten with it
(pyfakefs/fake_filesystem_unittest.py, ``DynamicPatcher.cleanup``), so that there would be two of
each class. So this package is imported whole before.
"""

from importlib import import_module
from pkgutil import walk_packages

import pytest

import pytest_torchmem
from pytest_torchmem.checks.defaults import MARKER

_FIXTURES = frozenset({"fs", "fs_class", "fs_module", "fs_session"})
_IS_DONE: pytest.StashKey[bool] = pytest.StashKey()


def import_before(item: pytest.Item) -> None:
    """Import what checks need, where a test is about to see other files."""
    stash = item.session.stash
    if _IS_DONE in stash or _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return
    stash[_IS_DONE] = True
    if any(map(_has_checks, item.session.items)):
        for module in walk_packages(pytest_torchmem.__path__, f"{pytest_torchmem.__name__}."):
            import_module(module.name)


def _has_checks(item: pytest.Item) -> bool:
    has_fixture = "torchmem" in getattr(item, "fixturenames", ())
    return has_fixture or item.get_closest_marker(MARKER) is not None
