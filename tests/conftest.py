"""What all tests share."""

from __future__ import annotations

import gc

import pytest

pytest_plugins = ["pytester"]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what is imported out of every later collection of garbage.

    A measurement collects several times, and torch's modules alone are a quarter of a second each.
    """
    gc.collect()
    gc.freeze()
